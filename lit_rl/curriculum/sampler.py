"""Which tasks come next: a sampler that learns from the outcome of every group, without Lightning.

sampler = TaskSampler(task_ids, estimator=BetaPosterior(), rule=LiveProbability(group_size=8))
for task_id in sampler.sample(8):
    sampler.observe(task_id, rewards_of_its_group)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lit_rl.curriculum import advice
from lit_rl.curriculum.draws import draw_pass, draw_weighted, log_weights, longest_undrawn
from lit_rl.curriculum.pass_rate import Beliefs, Floats, Integers, LastGroup, PassRate
from lit_rl.curriculum.report import CurriculumReport, estimate_shares
from lit_rl.curriculum.rules import Rule, Uniform, checked_scores
from lit_rl.curriculum.signal import Signal, count_passes, counted_passes, group_signal, outcome_of
from lit_rl.curriculum.table import TaskTable
from lit_rl.curriculum.validation import distinct_ids, in_range, integer

if TYPE_CHECKING:
    from lit_rl.trajectory import Trajectory

Refill = Literal["none", "full"]


class TaskSampler:
    """Draws tasks by what is believed about their pass rates, and learns from what came of them.

    The rule gives every task a score from its beliefs. Tasks with a positive score are *in the pool*; the others are
    *excluded*. A call to `sample(n)` returns at most n different tasks:

    1. Up to `revisit` of the n places (never all) go to excluded tasks, the longest undrawn first, so that every
       excluded task is looked at again within (excluded / revisit) iterations.
    2. The other places go to the pool: in shuffled passes when its scores are equal, otherwise drawn in proportion to
       the scores (see `Rule`).
    3. A pool that is too small leaves places empty (`refill="none"`: fewer episodes are sampled), or excluded tasks
       fill them (`refill="full"`). A pool of less than `floor` tasks is topped up to `floor` from the excluded ones,
       with one warning, so a call never comes back empty.

    With the default rule, `Uniform`, this is sampling without replacement in shuffled passes. Estimates follow a
    task's id: tasks may be added or vanish (`set_tasks`), and one that comes back takes up what was known about it.

    All randomness derives from (seed, number of calls), so ranks that make the same calls draw the same tasks, and a
    checkpoint holds no generator.

    Args:
        task_ids: Distinct ids, at least one; integers become strings.
        seed: At least 0.
        estimator: How pass rates are estimated; `None` is `LastGroup()`.
        rule: Which tasks are worth an attempt; `None` is `Uniform()`.
        revisit: Places per call for excluded tasks, at least 0. With 0, a task excluded by an estimator that does
            not fade stays excluded.
        refill: What becomes of places that the pool cannot fill.
        floor: The smallest number of tasks a call may use of the pool before excluded ones stand in; at least 1.
        threshold: Outcome (or reward) from which an attempt counts as passed.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no task, an id comes twice, or a number is out of range.

    Example:
        >>> sampler = TaskSampler(["a", "b", "c", "d"], seed=0)
        >>> sorted(sampler.sample(2) + sampler.sample(2))                    # one shuffled pass
        ['a', 'b', 'c', 'd']
        >>> sampler.observe("a", [1.0, 0.0, 0.0, 0.0])
        'live'
        >>> sampler.estimate("a"), sampler.estimate("b")
        (0.25, 0.5)
    """

    def __init__(
        self,
        task_ids: Iterable[str | int],
        *,
        seed: int = 0,
        estimator: PassRate | None = None,
        rule: Rule | None = None,
        revisit: int = 1,
        refill: Refill = "none",
        floor: int = 1,
        threshold: float = 1.0,
    ) -> None:
        self.seed = integer("seed", seed, 0)
        self.estimator = LastGroup() if estimator is None else estimator
        self.rule = Uniform() if rule is None else rule
        self.revisit = integer("revisit", revisit, 0)
        self.floor = integer("floor", floor, 1)
        if refill not in ("none", "full"):
            raise ValueError(f'`refill` must be "none" or "full", got {refill!r}')
        self.refill = refill
        in_range("threshold", threshold, -math.inf, math.inf, open_below=True, open_above=True)
        self.threshold = float(threshold)
        for name, value, kind in (("estimator", self.estimator, PassRate), ("rule", self.rule, Rule)):
            if not isinstance(value, kind):
                raise TypeError(f"`{name}` must be a {kind.__name__} object, got {value!r}")
        self.warn: Callable[[str], Any] = warnings.warn
        self.clock = -1
        self._shift = 0
        self._ended = False
        self.signals: dict[str, Signal] = {}
        self.report = CurriculumReport()
        self._draws = 0
        self._warned: set[str] = set()
        self._table = TaskTable(self.estimator.width)
        self.set_tasks(task_ids)
        # A rule that does not go with the estimator, or gives unusable scores, fails here.
        self._scores(self._table.active_rows(), self._generator())

    @property
    def task_ids(self) -> list[str]:
        """The tasks that can be drawn, sorted."""
        return [self._table.ids[row] for row in self._table.active_rows()]

    def set_tasks(self, task_ids: Iterable[str | int]) -> None:
        """Replaces the tasks that can be drawn; what is known about a task follows its id.

        Args:
            task_ids: Distinct ids, at least one. New ones start unobserved; missing ones are kept aside.
        """
        self._table.activate(distinct_ids(task_ids))

    @property
    def iteration(self) -> int:
        """The current iteration as the caller counts; the clock goes on where the caller starts again at 0."""
        return self.clock - self._shift

    def end_iteration(self) -> None:
        """Closes the current iteration, as at the end of a run: the next `sample` begins a new one, even at 0."""
        self.report.start(asked=0)
        self.signals = {}
        self._ended = True

    def sample(self, count: int, *, iteration: int | None = None, exclude: Collection[str] = ()) -> list[str]:
        """Draws tasks for one rollout.

        Args:
            count: Places to fill, at least 1 and at most the number of tasks.
            iteration: The clock by which evidence ages and revisits are planned. `None` counts calls. A second call
                with the same iteration is a further round of it, unless `end_iteration` came between.
            exclude: Tasks that must not be drawn. When this is not empty there are no revisits and no floor, so the
                result may be empty.

        Returns:
            Distinct task ids, at most `count`.

        Example:
            >>> sampler = TaskSampler(["a", "b", "c"], seed=0)
            >>> sampler.sample(3) == TaskSampler(["c", "b", "a"], seed=0).sample(3)
            True
        """
        rows = self._table.active_rows()
        if integer("count", count, 1) > rows.size:
            raise ValueError(f"cannot draw {count} different tasks of {rows.size}; ask for at most {rows.size}")
        self._advance(count, iteration)
        generator = self._generator()
        self._draws += 1
        scores = self._scores(rows, generator)
        if self.report.rounds == 1:
            self._count_pool(rows, scores)
        allowed = ~np.isin(rows, self._table.rows(exclude))
        in_pool = allowed & (scores > 0)
        outside = longest_undrawn(rows[allowed & (scores == 0)], self._table["drawn_at"], generator)
        revisits = 0 if exclude else min(self.revisit, outside.size, count - 1)
        drawn = self._draw_pool(rows[in_pool], scores[in_pool], count - revisits, generator)
        wanted = self._places_to_fill(count - revisits, int(in_pool.sum()), further_round=bool(exclude))
        stand_ins = max(0, min(wanted - drawn.size, outside.size - revisits))
        chosen = np.concatenate([drawn, outside[: revisits + stand_ins]])
        self._table["drawn_at"][chosen] = self.clock
        self.report.count_draw(drawn=chosen.size, revisits=revisits, stand_ins=stand_ins)
        return [self._table.ids[row] for row in chosen]

    def observe(
        self, task_id: str | int, rewards: Sequence[float | None], outcomes: Sequence[float | None] | None = None
    ) -> Signal:
        """Learns from one group of attempts at a task.

        Args:
            task_id: A known task; it need not be active, so results may come late.
            rewards: [n] of the whole group; `None` or NaN where nobody could score: left out of the estimate.
            outcomes: [n] what is compared with `threshold` where the reward is shaped; numbers or booleans, `None`
                for an attempt that has none, which is not passed.

        Returns:
            Whether the group has a signal, and if not why (see `group_signal`). Without outcomes, a group whose rewards
            differ is never taken for certain, even where none, or all, of them reach `threshold`: see `counted_passes`.
        """
        table, row = self._table, self._table.row(str(task_id))
        signal = group_signal(rewards, outcomes, threshold=self.threshold)
        passes, attempts = count_passes(rewards, outcomes, threshold=self.threshold)
        self.signals[str(task_id)] = signal
        if attempts == 0:
            self.report.count_group(signal, episodes=len(rewards), predicted=None)
            return signal
        rows = np.array([row])
        predicted = float(self._beliefs(rows).live_probability(attempts)[0])
        self.report.count_group(signal, episodes=len(rewards), predicted=predicted, passes=passes)
        age, worth = int(self._ages(rows)[0]), counted_passes(signal, passes, attempts)
        table["states"][row] = self.estimator.update(table["states"][row].copy(), worth, attempts, age)
        table["groups"][row] += 1
        table["attempts"][row] += attempts
        table["observed_at"][row] = max(self.clock, 0)
        return signal

    def observe_trajectories(self, trajectories: Iterable[Trajectory]) -> None:
        """Learns from trajectories, group by group; `info["outcome"]`, where given, is what counts as passing.

        In a group where some attempts have an outcome, one without (cut before its end, or failed) is not passed.

        Args:
            trajectories: Whole groups; trajectories without a task are left out.
        """
        groups: dict[tuple[str, str | None], list[Trajectory]] = {}
        for trajectory in trajectories:
            if trajectory.task is not None:
                groups.setdefault((trajectory.task, trajectory.group), []).append(trajectory)
        for (task_id, _), members in groups.items():
            outcomes = [outcome_of(member.info) for member in members]
            for member, outcome in zip(members, outcomes, strict=True):
                if outcome is None and member.info.get("outcome") is not None:
                    self.warn_once("outcome", advice.unusable_outcome(task_id, member.info["outcome"]))
            given = any(outcome is not None for outcome in outcomes)
            self.observe(task_id, [member.reward for member in members], outcomes if given else None)

    def estimate(self, task_id: str | int) -> float:
        """The estimated pass rate of a task now; the estimator's `initial` before its first group."""
        return float(self._beliefs(np.array([self._table.row(str(task_id))])).value[0])

    def estimates(self) -> dict[str, float]:
        """The estimated pass rate of every task that can be drawn."""
        rows = self._table.active_rows()
        return dict(zip(self.task_ids, self._beliefs(rows).value.tolist(), strict=True))

    def probabilities(self) -> dict[str, float]:
        """The chance of each task to be the next one drawn from the pool, passes left aside.

        Returns:
            Finite, non-negative, summing to 1 for any scores and temperature; uniform when no task is in the pool.

        Example:
            >>> TaskSampler(["a", "b"]).probabilities()
            {'a': 0.5, 'b': 0.5}
        """
        scores = self._scores(self._table.active_rows(), self._generator())
        weights = np.exp(log_weights(scores if scores.any() else np.ones_like(scores), self.rule.temperature))
        return dict(zip(self.task_ids, (weights / weights.sum()).tolist(), strict=True))

    def metrics(self) -> dict[str, float]:
        """The current iteration in numbers; the names are listed in `PassRateCurriculum`."""
        rows = self._table.active_rows()
        return self.report.metrics() | estimate_shares(self._beliefs(rows))

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on, as tensors and primitives."""
        return {
            "estimator": self.estimator.identity,
            "clock": self.clock,
            "shift": self._shift,
            "ended": self._ended,
            "draws": self._draws,
            "warned": sorted(self._warned),
            "table": self._table.state_dict(),
            "report": self.report.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken, matching tasks by id.

        Args:
            state: From `state_dict`. When its estimates were made by another estimator they cannot be read: every
                task starts unobserved, with a warning.
        """
        self._table.load_state_dict(state["table"])
        stored = (str(state["estimator"]), int(self._table["states"].shape[1]))
        own = (self.estimator.identity, self.estimator.width)
        if stored != own:
            self._table.forget_observations(self.estimator.width)
            self.warn(advice.other_estimator(stored, own))
        self.clock, self._draws = int(state["clock"]), int(state["draws"])
        self._shift, self._ended = int(state["shift"]), bool(state["ended"])
        self._warned = set(state["warned"])
        self.report.load_state_dict(state["report"])
        self.signals = {}

    def warn_once(self, key: str, message: str) -> None:
        """Warns the first time only, over restarts too."""
        if key not in self._warned:
            self._warned.add(key)
            self.warn(message)

    def _advance(self, count: int, iteration: int | None) -> None:
        clock = self.clock + 1 if iteration is None else integer("iteration", iteration, 0) + self._shift
        if self._ended and clock <= self.clock:
            # Another run counts from 0 again: evidence goes on aging from where it was.
            self._shift += self.clock + 1 - clock
            clock = self.clock + 1
        self._ended = False
        if clock != self.clock:
            message = advice.unreached(self.report, iteration=self.iteration, threshold=self.threshold)
            if message is not None and not isinstance(self.rule, Uniform):  # which looks at no pass rate
                self.warn_once("threshold", message)
            self.clock = clock
            self.signals = {}
            self.report.start(asked=count)
        self.report.rounds += 1

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, self._draws])

    def _ages(self, rows: Integers) -> Integers:
        observed_at = self._table["observed_at"][rows]
        return np.where(observed_at < 0, 0, np.maximum(self.clock - observed_at, 0))

    def _beliefs(self, rows: Integers) -> Beliefs:
        return self.estimator.beliefs(self._table["states"][rows], self._table["groups"][rows], self._ages(rows))

    def _scores(self, rows: Integers, generator: np.random.Generator) -> Floats:
        return checked_scores(self.rule, self._beliefs(rows), generator)

    def _draw_pool(self, pool: Integers, scores: Floats, count: int, generator: np.random.Generator) -> Integers:
        if not pool.size or (scores == scores[0]).all():
            return draw_pass(pool, self._table["in_pass"], count, generator)
        return pool[draw_weighted(scores, self.rule.temperature, count, generator)]

    def _places_to_fill(self, places: int, pool_size: int, *, further_round: bool) -> int:
        """How many of the places that are no revisits must not stay empty."""
        floor = 0 if further_round else min(self.floor, places)
        if pool_size < floor:
            where = (pool_size, len(self.task_ids), floor)
            self.warn_once("floor", advice.starved(self.report, *where, rule=self.rule, threshold=self.threshold))
        return places if self.refill == "full" else floor

    def _count_pool(self, rows: Integers, scores: Floats) -> None:
        excluded = scores == 0
        easy = int((excluded & (self._beliefs(rows).value >= self.rule.centre)).sum())
        self.report.count_pool(
            tasks=rows.size, pool_size=int((~excluded).sum()), easy=easy, hard=int(excluded.sum()) - easy
        )
