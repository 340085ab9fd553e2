"""One attempt at a task while it is being made: the tokens so far, and everything that can end it."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_rl.options import as_flag, as_number
from lit_rl.rollout.engine import Completion
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.rollout.sampling import derive_seed
from lit_rl.rollout.tasks import Attempt
from lit_rl.rollout.validation import check_integer, read_ids

Stop = Literal["done", "max_new_tokens", "max_trajectory_tokens", "max_turns", "error"]
ActionEnds = Literal["end_id", "length"]
_RESERVED_INFO = frozenset({"attempt", "turns", "stop", "error"})


class RolloutError(RuntimeError):
    """Rollouts could not be collected; the message names rank, task, attempt and turn where they are known."""


@dataclass(frozen=True)
class Limits:
    """What may end an episode from outside.

    Args:
        max_new_tokens: The most tokens the policy samples in one turn.
        max_turns: The most actions in one episode.
        max_trajectory_tokens: The most tokens of a trajectory, prompt and observations included; `None` is no limit.
        action_ends: What makes an action whole: an "end_id", or, where there are none, its "length".

    Raises:
        TypeError: A limit is no integer.
        ValueError: A limit leaves no room for one sampled token.
    """

    max_new_tokens: int
    max_turns: int
    max_trajectory_tokens: int | None
    action_ends: ActionEnds = "end_id"

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("max_turns", 1), ("max_trajectory_tokens", 2)):
            value = getattr(self, name)
            if value is not None or name != "max_trajectory_tokens":
                object.__setattr__(self, name, check_integer(name, value, least))

    def within(self, context: int | None) -> Limits:
        """The limits for a model that reads so many tokens.

        Args:
            context: The most tokens the model says it can read; `None` where it does not say.

        Returns:
            The same limits, with the context as the limit of a trajectory where none was given.

        Raises:
            ValueError: A trajectory may become longer than the context.

        Example:
            >>> Limits(8, 2, None).within(64).max_trajectory_tokens
            64
        """
        limit = self.max_trajectory_tokens
        if limit is None or context is None:
            return self if context is None else replace(self, max_trajectory_tokens=context)
        if limit > context:
            raise ValueError(
                f"`max_trajectory_tokens` is {limit}, but the model's configuration says that it reads {context} "
                "(`max_position_embeddings`); lower it, leave it away to use all of them, or raise the number in the "
                "configuration of a model that reads further"
            )
        return self


class Episode:
    """Tokens, mask and log-probabilities of one attempt, appended turn by turn.

    Args:
        attempt: Which episode this is.
        limits: What may end it from outside.
        errors: "raise" turns an exception of the environment into a `RolloutError`; "unscored" ends the episode
            without a reward.
        vocabulary: How many ids the policy can read; `None` is unknown.
    """

    def __init__(
        self, attempt: Attempt, limits: Limits, errors: Literal["raise", "unscored"], vocabulary: int | None = None
    ) -> None:
        self.attempt = attempt
        self.limits = limits
        self.errors = errors
        self.vocabulary = vocabulary
        self.environment: Environment | None = None
        self.token_ids: list[int] = []
        self.action_mask: list[bool] = []
        self.log_probs: list[float] = []
        self.prompt_tokens = 0
        self.turns = 0
        self.last_action: list[int] = []
        self.reward: float | None = None
        self.info: dict[str, Any] = {}
        self.stop: Stop | None = None
        self.error: str | None = None
        self._limit_hit: Stop | None = None

    @property
    def name(self) -> str:
        """Which task and attempt this is, for messages."""
        return f"task {self.attempt.task_id!r}, attempt {self.attempt.number}"

    @property
    def is_open(self) -> bool:
        """True while the policy is to act."""
        return self.stop is None

    @property
    def is_truncated(self) -> bool:
        """True when a limit ended the episode."""
        return self.stop in ("max_new_tokens", "max_trajectory_tokens", "max_turns")

    @property
    def max_new_tokens(self) -> int:
        """The most tokens that may be sampled now."""
        return min(self.limits.max_new_tokens, self._room())

    @property
    def turn_seed(self) -> int:
        """The seed of the action that comes next."""
        return derive_seed(self.attempt.seed, self.turns)

    def start(self, factory: Callable[[], Environment]) -> None:
        """Makes the environment, resets it and reads the prompt."""
        try:
            self.environment = factory()
            if not isinstance(self.environment, Environment):
                raise TypeError(f"`environment` made {self.environment!r}, expected an instance of `Environment`")
            self.environment.seed = derive_seed(self.attempt.seed, "environment")
            prompt = self._ids(self.environment.reset(copy.deepcopy(dict(self.attempt.task))), "the prompt")
            if not prompt:
                raise ValueError("the prompt is empty; `reset` returns at least 1 token id")
            limit = self.limits.max_trajectory_tokens
            if limit is not None and len(prompt) >= limit:
                raise ValueError(f"the prompt has {len(prompt)} tokens and leaves no room within {limit} to act in")
        except Exception as error:
            self.fail(error, during="reset")
            return
        self.prompt_tokens = len(prompt)
        self._append(prompt, sampled=False)

    def act(self, completion: Completion) -> None:
        """Appends what the policy sampled, exactly as it was sampled."""
        if completion.truncated:
            by_turn = len(completion.token_ids) < self._room()
            whole = by_turn and self.limits.action_ends == "length"
            self._limit_hit = None if whole else "max_new_tokens" if by_turn else "max_trajectory_tokens"
        else:
            self._limit_hit = None
        self.last_action = list(completion.token_ids)
        self.turns += 1
        self._append(self.last_action, sampled=True, log_probs=completion.log_probs)

    def answer(self, turn: Turn | Exception) -> None:
        """Takes in what the environment answered to the last action."""
        try:
            if isinstance(turn, Exception):
                raise turn
            observation = self._read(turn)
            if turn.done:
                self._finish(self._limit_hit or "done")
            elif self.turns >= self.limits.max_turns:
                self._cut("max_turns")
            elif len(observation) >= self._room():
                self._cut("max_trajectory_tokens")
            else:
                # An observation after which nothing is sampled would only be padding, so it comes last.
                self._append(observation, sampled=False)
        except Exception as error:
            self.fail(error, during=f"turn {self.turns}")

    def close(self) -> None:
        """Closes the environment, once."""
        environment, self.environment = self.environment, None
        if environment is None:
            return
        try:
            environment.close()
        except Exception as error:
            self.fail(error, during="close")

    def abandon(self) -> None:
        """Closes the environment of an episode that another one's error ended; it cannot hide that error."""
        environment, self.environment = self.environment, None
        if environment is not None:
            with suppress(Exception):
                environment.close()

    def fail(self, error: Exception, during: str) -> None:
        """Ends the episode with an error, or without a reward where that is allowed."""
        self.error = f"{self.name}, {during}: {type(error).__name__}: {error}"
        self.stop, self.reward = "error", None
        if self.errors == "raise":
            raise RolloutError(
                f"{self.error} (an error of the environment or reward; errors='unscored' would keep such an episode "
                "without a reward)"
            ) from error

    def record(self) -> dict[str, Any]:
        """The arguments of the `Trajectory` that this episode has become, temperature left out."""
        ours: dict[str, Any] = {"attempt": self.attempt.number, "turns": self.turns, "stop": self.stop}
        if self.error is not None:
            ours["error"] = self.error
        return {
            # A failed reset leaves no prompt, and a trajectory has at least one token: one that is not scored.
            "token_ids": self.token_ids or [0],
            "action_mask": self.action_mask or [False],
            "log_probs": self.log_probs or [0.0],
            "reward": self.reward,
            "group": self.attempt.group,
            "task": self.attempt.task_id,
            "truncated": self.is_truncated,
            "info": {**self.info, **ours},
        }

    def _room(self) -> int:
        limit = self.limits.max_trajectory_tokens
        return sys.maxsize if limit is None else limit - len(self.token_ids)

    def _append(self, token_ids: list[int], *, sampled: bool, log_probs: Sequence[float] | None = None) -> None:
        self.token_ids += token_ids
        self.action_mask += [sampled] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids) if log_probs is None else log_probs

    def _read(self, turn: Turn) -> list[int]:
        """Checks a turn, adds up its reward and extras, and returns its observation."""
        if not isinstance(turn, Turn):
            raise TypeError(f"`step` returned {turn!r}, expected a `Turn`")
        if as_flag(turn.done) is None:
            raise TypeError(f"`Turn.done` is {turn.done!r}, expected True or False")
        self._add_reward(turn.reward)
        info = dict(turn.info or {})
        reserved = _RESERVED_INFO & set(info)
        if reserved:
            raise ValueError(f"`Turn.info` has the keys {sorted(reserved)}, which are written here; rename them")
        try:
            json.dumps(info)
        except (TypeError, ValueError) as error:
            raise TypeError(f"`Turn.info` must hold JSON-like values only ({error})") from error
        self.info.update(info)
        return [] if turn.done else self._ids(turn.observation, "the observation")

    def _ids(self, values: Any, what: str) -> list[int]:
        return read_ids(values, what, self.vocabulary)

    def _add_reward(self, reward: Any) -> None:
        if reward is None:
            return
        number = as_number(reward)
        if number is None:
            raise TypeError(f"the reward is {reward!r}; expected a number, or None where there is none")
        if not math.isfinite(number):
            raise ValueError(f"the reward is {number}; expected a finite number, or None where there is none")
        self.reward = number + (self.reward or 0.0)

    def _cut(self, stop: Stop) -> None:
        assert self.environment is not None
        self._add_reward(self.environment.reward_when_cut(stop))
        self._finish(stop)

    def _finish(self, stop: Stop) -> None:
        if self.reward is None:
            missing = "the episode is over and no turn gave a reward"
            if self.errors == "raise":
                raise ValueError(missing)
            self.error = missing
        self.stop = stop
