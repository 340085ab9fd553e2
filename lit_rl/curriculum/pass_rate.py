"""What is believed about how often the policy passes a task: estimators of pass rates and their posteriors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_rl.curriculum.validation import in_range, integer

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def live_probability(passes: Any, fails: Any, group_size: int) -> Floats:
    r"""Probability that a group has both passed and failed attempts, when the pass rate is Beta distributed.

    With p ~ Beta(a, b) and G attempts: 1 - E[p^G] - E[(1-p)^G], where E[p^G] = B(a+G, b) / B(a, b), written as the
    product of (a+i) / (a+b+i) for i < G, which neither over- nor underflows.

    Args:
        passes: a, numbers greater than 0, any shape.
        fails: b, the same shape.
        group_size: G, at least 1.

    Returns:
        float64 of that shape, in [0, 1).

    Example:
        >>> float(live_probability(1.0, 1.0, 2).round(6))        # uniform belief: 1 - 1/3 - 1/3
        0.333333
    """
    a, b = np.asarray(passes, dtype=np.float64), np.asarray(fails, dtype=np.float64)
    all_pass, all_fail = np.ones_like(a), np.ones_like(a)
    for i in range(group_size):
        all_pass, all_fail = all_pass * (a + i) / (a + b + i), all_fail * (b + i) / (a + b + i)
    return np.maximum(1.0 - all_pass - all_fail, 0.0)


@dataclass(frozen=True, eq=False)
class Beliefs:
    """What is known about each of n tasks at one moment; what a `Rule` reads.

    Args:
        value: float64 [n] estimated pass rates in [0, 1]; the estimator's `initial` for a task never observed.
        groups: int64 [n] groups observed so far.
        ages: int64 [n] iterations since the last observation; 0 where there was none.
        passes: float64 [n] first parameter of a Beta posterior, or `None` for an estimator without one.
        fails: float64 [n] second parameter, or `None`.

    Example:
        >>> BetaPosterior().beliefs(np.zeros((1, 2)), np.zeros(1, int), np.zeros(1, int)).live_probability(2).round(3)
        array([0.333])
    """

    value: Floats
    groups: Integers
    ages: Integers
    passes: Floats | None = None
    fails: Floats | None = None

    def live_probability(self, group_size: int) -> Floats:
        """Probability [n] that a group of `group_size` attempts is neither all-pass nor all-fail.

        Under the posterior where there is one, otherwise at the estimate: 1 - p^G - (1-p)^G.
        """
        if self.passes is None or self.fails is None:
            return np.maximum(1.0 - self.value**group_size - (1.0 - self.value) ** group_size, 0.0)
        return live_probability(self.passes, self.fails, group_size)


class PassRate(ABC):
    """An estimator of pass rates: a few numbers per task, updated by each group of attempts.

    The numbers of all tasks stand in one array [n, width], so that they go into a checkpoint as one tensor and are
    read in one operation. An own estimator sets `width` and defines `update` and `value`, and `posterior` when it
    has one.

    Example:
        >>> class Best(PassRate):                              # the best group so far
        ...     width = 1
        ...     def update(self, state, passes, attempts, age):
        ...         return np.maximum(state, passes / attempts)
        ...     def value(self, states, ages):
        ...         return states[:, 0]
        >>> Best().update(np.zeros(1), passes=3, attempts=4, age=0)
        array([0.75])
    """

    width: int
    """Numbers kept per task; all are 0 before the first observation."""
    initial: float = 0.5
    """The estimate of a task that was never observed."""

    @abstractmethod
    def update(self, state: Floats, passes: float, attempts: int, age: int) -> Floats:
        """The state after one more group.

        Args:
            state: float64 [width].
            passes: Passed attempts of the group; half a one more, or less, where rewards differ although none, or
                all, passed (see `lit_rl.curriculum.signal.counted_passes`).
            attempts: Scored attempts of the group, at least 1.
            age: Iterations since the task was last observed.

        Returns:
            float64 [width]; the argument is left as it is.
        """

    @abstractmethod
    def value(self, states: Floats, ages: Integers) -> Floats:
        """The estimates [n] in [0, 1] of n observed tasks, from states [n, width] and ages [n] in iterations."""

    def posterior(self, states: Floats, ages: Integers) -> tuple[Floats, Floats] | None:
        """Parameters ([n], [n]) of a Beta posterior, or `None` for an estimator that only has a value."""
        return None

    def beliefs(self, states: Floats, groups: Integers, ages: Integers) -> Beliefs:
        """Puts together what a rule reads; tasks without an observation get `initial`."""
        value = np.where(groups > 0, self.value(states, ages), self.initial)
        posterior = self.posterior(states, ages)
        return Beliefs(value, groups, ages) if posterior is None else Beliefs(value, groups, ages, *posterior)

    @property
    def identity(self) -> str:
        """Class and parameters as text, the same in every process: who made the states of a checkpoint.

        Parameters are the fields of a dataclass, or the public attributes of another object, as far as they are
        numbers, texts, booleans or `None`.

        Example:
            >>> BetaPosterior(memory=0.9).identity
            'lit_rl.curriculum.pass_rate.BetaPosterior(memory=0.9, prior_passes=1.0, prior_fails=1.0)'
        """
        names = [field.name for field in fields(self)] if is_dataclass(self) else sorted(vars(self))
        values = {name: getattr(self, name) for name in names if not name.startswith("_")}
        primitive = {name: value for name, value in values.items() if isinstance(value, (int, float, str, type(None)))}
        parameters = ", ".join(f"{name}={value!r}" for name, value in primitive.items())
        return f"{type(self).__module__}.{type(self).__qualname__}({parameters})"


@dataclass(frozen=True)
class LastGroup(PassRate):
    """The pass rate of the task's last group: quick and crude.

    Example:
        >>> LastGroup().update(np.zeros(1), passes=2, attempts=8, age=0)
        array([0.25])
    """

    width = 1

    def update(self, state: Floats, passes: float, attempts: int, age: int) -> Floats:
        """Replaces the estimate."""
        return np.array([passes / attempts])

    def value(self, states: Floats, ages: Integers) -> Floats:
        """The last group's pass rate."""
        return states[:, 0]


@dataclass(frozen=True)
class MeanOfLast(PassRate):
    """Passed over scored attempts in the task's last `groups` groups.

    Args:
        groups: How many groups are remembered.

    Example:
        >>> estimator = MeanOfLast(2)
        >>> state = np.zeros(estimator.width)
        >>> for passes in (0, 1, 3):
        ...     state = estimator.update(state, passes, attempts=4, age=0)
        >>> estimator.value(state[None], np.zeros(1, int))
        array([0.5])
    """

    groups: int = 3

    def __post_init__(self) -> None:
        integer("groups", self.groups, 1)

    @property
    def width(self) -> int:  # type: ignore[override]
        """Passed and scored attempts of each remembered group."""
        return 2 * self.groups

    def update(self, state: Floats, passes: float, attempts: int, age: int) -> Floats:
        """Puts the group in front and forgets the oldest."""
        return np.concatenate([[passes, attempts], state[:-2]])

    def value(self, states: Floats, ages: Integers) -> Floats:
        """Passed over scored attempts."""
        return states[:, 0::2].sum(axis=1) / np.maximum(states[:, 1::2].sum(axis=1), 1.0)


@dataclass(frozen=True)
class ExponentialAverage(PassRate):
    """Average of the task's group pass rates with weights that fall by `decay` from each group to the one before.

    The weights are normalized, so the first group counts in full instead of being pulled to an initial value.

    Args:
        decay: In [0, 1); 0 is the last group alone.

    Example:
        >>> estimator = ExponentialAverage(0.5)
        >>> state = estimator.update(estimator.update(np.zeros(2), 4, 4, 0), 1, 4, 0)
        >>> estimator.value(state[None], np.zeros(1, int))          # (0.5 * 1 + 0.25) / 1.5
        array([0.5])
    """

    decay: float = 0.7
    width = 2

    def __post_init__(self) -> None:
        in_range("decay", self.decay, 0.0, 1.0, open_above=True)

    def update(self, state: Floats, passes: float, attempts: int, age: int) -> Floats:
        """Adds the group's pass rate with weight 1 and lowers the weight of the earlier ones."""
        return self.decay * state + np.array([passes / attempts, 1.0])

    def value(self, states: Floats, ages: Integers) -> Floats:
        """Weighted sum over the sum of weights."""
        return states[:, 0] / np.maximum(states[:, 1], 1.0)


@dataclass(frozen=True)
class BetaPosterior(PassRate):
    """Beta posterior over the pass rate, whose evidence fades as the policy changes.

    An attempt counts `memory ** age` after `age` iterations, whether or not the task was tried in between: a task
    that was not looked at for long drifts back to the prior, so it comes into question again by itself.

    Args:
        memory: In (0, 1]; 1 never forgets. The half-life is ln 2 / -ln(memory) iterations (0.99: 69).
        prior_passes: Passes the prior is worth, greater than 0.
        prior_fails: Fails the prior is worth, greater than 0.

    Example:
        >>> estimator = BetaPosterior(memory=0.5)
        >>> state = estimator.update(np.zeros(2), passes=8, attempts=8, age=0)
        >>> estimator.value(np.stack([state, state]), np.array([0, 3]))       # 9/10, then 2/3
        array([0.9       , 0.66666667])
    """

    memory: float = 0.99
    prior_passes: float = 1.0
    prior_fails: float = 1.0
    width = 2

    def __post_init__(self) -> None:
        in_range("memory", self.memory, 0.0, 1.0, open_below=True)
        in_range("prior_passes", self.prior_passes, 0.0, 1e9, open_below=True)
        in_range("prior_fails", self.prior_fails, 0.0, 1e9, open_below=True)

    @property
    def initial(self) -> float:  # type: ignore[override]
        """Mean of the prior."""
        return self.prior_passes / (self.prior_passes + self.prior_fails)

    def update(self, state: Floats, passes: float, attempts: int, age: int) -> Floats:
        """Adds the group's passes and fails to the faded earlier ones."""
        return state * self.memory**age + np.array([passes, attempts - passes])

    def value(self, states: Floats, ages: Integers) -> Floats:
        """Mean of the posterior."""
        passes, fails = self.posterior(states, ages)
        return passes / (passes + fails)

    def posterior(self, states: Floats, ages: Integers) -> tuple[Floats, Floats]:
        """Prior plus faded evidence."""
        faded = states * (self.memory ** ages.astype(np.float64))[:, None]
        return self.prior_passes + faded[:, 0], self.prior_fails + faded[:, 1]
