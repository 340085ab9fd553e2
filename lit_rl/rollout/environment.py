"""What the policy acts in: an episode that turns a task into prompt ids and the policy's ids into observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.options import as_number


@dataclass
class Turn:
    """What an environment answers to one action.

    Args:
        observation: Token ids that the policy reads before it acts again; ignored when `done`.
        done: True when the episode is over.
        reward: What this turn was worth; `None` gives nothing. A trajectory's reward is the sum over its turns, and
            an episode that is done without a single reward is unscored.
        info: JSON-like extras of the trajectory, for example the parts of a reward; later turns overwrite equal keys.
            `None` has none.

    Raises:
        TypeError: `reward` is neither a number nor `None`, or `info` is no dict.

    Example:
        >>> Turn([4, 5])
        Turn(observation=[4, 5], done=False, reward=None, info={})
        >>> Turn(done=True, reward=1.0).reward
        1.0
    """

    observation: Sequence[int] = ()
    done: bool = False
    reward: float | None = None
    info: Mapping[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reward is not None:
            number = as_number(self.reward)
            if number is None:
                raise TypeError(f"`Turn.reward` is {self.reward!r}, expected a number or None")
            self.reward = number
        if self.info is None:
            self.info = {}
        if not isinstance(self.info, Mapping):
            raise TypeError(f"`Turn.info` is {self.info!r}, expected a dict or None")


class Environment(ABC):
    """One episode of a multi-turn task, spoken in token ids.

    `lit_rl.rollout.rollouts` is given a callable that makes a fresh one (usually the class itself), and calls
    `reset` once, then `step` after every action until a turn is done, then `close`, also after an exception. The
    ids the policy sampled arrive exactly as sampled, the end token included; an action without an end token hit a
    limit. What an observation holds (a tool's answer, the opening of the next assistant turn) is up to the
    environment, so the chat template lives here. An exception in any method is an error that names task and turn.

    A factory may also have a method ``step_together(environments, actions)`` for environments that are cheaper in
    batches (a reward model, a sandbox service). It gets the environments of all open episodes and their actions,
    and returns for each a `Turn`, or the exception that stands for it.

    Example:
        >>> class Echo(Environment):                   # say the task's number, within two attempts
        ...     def reset(self, task):
        ...         self.wanted, self.attempts = task["number"], 0
        ...         return [1, self.wanted]
        ...     def step(self, token_ids):
        ...         self.attempts += 1
        ...         right = self.wanted in token_ids
        ...         return Turn([2], done=right or self.attempts == 2, reward=float(right))
        >>> episode = Echo()
        >>> episode.reset({"id": "seven", "number": 7})
        [1, 7]
        >>> episode.step([3, 9]).done, episode.step([7, 9]).reward
        (False, 1.0)
    """

    seed: int = 0
    """Set before `reset`, different for every attempt: randomness drawn from it is the same after a resume."""

    @abstractmethod
    def reset(self, task: Mapping[str, Any]) -> Sequence[int]:
        """Starts the episode.

        Args:
            task: One of the tasks given to `rollouts`; `task["id"]` is its stable string id.

        Returns:
            The prompt as token ids, at least one.
        """

    @abstractmethod
    def step(self, token_ids: Sequence[int]) -> Turn:
        """Answers one action.

        Args:
            token_ids: The ids that the policy sampled in this turn, at least one, the end token included.

        Returns:
            The observation, or the end of the episode with its reward.
        """

    def reward_when_cut(self, reason: str) -> float | None:
        """What is added to the reward when the episode is cut off before it was done.

        Args:
            reason: "max_turns" or "max_trajectory_tokens".

        Returns:
            0.0: an episode that did not end by itself earned nothing more. Override to score the state it was left
            in; `None` adds nothing, so that an episode without any reward is unscored.
        """
        return 0.0

    def close(self) -> None:  # noqa: B027 - optional: most environments hold nothing
        """Frees what the episode holds, such as a sandbox. Called once, whatever happened before."""
