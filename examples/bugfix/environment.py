"""The BugFix episodes: a policy reads a commented program with one bug, and acts until it submits.

The prompt is, line by line, a comment that says what the line should do and the line itself, and at the end `<act>`,
which hands over the turn. The policy's turn is a tool call and `<end>`; the observation ends with the next `<act>`::

    b minus 5 L1 r = b * 5 times 2 L2 r = r * 2 <act>
    run <end>                                            L1 want - 4 got 5 <act>
    edit L1 r = b - 5 <end>                              L1 r = b - 5 L2 r = r * 2 <act>
    run <end>                                            pass <act>
    submit <end>                                         (the end: reward 1 if all hidden tests pass, else 0)

`run` tries the visible test and names the first line after which `r` is not what it should be, what it should be, and
what it is: a value, or the word `zero`, `huge` or `limit`. `edit` replaces a line and shows the whole program.
Everything else is answered with `error`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.rollout.environment import Environment, Turn

from .language import ProgramSyntaxError, parse_line, run_program
from .tasks import passes
from .tokenizer import ACT, END, LINE_LABELS, WordTokenizer, spell

MAX_TURNS = 8
MAX_TURN_TOKENS = 14
MAX_EPISODE_TOKENS = 256


class BugFixEnvironment(Environment):
    """One episode of the gym; the task is a `BugFixTask`.

    The reward is 1.0 if the submitted program passes all hidden tests, else 0.0; an episode that reaches `max_turns`
    turns without `submit` ends with 0.0.

    Args:
        max_turns: The most turns the policy gets; at least 1.

    Raises:
        ValueError: `max_turns` is below 1.

    Example:
        >>> from examples.bugfix.tasks import bugfix_tasks
        >>> training, _ = bugfix_tasks()
        >>> environment, tokenizer = BugFixEnvironment(), WordTokenizer()
        >>> prompt = environment.reset(training[0])
        >>> turn = environment.step(tokenizer.encode("submit <end>"))
        >>> turn.done, turn.reward
        (True, 0.0)
    """

    def __init__(self, max_turns: int = MAX_TURNS) -> None:
        if max_turns < 1:
            raise ValueError(f"got `max_turns` {max_turns}, expected at least 1")
        self.max_turns = max_turns
        self._tokenizer = WordTokenizer()
        self._task: Mapping[str, Any] = {}
        self._program: list[str] = []
        self._turns = 0

    def reset(self, task: Mapping[str, Any]) -> Sequence[int]:
        """Starts an episode.

        Args:
            task: A `BugFixTask`.

        Returns:
            The ids of the prompt.
        """
        self._task = task
        self._program = list(task["program"])
        self._turns = 0
        lines = zip(task["comments"], LINE_LABELS, self._program, strict=False)
        return self._tokenizer.encode(" ".join(" ".join(line) for line in lines) + f" {ACT}")

    def step(self, token_ids: Sequence[int]) -> Turn:
        """Takes one turn of the policy.

        Args:
            token_ids: The sampled ids, `<end>` included; without it the turn is an error.

        Returns:
            The observation ids, or the end and its reward.
        """
        self._turns += 1
        words = self._tokenizer.decode(token_ids).split()
        if words == ["submit", END]:
            return Turn(done=True, reward=float(passes(self._program, self._task["hidden_tests"])))
        if self._turns >= self.max_turns:
            return Turn(done=True, reward=0.0)
        return Turn(observation=self._tokenizer.encode(f"{self._answer(words)} {ACT}"))

    def _answer(self, words: list[str]) -> str:
        if words == ["run", END]:
            return self._run()
        if len(words) > 3 and words[0] == "edit" and words[1] in LINE_LABELS and words[-1] == END:
            return self._edit(LINE_LABELS.index(words[1]), words[2:-1])
        return "error"

    def _run(self) -> str:
        task = self._task
        for index, want in enumerate(task["visible_trace"]):
            outcome = run_program(self._program[: index + 1], task["visible_test"]["inputs"])
            if outcome.value != want:
                got = outcome.error if outcome.value is None else spell(outcome.value)
                return f"{LINE_LABELS[index]} want {spell(want)} got {got}"
        return "pass"

    def _edit(self, index: int, words: list[str]) -> str:
        if index >= len(self._program):
            return "error"
        try:
            parse_line(words)
        except ProgramSyntaxError:
            return "error"
        self._program[index] = " ".join(words)
        return self._listing()

    def _listing(self) -> str:
        return " ".join(f"{label} {line}" for label, line in zip(LINE_LABELS, self._program, strict=False))
