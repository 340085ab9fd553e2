"""What the attempts of one group say: how many passed, and whether the group can move the policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Signal = Literal["live", "all_pass", "all_fail", "equal_partial", "unscored"]


def group_signal(
    rewards: Sequence[float | None], outcomes: Sequence[float | None] | None = None, *, threshold: float = 1.0
) -> Signal:
    """Says whether a group of attempts can move the policy, and if not, why.

    Outcomes come first: a group in which every attempt, or none, reached the goal has nothing to teach about the
    goal, however a shaped reward spreads its attempts. Without outcomes only equal rewards are without signal. The
    mean of the rewards is never looked at.

    Args:
        rewards: [n] what the advantages are made of; `None` or NaN where nobody could score.
        outcomes: [n] what counts as passing, when that is not the reward itself; numbers or booleans. `None` or NaN,
            as for an attempt that was cut before its end, is not passed.
        threshold: Outcome from which an attempt counts as passed.

    Returns:
        "live"; "all_pass" or "all_fail" (by outcome, or equal rewards of at least `threshold`, or at most 0);
        "equal_partial" (equal rewards in between, or equal rewards over mixed outcomes); "unscored" (no reward).

    Example:
        >>> group_signal([0.10, 0.00, 0.05, 0.00], outcomes=[0, 0, 0, 0]), group_signal([0.5, 0.5, 0.5, 0.5])
        ('all_fail', 'equal_partial')
        >>> group_signal([1.0, 0.0, None]), group_signal([1.0])
        ('live', 'all_pass')
    """
    scored, passed = _scored(rewards, outcomes, threshold)
    if not scored.size:
        return "unscored"
    if outcomes is not None and not passed.any():
        return "all_fail"
    if outcomes is not None and passed.all():
        return "all_pass"
    if (scored != scored[0]).any():
        return "live"
    if outcomes is not None or 0.0 < scored[0] < threshold:
        return "equal_partial"
    return "all_pass" if passed.all() else "all_fail"


def count_passes(
    rewards: Sequence[float | None], outcomes: Sequence[float | None] | None = None, *, threshold: float = 1.0
) -> tuple[int, int]:
    """Counts passed and scored attempts of a group.

    Args:
        rewards: [n] numbers; `None` or NaN where nobody could score: such an attempt is left out.
        outcomes: [n] what is compared with `threshold` in place of the reward; `None` or NaN is not passed.
        threshold: Outcome from which an attempt counts as passed.

    Returns:
        Passed attempts, scored attempts.

    Raises:
        ValueError: The group is empty, a number is infinite, or `outcomes` has another length.

    Example:
        >>> count_passes([1.0, 0.3, None]), count_passes([0.1, 0.3], outcomes=[True, None])
        ((1, 2), (1, 2))
    """
    scored, passed = _scored(rewards, outcomes, threshold)
    return int(passed.sum()), int(scored.size)


def outcome_of(info: Mapping[str, Any]) -> float | None:
    """The outcome that an environment gave for an attempt, or `None` where `info["outcome"]` is no finite number.

    Example:
        >>> outcome_of({"outcome": True}), outcome_of({}), outcome_of({"outcome": "solved"})
        (1.0, None, None)
    """
    value = info.get("outcome")
    if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def counted_passes(signal: Signal, passes: int, attempts: int) -> float:
    """What a group's passes are worth to an estimator: a live group is never worth none, and never all.

    Rewards that differ, all on one side of the threshold (fractions that never reach 1, say), are a signal, although
    every attempt failed, or passed, by the threshold. Such a group counts half a pass, or half a fail: more than a
    group without any, less than one with one, and never the certainty that excludes a task.

    Args:
        signal: Of the group, see `group_signal`.
        passes: Passed attempts, see `count_passes`.
        attempts: Scored attempts.

    Returns:
        `passes`, or 0.5, or `attempts - 0.5`.

    Example:
        >>> counted_passes("live", 0, 4), counted_passes("live", 4, 4), counted_passes("live", 1, 4)
        (0.5, 3.5, 1.0)
        >>> counted_passes("all_fail", 0, 4), counted_passes("equal_partial", 0, 4)
        (0.0, 0.0)
    """
    return float(min(max(passes, 0.5), attempts - 0.5) if signal == "live" else passes)


def _scored(
    rewards: Sequence[float | None], outcomes: Sequence[float | None] | None, threshold: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    values = _numbers(rewards, "rewards")
    if not values.size:
        raise ValueError("`rewards` is empty; a group has at least one attempt")
    scored = ~np.isnan(values)
    if outcomes is None:
        return values[scored], values[scored] >= threshold
    goals = _numbers(outcomes, "outcomes")
    if goals.size != values.size:
        raise ValueError(f"`outcomes` has {goals.size} entries for {values.size} rewards; give one per attempt")
    return values[scored], goals[scored] >= threshold  # NaN, a missing outcome, reaches no threshold


def _numbers(values: Any, name: str) -> NDArray[np.float64]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__len__"):
        raise TypeError(f"`{name}` must be a sequence of numbers, got {values!r}")
    numbers = np.array([math.nan if value is None else float(value) for value in values], dtype=np.float64)
    if np.isinf(numbers).any():
        index = int(np.flatnonzero(np.isinf(numbers))[0])
        raise ValueError(f"`{name}`[{index}] is {numbers[index]}; expected a finite number, or None if unscored")
    return numbers
