"""Which tasks are worth an attempt: rules that turn beliefs about pass rates into scores for `TaskSampler`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from lit_rl.curriculum.pass_rate import Beliefs, Floats
from lit_rl.curriculum.validation import in_range, integer

# Keeps a drawn pass rate of exactly 0 or 1 in the pool, behind every other task.
_TINY = 1e-300


class Rule(ABC):
    """Gives every task a score; `TaskSampler` draws tasks by it.

    A score of 0 excludes a task, which is then only seen as a revisit. Equal positive scores are visited in shuffled
    passes. Unequal ones are drawn without replacement, in proportion to score ** (1 / temperature).

    Example:
        >>> class HardestFirst(Rule):
        ...     temperature = 0.0
        ...     def scores(self, beliefs, generator):
        ...         return 1.0 - beliefs.value
    """

    temperature: float = 1.0
    """At least 0: 1 draws in proportion to the scores, more is flatter, 0 takes the highest (ties at random)."""
    centre: float = 0.5
    """An excluded task counts as easy from this estimate on, and as hard below it."""

    @abstractmethod
    def scores(self, beliefs: Beliefs, generator: np.random.Generator) -> Floats:
        """The score of each task.

        Args:
            beliefs: What is known about n tasks.
            generator: Source of randomness, the same on every rank; the only one a rule may use.

        Returns:
            float64 [n], finite and at least 0.
        """


@dataclass(frozen=True)
class Uniform(Rule):
    """Every task alike: shuffled passes through all of them.

    Example:
        >>> Uniform()
        Uniform()
    """

    def scores(self, beliefs: Beliefs, generator: np.random.Generator) -> Floats:
        """1 for every task."""
        return np.ones_like(beliefs.value)


@dataclass(frozen=True)
class Interval(Rule):
    """Only tasks with low < estimate < high; a task that was never observed is always inside.

    With `LastGroup` and (0, 1) this drops exactly the tasks whose last group was all-pass or all-fail. Estimators
    that remember more rarely reach 0 or 1: use bounds such as (0.05, 0.95) with them.

    Args:
        low: Excluded at or below.
        high: Excluded at or above.

    Example:
        >>> Interval(0.2, 0.8)
        Interval(low=0.2, high=0.8)
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        in_range("low", self.low, -math.inf, math.inf)
        in_range("high", self.high, -math.inf, math.inf)
        if not self.low < self.high:
            raise ValueError(f"`low` must be less than `high`, got low={self.low} and high={self.high}")

    @property
    def centre(self) -> float:  # type: ignore[override]
        """Middle of the interval."""
        return (self.low + self.high) / 2

    def scores(self, beliefs: Beliefs, generator: np.random.Generator) -> Floats:
        """1 inside, 0 outside."""
        inside = (self.low < beliefs.value) & (beliefs.value < self.high)
        return (inside | (beliefs.groups == 0)).astype(np.float64)


@dataclass(frozen=True)
class Variance(Rule):
    """In proportion to p(1-p), the variance of a pass-or-fail reward; estimates of exactly 0 or 1 are excluded.

    Args:
        temperature: See `Rule.temperature`.

    Example:
        >>> Variance(temperature=0.5)
        Variance(temperature=0.5)
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        in_range("temperature", self.temperature, 0.0, math.inf, open_above=True)

    def scores(self, beliefs: Beliefs, generator: np.random.Generator) -> Floats:
        """p(1-p)."""
        return beliefs.value * (1.0 - beliefs.value)


@dataclass(frozen=True)
class LiveProbability(Rule):
    """In proportion to the probability that a group of `group_size` attempts has both passes and fails.

    Under the estimator's posterior this is 1 - E[p^G] - E[(1-p)^G] (see `live_probability`); for an estimator
    without one, the same at the estimate.

    Args:
        group_size: Attempts per group, at least 2.
        least: Tasks below this probability are excluded; 0 excludes none but those of probability 0.
        temperature: See `Rule.temperature`.

    Example:
        >>> LiveProbability(8, least=0.1)
        LiveProbability(group_size=8, least=0.1, temperature=1.0)
    """

    group_size: int
    least: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        integer("group_size", self.group_size, 2)
        in_range("least", self.least, 0.0, 1.0, open_above=True)
        in_range("temperature", self.temperature, 0.0, math.inf, open_above=True)

    def scores(self, beliefs: Beliefs, generator: np.random.Generator) -> Floats:
        """The probability, or 0 below `least`."""
        live = beliefs.live_probability(self.group_size)
        return np.where(live >= self.least, live, 0.0)


@dataclass(frozen=True)
class Thompson(Rule):
    """Thompson sampling: draws a pass rate from every posterior and takes the tasks with the largest p(1-p).

    Tasks that are little known are drawn from a wide posterior and so come up now and then; nothing is excluded.
    Needs an estimator with a posterior (`BetaPosterior`).

    Source: Thompson 1933, "On the likelihood that one unknown probability exceeds another".

    Example:
        >>> Thompson().temperature
        0.0
    """

    temperature = 0.0

    def scores(self, beliefs: Beliefs, generator: np.random.Generator) -> Floats:
        """p(1-p) of one draw per task."""
        if beliefs.passes is None or beliefs.fails is None:
            raise ValueError("Thompson sampling draws from a posterior; use it with `estimator=BetaPosterior()`")
        drawn = generator.beta(beliefs.passes, beliefs.fails)
        return np.maximum(drawn * (1.0 - drawn), _TINY)


def checked_scores(rule: Rule, beliefs: Beliefs, generator: np.random.Generator) -> Floats:
    """The scores of a rule, refused when they are not finite non-negative numbers, one per task."""
    scores = np.asarray(rule.scores(beliefs, generator), dtype=np.float64)
    if scores.shape != beliefs.value.shape:
        raise ValueError(f"{rule!r} gave scores of shape {scores.shape}, expected one per task: {beliefs.value.shape}")
    if not (np.isfinite(scores) & (scores >= 0)).all():
        index = int(np.flatnonzero(~(np.isfinite(scores) & (scores >= 0)))[0])
        raise ValueError(f"{rule!r} gave task number {index} the score {scores[index]}; expected finite, at least 0")
    return scores
