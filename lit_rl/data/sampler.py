"""A sampler whose items are microbatches under a token budget, the same number of them on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from lit_rl.data.balance import Objective
from lit_rl.data.cost import Cost
from lit_rl.data.packing import Lengths, as_count, as_lengths
from lit_rl.data.partition import Groups, Partition, group_ids
from lit_rl.data.plan import Layout, StepPlan
from lit_rl.data.planner import MicrobatchesError, plan_partition, plan_steps
from lit_rl.options import as_integer

# Random partitions into steps that are tried for an epoch before the one that is known to fit is used again.
PARTITIONS_TRIED = 32


class TokenBudgetSampler(DistributedSampler[list[int]]):
    """Yields lists of trajectory indices, one microbatch each, planned over all ranks by `plan_steps`.

    Used with `DataLoader(dataset, sampler=sampler, batch_size=None)`: the data set is then indexed with the whole
    list and returns one microbatch. As a `DistributedSampler` it is left alone by a default `Trainer`, which also
    tells it the epoch. An empty list is a filler, which the data set turns into a microbatch of weight 0; ranks get
    the same number of items, disjoint, and together every trajectory once.

    Every epoch has another order (and another partition into steps, with `num_steps` above 1), the same for the same
    seed and epoch wherever it was begun. All epochs have the length of epoch 0: a partition that needs more
    microbatches is drawn again, and after 32 attempts that of epoch 0 is used once more.

    Args:
        lengths: [n] tokens of each trajectory, each from 1 to `max_tokens`.
        max_tokens: The most positions of a microbatch, padding included.
        num_replicas: Ranks; by default those of `torch.distributed` where it is initialized, else 1.
        rank: This rank; by default that of `torch.distributed` where it is initialized, else 0.
        shuffle: Whether epochs differ; if not, every epoch has the plan of `seed` alone.
        seed: The same on every rank.
        layout: "packed" or "padded", like all that follow as for `plan_steps`.
        num_steps: Optimizer steps in an epoch.
        groups: [n] group id of each trajectory.
        partition: "groups" or "trajectories".
        cost: Lengths of a microbatch's segments to a number.
        objective: "lockstep" or "rank_total".
        microbatches_per_step: A fixed number of microbatches of each rank in each step.
        epoch: The epoch to begin with. Lightning creates the first iterator before it calls `set_epoch`, so a
            loader that is made for an epoch should say which.

    Attributes:
        skip: Microbatches left out at the beginning of a pass, for resuming, until it is set back to 0; `len` stays.

    Raises:
        TypeError: A length, the budget or another count is not an integer.
        ValueError: The budget cannot work, a trajectory is empty or above it, or `rank` is not below `num_replicas`.
        MicrobatchesError: `microbatches_per_step` is too small; says how many are needed.

    Example:
        >>> sampler = TokenBudgetSampler([9, 2, 4, 7], max_tokens=10, num_replicas=2, rank=0)
        >>> other = TokenBudgetSampler([9, 2, 4, 7], max_tokens=10, num_replicas=2, rank=1)
        >>> len(sampler), len(other), sorted([*sampler, *other])
        (2, 2, [[0], [1], [2], [3]])
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        layout: Layout = "packed",
        num_steps: int = 1,
        groups: Groups | None = None,
        partition: Partition | None = None,
        cost: Cost | None = None,
        objective: Objective = "lockstep",
        microbatches_per_step: int | None = None,
        epoch: int = 0,
    ) -> None:
        started = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if started else 1
        if rank is None:
            rank = dist.get_rank() if started else 0
        values = as_lengths(lengths)
        self._setup(len(values), as_count(num_replicas, "num_replicas"), rank)
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "world_size": num_replicas,
            "layout": layout,
            "cost": cost,
            "objective": objective,
        }
        ids = None if groups is None else group_ids(groups, len(values))
        self._draw = partial(plan_steps, values, num_steps=num_steps, groups=ids, partition=partition, **options)
        self._redraw = partial(plan_partition, values, **options)
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._first = self._draw(seed=self._seed(0), microbatches_per_step=microbatches_per_step)
        self._current = (self._seed(0), self._first)
        self.set_epoch(epoch)

    @classmethod
    def from_plan(cls, plan: StepPlan, rank: int = 0) -> TokenBudgetSampler:
        """A sampler for one rank of a finished plan, which is the same in every epoch.

        Args:
            plan: Made by `plan_steps` or `plan_partition`.
            rank: This rank.

        Returns:
            The sampler.

        Raises:
            ValueError: There is no such rank in the plan.

        Example:
            >>> list(TokenBudgetSampler.from_plan(plan_steps([3, 3], max_tokens=8)))
            [[0, 1]]
        """
        sampler = cls.__new__(cls)
        sampler._setup(sum(len(step) for step in plan.steps), plan.world_size, rank)
        sampler.shuffle, sampler.seed, sampler.epoch = False, 0, 0
        sampler._first = plan
        sampler._current = (sampler._seed(0), plan)
        return sampler

    def _setup(self, count: int, world_size: int, rank: int) -> None:
        place = as_integer(rank)
        if place is None:
            raise TypeError(f"`rank` must be an integer, got {rank!r}")
        if not 0 <= place < world_size:
            raise ValueError(f"`rank` is {rank}, expected 0 to {world_size - 1} for {world_size} ranks")
        super().__init__(range(count), num_replicas=world_size, rank=place)  # type: ignore[arg-type]
        self.skip = 0

    def _seed(self, attempt: int) -> tuple[int, ...]:
        return (self.seed, self.epoch, attempt) if self.shuffle else (self.seed,)

    @property
    def plan(self) -> StepPlan:
        """The plan of the current epoch, for all ranks."""
        if self._current[0] != self._seed(0):
            self._current = (self._seed(0), self._plan())
        return self._current[1]

    def _plan(self) -> StepPlan:
        per_step = self._first.microbatches_per_step
        for attempt in range(PARTITIONS_TRIED):
            try:
                return self._draw(seed=self._seed(attempt), microbatches_per_step=per_step)
            except MicrobatchesError:
                continue
        return self._redraw(steps=self._first.steps, seed=self._seed(PARTITIONS_TRIED), microbatches_per_step=per_step)

    def __len__(self) -> int:
        """Microbatches of this rank in an epoch; equal for all ranks and epochs."""
        return self._first.num_steps * self._first.microbatches_per_step

    def __iter__(self) -> Iterator[list[int]]:
        """Microbatches of this rank in order; `microbatches_per_step` of them make one step."""
        return iter([list(microbatch) for microbatch in self.plan.for_rank(self.rank)[self.skip :]])
