"""Seeded tasks of the BugFix gym: short programs, each with exactly one bug in one line.

Every line has a comment that says in words what it should do (`a minus b`, then `times 3`); one line does something
else (`r = a + b`). The bug comes from one of five families and changes one place of one line. The visible test is what
the tool `run` shows; the hidden ones decide the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from random import Random
from typing import TypedDict

from .language import INPUTS, Outcome, run_program

NUM_TRAINING_TASKS = 20
NUM_HELD_OUT_TASKS = 10
NUM_HIDDEN_TESTS = 6
_WORD_OF_OPERATOR = {"+": "plus", "-": "minus", "*": "times", "/": "over", "%": "mod"}


class ProgramTest(TypedDict):
    """Inputs by name, and the value that the program should leave in `r`."""

    inputs: dict[str, int]
    want: int


class BugFixTask(TypedDict):
    """One task; all fields are plain data, so a task can be stored as JSON or as a row of a data set.

    Attributes:
        id: Split, number and family, for example `"train-03-variable"`.
        family: A key of `BUG_FAMILIES`.
        comments: What each line should do, in words.
        program: The lines, one of them with a bug.
        reference: The lines that do what the comments say.
        visible_test: The test that `run` tries.
        visible_trace: What the reference leaves in `r` after each line, in the visible test.
        hidden_tests: The tests behind the reward.
    """

    id: str
    family: str
    comments: list[str]
    program: list[str]
    reference: list[str]
    visible_test: ProgramTest
    visible_trace: list[int]
    hidden_tests: list[ProgramTest]


def bugfix_tasks(seed: int = 0) -> tuple[list[BugFixTask], list[BugFixTask]]:
    """Makes the training and the held-out tasks; no program is in both.

    Args:
        seed: Decides all tasks.

    Returns:
        20 training tasks and 10 held-out tasks, every bug family in equal numbers.

    Example:
        >>> training, held_out = bugfix_tasks()
        >>> len(training), len(held_out), training[0]["id"]
        (20, 10, 'train-00-operator')
    """
    taken: set[tuple[str, ...]] = set()
    tasks = []
    for task in _generate(Random(f"bugfix-{seed}"), taken):
        taken.add(tuple(task["reference"]))
        tasks.append(task)
        if len(tasks) == NUM_TRAINING_TASKS + NUM_HELD_OUT_TASKS:
            break
    training, held_out = tasks[:NUM_TRAINING_TASKS], tasks[NUM_TRAINING_TASKS:]
    return (
        [_named(task, "train", index) for index, task in enumerate(training)],
        [_named(task, "held-out", index) for index, task in enumerate(held_out)],
    )


def practice_tasks(number: int, seed: int = 0) -> list[BugFixTask]:
    """Makes tasks for demonstrations; none of their programs is a training or held-out program of the same seed.

    Args:
        number: How many.
        seed: Decides all tasks; give the seed of `bugfix_tasks`.

    Returns:
        `number` tasks, the bug families in turn.

    Example:
        >>> [task["id"] for task in practice_tasks(2)]
        ['practice-00-operator', 'practice-01-constant']
    """
    training, held_out = bugfix_tasks(seed)
    taken = {tuple(task["reference"]) for task in training + held_out}
    tasks = _generate(Random(f"bugfix-practice-{seed}"), taken)
    return [_named(task, "practice", index) for index, task in enumerate(islice(tasks, number))]


def passes(program: Sequence[str], tests: Sequence[ProgramTest]) -> bool:
    """Whether a program leaves the wanted value in every test.

    Args:
        program: The lines; they must parse.
        tests: The tests.

    Returns:
        True if all tests pass; an error word is a failure.

    Example:
        >>> passes(["r = a + b"], [{"inputs": {"a": 1, "b": 2}, "want": 3}])
        True
    """
    return all(run_program(program, test["inputs"]) == Outcome(test["want"]) for test in tests)


def _named(task: BugFixTask, split: str, index: int) -> BugFixTask:
    task["id"] = f"{split}-{index:02d}-{task['family']}"
    return task


def _generate(random: Random, taken: set[tuple[str, ...]]) -> Iterator[BugFixTask]:
    """Yields tasks whose references are not in `taken`: the bug families in turn, every third task with two lines."""
    for index in count():
        family = list(BUG_FAMILIES)[index % len(BUG_FAMILIES)]
        num_lines = 2 if index % 3 == 1 else 1
        task = None
        while task is None:
            task = _try_task(random, family, num_lines, taken)
        yield task


def _try_task(random: Random, family: str, num_lines: int, taken: set[tuple[str, ...]]) -> BugFixTask | None:
    """Makes one task, or None where the drawn program is taken, cannot hold the bug, or has tests that miss it."""
    comments, reference = _draw_program(random, num_lines)
    if tuple(reference) in taken:
        return None
    mutants = [
        [*reference[:index], mutant, *reference[index + 1 :]]
        for index, line in enumerate(reference)
        for mutant in BUG_FAMILIES[family](line)
    ]
    tests = _draw_tests(random, reference)
    if not mutants or tests is None:
        return None
    outcomes = (run_program(reference[: index + 1], tests[0]["inputs"]) for index in range(len(reference)))
    trace = [outcome.value for outcome in outcomes if outcome.value is not None]
    program = random.choice(mutants)
    if passes(program, tests[:1]) or passes(program, tests[1:]):
        return None
    return BugFixTask(
        id="",
        family=family,
        comments=comments,
        program=program,
        reference=reference,
        visible_test=tests[0],
        visible_trace=trace,
        hidden_tests=tests[1:],
    )


def _draw_program(random: Random, num_lines: int) -> tuple[list[str], list[str]]:
    """Returns comments and the lines that do what they say."""
    parts = [random.choice(_FIRST_PARTS)(random)]
    parts += [random.choice(_LATER_PARTS)(random) for _ in range(num_lines - 1)]
    return [comment for comment, _ in parts], [line for _, line in parts]


def _draw_digit(random: Random) -> str:
    return str(random.randint(2, 8))


def _draw_atom(random: Random) -> str:
    return random.choice(INPUTS) if random.random() < 0.5 else _draw_digit(random)


def _start(random: Random) -> tuple[str, str]:
    left, right = random.sample(INPUTS, 2)
    operator = random.choice("+-*/%")
    if random.random() < 0.3:
        right = _draw_digit(random)
    return f"{left} {_WORD_OF_OPERATOR[operator]} {right}", f"r = {left} {operator} {right}"


def _start_if(random: Random) -> tuple[str, str]:
    left, right = random.sample(INPUTS, 2)
    word, comparison = random.choice((("above", ">"), ("below", "<")))
    if random.random() < 0.3:
        right = _draw_digit(random)
    return f"{left} {word} {right}", f"if {left} {comparison} {right} : r = {left}"


def _operation(random: Random) -> tuple[str, str]:
    operator, atom = random.choice("+-*"), _draw_atom(random)
    return f"{_WORD_OF_OPERATOR[operator]} {atom}", f"r = r {operator} {atom}"


def _bound(random: Random) -> tuple[str, str]:
    (word, comparison), atom = random.choice((("most", ">"), ("least", "<"))), _draw_atom(random)
    return f"at {word} {atom}", f"if r {comparison} {atom} : r = {atom}"


def _repetition(random: Random) -> tuple[str, str]:
    count, operator, atom = _draw_digit(random), random.choice("+-"), random.choice(INPUTS)
    return f"repeat {count} {_WORD_OF_OPERATOR[operator]} {atom}", f"repeat {count} : r = r {operator} {atom}"


def _loop(random: Random) -> tuple[str, str]:
    (operator, comparison), step, end = random.choice((("+", "<"), ("-", ">"))), _draw_digit(random), _draw_atom(random)
    return (
        f"{_WORD_OF_OPERATOR[operator]} {step} until {end}",
        f"while r {comparison} {end} : r = r {operator} {step}",
    )


_FIRST_PARTS: tuple[Callable[[Random], tuple[str, str]], ...] = (_start, _start, _start, _start_if)
_LATER_PARTS: tuple[Callable[[Random], tuple[str, str]], ...] = (_operation, _bound, _repetition)


def _draw_tests(random: Random, reference: Sequence[str]) -> list[ProgramTest] | None:
    """Draws one visible and `NUM_HIDDEN_TESTS` hidden tests; None where the reference fails or hardly varies."""
    tests: list[ProgramTest] = []
    for _ in range(1 + NUM_HIDDEN_TESTS):
        inputs = dict(zip(INPUTS, random.sample(range(1, 10), len(INPUTS)), strict=True))
        outcome = run_program(reference, inputs)
        if outcome.value is None:
            return None
        tests.append(ProgramTest(inputs=inputs, want=outcome.value))
    return tests if len({test["want"] for test in tests}) > 2 else None


def _replaced(line: str, choices: Callable[[str], Sequence[str]], first: int) -> list[str]:
    """All lines in which one word at or after position `first` is replaced by one of its `choices`."""
    words = line.split()
    return [
        " ".join([*words[:index], choice, *words[index + 1 :]])
        for index in range(first, len(words))
        for choice in choices(words[index])
    ]


# Each family lists the lines that differ from a right line by one bug of its kind.
def _wrong_operator(line: str) -> list[str]:
    others = {"+": "-*", "-": "+*", "*": "+-", "/": "%*", "%": "/-"}
    return _replaced(line, lambda word: others.get(word, ""), 0)


def _wrong_constant(line: str) -> list[str]:
    return _replaced(line, lambda word: [str(int(word) - 1), str(int(word) + 1)] if word.isdigit() else [], 0)


def _swapped_operands(line: str) -> list[str]:
    words = line.split()
    swapped = [*words[:-3], words[-1], words[-2], words[-3]]
    return [" ".join(swapped)] if words[-2] in ("-", "/", "%") else []


def _wrong_variable(line: str) -> list[str]:
    return _replaced(line, lambda word: [name for name in INPUTS if name != word] if word in INPUTS else [], 1)


def _wrong_comparison(line: str) -> list[str]:
    return _replaced(line, lambda word: {"<": ">", ">": "<"}.get(word, ""), 0)


BUG_FAMILIES: dict[str, Callable[[str], list[str]]] = {
    "operator": _wrong_operator,
    "constant": _wrong_constant,
    "operands": _swapped_operands,
    "variable": _wrong_variable,
    "comparison": _wrong_comparison,
}
