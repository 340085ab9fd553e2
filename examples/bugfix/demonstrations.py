"""Scripted demonstrations for the imitation warm-up, deliberately imperfect.

Most demonstrations submit the program as they found it. The others try: some fix the bug at once, some look first,
some edit the wrong way and notice or do not, a few wander. A policy that imitates them knows the tools and can repair
programs, but seldom does; reinforcement learning has to find out which of its habits pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from lit_rl.trajectory import Trajectory

from .environment import BugFixEnvironment
from .language import DIGITS, INPUTS, OPERATORS
from .tasks import BugFixTask
from .tokenizer import WordTokenizer

# A script names the calls of one demonstration; `fix` and `wrong` stand for edits of the buggy line.
SCRIPTS: dict[tuple[str, ...], float] = {
    ("submit",): 0.55,
    ("run", "submit"): 0.03,
    ("fix", "submit"): 0.12,
    ("run", "fix", "submit"): 0.07,
    ("fix", "run", "submit"): 0.04,
    ("run", "fix", "run", "submit"): 0.05,
    ("wrong", "submit"): 0.04,
    ("wrong", "run", "submit"): 0.02,
    ("wrong", "run", "fix", "submit"): 0.02,
    ("wrong", "run", "fix", "run", "submit"): 0.02,
    ("run", "wrong", "run", "fix", "run", "submit"): 0.02,
    ("run", "wrong", "run", "wrong", "run", "fix", "run", "submit"): 0.02,
}


def demonstrate(task: BugFixTask, random: Random, tokenizer: WordTokenizer | None = None) -> Trajectory:
    """Plays one script on a task.

    Args:
        task: The task.
        random: Picks the script and the wrong edits.
        tokenizer: The tokenizer; a new one by default.

    Returns:
        The episode as a trajectory: true in `action_mask` on the tokens of the tool calls, the true reward, no
        sampler log-probabilities (nothing was sampled from a policy).

    Example:
        >>> from examples.bugfix.tasks import practice_tasks
        >>> demonstrate(practice_tasks(1)[0], Random(0)).task
        'practice-00-operator'
    """
    tokenizer = tokenizer or WordTokenizer()
    environment = BugFixEnvironment()
    token_ids = list(environment.reset(task))
    action_mask = [False] * len(token_ids)
    script = random.choices(list(SCRIPTS), list(SCRIPTS.values()))[0]
    reward = None
    for call in script:
        action = tokenizer.encode(f"{_words(call, task, random)} <end>")
        turn = environment.step(action)
        token_ids += [*action, *turn.observation]
        action_mask += [True] * len(action) + [False] * len(turn.observation)
        reward = turn.reward
    return Trajectory(token_ids, action_mask, reward, task=task["id"], info={"script": " ".join(script)})


def demonstrations(tasks: Sequence[BugFixTask], seed: int = 0) -> list[Trajectory]:
    """Plays one script on each task.

    Args:
        tasks: The tasks; `practice_tasks` makes any number of them.
        seed: Decides the scripts.

    Returns:
        One trajectory per task, in order.

    Example:
        >>> from examples.bugfix.tasks import practice_tasks
        >>> len(demonstrations(practice_tasks(3)))
        3
    """
    random, tokenizer = Random(f"bugfix-demonstrations-{seed}"), WordTokenizer()
    return [demonstrate(task, random, tokenizer) for task in tasks]


def _words(call: str, task: BugFixTask, random: Random) -> str:
    if call in ("run", "submit"):
        return call
    index = next(i for i, (bad, good) in enumerate(zip(task["program"], task["reference"], strict=True)) if bad != good)
    line = task["reference"][index]
    return f"edit L{index + 1} {line if call == 'fix' else _spoiled(line, random)}"


def _spoiled(line: str, random: Random) -> str:
    """Returns the line with one name, digit or operator replaced at random."""
    words = line.split()
    kinds: tuple[Sequence[str], ...] = (INPUTS, DIGITS, OPERATORS)
    places = [(index, kind) for index, word in enumerate(words) for kind in kinds if word in kind]
    index, kind = random.choice(places)
    words[index] = random.choice([word for word in kind if word != words[index]])
    return " ".join(words)
