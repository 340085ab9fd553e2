"""Dynamic sampling: further rounds of tasks until enough groups have a signal, with a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lit_rl.curriculum.sampler import TaskSampler
from lit_rl.curriculum.validation import integer


@dataclass(frozen=True)
class DynamicSampling:
    """Asks for further tasks until `count` groups are live, for at most `limit` rounds.

    A round asks for as many tasks as live groups are still missing, none of them twice. The search ends when enough
    groups are live, after `limit` rounds, or when no task is left to try. Groups without a signal stay in the data,
    for they were paid for, and are counted. With equal rewards they cost the update nothing. Those without a signal by
    outcome alone (every attempt failed, or passed, while shaped rewards differ) have advantages and are trained on;
    `ZeroAdvantageMonitor` counts them under names of their own.

    Args:
        limit: Most rounds per iteration, the first included; at least 1.
        exhausted: What a search that ended too early does: "keep" goes on with the groups it has and warns once,
            "raise" stops the run. Both say how many tasks were tried and why their groups had no signal.

    Source: Yu et al. 2025 (DAPO), section 3.2, there without a limit.

    Example:
        >>> sampler = TaskSampler([str(i) for i in range(100)])
        >>> rounds = []
        >>> for task_ids in DynamicSampling(limit=3).rounds(sampler, count=2):
        ...     rounds.append(len(task_ids))
        ...     for task_id in task_ids:
        ...         signal = sampler.observe(task_id, [1.0, 0.0] if len(rounds) == 2 else [0.0, 0.0])
        >>> rounds
        [2, 2]
    """

    limit: int = 3
    exhausted: Literal["keep", "raise"] = "keep"

    def __post_init__(self) -> None:
        integer("limit", self.limit, 1)
        if self.exhausted not in ("keep", "raise"):
            raise ValueError(f'`exhausted` must be "keep" or "raise", got {self.exhausted!r}')

    def rounds(self, sampler: TaskSampler, count: int, *, iteration: int | None = None) -> Iterator[list[str]]:
        """Yields the tasks of each round; the caller passes every group to `sampler.observe` before the next one.

        Args:
            sampler: Draws the tasks and is told the outcomes.
            count: Live groups wanted.
            iteration: See `TaskSampler.sample`.

        Yields:
            Task ids of one round, at least one.

        Raises:
            RuntimeError: A task was not observed, or the search ended too early and `exhausted` is "raise".
        """
        tried: list[str] = []
        live = rounds = 0
        while live < count and rounds < self.limit:
            current = sampler.iteration if rounds else iteration
            task_ids = sampler.sample(count - live, iteration=current, exclude=tried)
            if not task_ids:
                break
            rounds += 1
            yield task_ids
            unobserved = [task_id for task_id in task_ids if task_id not in sampler.signals]
            if unobserved:
                raise RuntimeError(
                    f"{len(unobserved)} tasks of the round were not observed (first: {unobserved[0]!r}); call "
                    "`sampler.observe` for every task before asking for the next round"
                )
            tried += task_ids
            live += sum(sampler.signals[task_id] == "live" for task_id in task_ids)
        if live < count:
            self._exhausted(sampler, tried, live, count, rounds)

    def _exhausted(self, sampler: TaskSampler, tried: list[str], live: int, count: int, rounds: int) -> None:
        reasons = Counter(sampler.signals[task_id] for task_id in tried)
        message = (
            f"dynamic sampling found {live} of {count} live groups in {rounds} rounds (limit={self.limit}); it tried "
            f"{len(tried)} tasks: {', '.join(f'{number} {signal}' for signal, number in sorted(reasons.items()))}. "
            "Raise `limit`, use larger groups, or change the tasks or the `threshold`"
        )
        if self.exhausted == "raise":
            raise RuntimeError(message)
        sampler.warn_once("dynamic", message)
