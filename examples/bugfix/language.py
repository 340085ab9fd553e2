"""The mini-language of the BugFix gym: one statement a line, and an interpreter that always comes back.

A program reads the inputs `a`, `b` and `c` and leaves its result in `r`, which starts at 0::

    statement  = name "=" expression
               | "if" condition ":" statement
               | "while" condition ":" statement
               | "repeat" atom ":" statement
    expression = atom | atom ("+" | "-" | "*" | "/" | "%") atom          ("/" and "%" round down)
    condition  = atom ("<" | ">" | "==") atom
    atom       = name | digit

Nothing is handed to Python's `exec` or `eval`: lines are parsed into small records and walked. Whatever a policy
writes has a result: a division by zero, a value beyond `MAX_VALUE` and a program beyond `MAX_STEPS` steps are
outcomes with an error word, not exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

INPUTS = ("a", "b", "c")
RESULT = "r"
NAMES = (*INPUTS, RESULT)
DIGITS = tuple("0123456789")
OPERATORS = ("+", "-", "*", "/", "%")
COMPARISONS = ("<", ">", "==")

MAX_LINES = 4
MAX_LINE_WORDS = 16
MAX_STEPS = 200
MAX_VALUE = 9999


class ProgramSyntaxError(ValueError):
    """A line that is not a statement of the mini-language."""


class _RunError(Exception):
    """Ends a run early; the argument is the error word of the outcome."""


@dataclass(frozen=True)
class Expression:
    """One atom, or two atoms joined by an operator."""

    left: str
    operator: str | None = None
    right: str | None = None


@dataclass(frozen=True)
class Assignment:
    """`name = expression`."""

    name: str
    expression: Expression


@dataclass(frozen=True)
class Condition:
    """`left comparison right`."""

    left: str
    comparison: str
    right: str


@dataclass(frozen=True)
class Guarded:
    """`if` or `while`: a body that runs once, or again and again, where the condition holds."""

    keyword: str
    condition: Condition
    body: Statement


@dataclass(frozen=True)
class Repeat:
    """`repeat count : body`; a count below 1 runs nothing."""

    count: str
    body: Statement


Statement = Assignment | Guarded | Repeat


@dataclass(frozen=True)
class Outcome:
    """What a run came to: a value, or the word for why there is none.

    Attributes:
        value: The final value of `r`; None where the run ended early.
        error: `"zero"` (division by zero), `"huge"` (a value beyond `MAX_VALUE`), `"limit"` (more than
            `MAX_STEPS` steps), or None.
    """

    value: int | None
    error: str | None = None


def parse_line(words: Sequence[str]) -> Statement:
    """Parses the words of one line.

    Args:
        words: The words of the line, without its number.

    Returns:
        The statement.

    Raises:
        ProgramSyntaxError: The words are not a statement, or there are more than `MAX_LINE_WORDS`.

    Example:
        >>> parse_line("r = a + 2".split())
        Assignment(name='r', expression=Expression(left='a', operator='+', right='2'))
    """
    if len(words) > MAX_LINE_WORDS:
        raise ProgramSyntaxError(f"a line has at most {MAX_LINE_WORDS} words, got {len(words)}; shorten it")
    return _parse_statement(list(words))


def parse_program(lines: Sequence[str]) -> tuple[Statement, ...]:
    """Parses a program given as one string per line.

    Args:
        lines: 1 to `MAX_LINES` lines, words separated by spaces.

    Returns:
        One statement per line.

    Raises:
        ProgramSyntaxError: A line is not a statement, or the number of lines is out of range.

    Example:
        >>> len(parse_program(["r = a * b", "if r > 9 : r = 9"]))
        2
    """
    if not 1 <= len(lines) <= MAX_LINES:
        raise ProgramSyntaxError(f"a program has 1 to {MAX_LINES} lines, got {len(lines)}")
    return tuple(parse_line(line.split()) for line in lines)


def run_program(lines: Sequence[str], inputs: Mapping[str, int]) -> Outcome:
    """Runs a program on one set of inputs.

    Args:
        lines: The program, one string per line.
        inputs: A value for each of `INPUTS`; a missing one counts as 0.

    Returns:
        The value of `r` at the end, or the error word.

    Raises:
        ProgramSyntaxError: The program cannot be parsed.

    Example:
        >>> run_program(["r = a + b", "repeat 3 : r = r * 2"], {"a": 1, "b": 2})
        Outcome(value=24, error=None)
        >>> run_program(["while 1 > 0 : r = r + 0"], {})
        Outcome(value=None, error='limit')
    """
    statements = parse_program(lines)
    run = _Run({name: int(inputs.get(name, 0)) for name in NAMES})
    try:
        for statement in statements:
            run.execute(statement)
    except _RunError as stop:
        return Outcome(None, str(stop))
    return Outcome(run.values[RESULT])


def _parse_statement(words: list[str]) -> Statement:
    keyword = words[0] if words else ""
    if keyword in ("if", "while"):
        if len(words) < 6 or words[4] != ":" or words[2] not in COMPARISONS:
            raise _syntax_error(words, f"{keyword} atom comparison atom : statement")
        condition = Condition(_parse_atom(words[1]), words[2], _parse_atom(words[3]))
        return Guarded(keyword, condition, _parse_statement(words[5:]))
    if keyword == "repeat":
        if len(words) < 4 or words[2] != ":":
            raise _syntax_error(words, "repeat atom : statement")
        return Repeat(_parse_atom(words[1]), _parse_statement(words[3:]))
    if keyword in NAMES and len(words) in (3, 5) and words[1] == "=":
        return Assignment(keyword, _parse_expression(words[2:]))
    raise _syntax_error(words, "name = expression, or a line that starts with if, while or repeat")


def _parse_expression(words: list[str]) -> Expression:
    if len(words) == 1:
        return Expression(_parse_atom(words[0]))
    if words[1] not in OPERATORS:
        raise _syntax_error(words, "atom operator atom")
    return Expression(_parse_atom(words[0]), words[1], _parse_atom(words[2]))


def _parse_atom(word: str) -> str:
    if word not in NAMES and word not in DIGITS:
        raise _syntax_error([word], "one of a, b, c, r or a digit")
    return word


def _syntax_error(words: Sequence[str], expected: str) -> ProgramSyntaxError:
    return ProgramSyntaxError(f"got {' '.join(words)!r}, expected {expected}")


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right,
    "%": lambda left, right: left % right,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<": lambda left, right: left < right,
    ">": lambda left, right: left > right,
    "==": lambda left, right: left == right,
}


class _Run:
    """The variables of a run and the steps it has used."""

    def __init__(self, values: dict[str, int]) -> None:
        self.values = values
        self.steps = 0

    def execute(self, statement: Statement) -> None:
        self._count_step()
        if isinstance(statement, Assignment):
            self.values[statement.name] = self._evaluate(statement.expression)
        elif isinstance(statement, Repeat):
            for _ in range(self._atom(statement.count)):
                self.execute(statement.body)
        elif statement.keyword == "if":
            if self._holds(statement.condition):
                self.execute(statement.body)
        else:
            while self._holds(statement.condition):
                self._count_step()
                self.execute(statement.body)

    def _count_step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _RunError("limit")

    def _evaluate(self, expression: Expression) -> int:
        value = self._atom(expression.left)
        if expression.operator is not None and expression.right is not None:
            right = self._atom(expression.right)
            if expression.operator in ("/", "%") and right == 0:
                raise _RunError("zero")
            value = _ARITHMETIC[expression.operator](value, right)
        if abs(value) > MAX_VALUE:
            raise _RunError("huge")
        return value

    def _holds(self, condition: Condition) -> bool:
        return _COMPARE[condition.comparison](self._atom(condition.left), self._atom(condition.right))

    def _atom(self, word: str) -> int:
        return self.values[word] if word in self.values else int(word)
