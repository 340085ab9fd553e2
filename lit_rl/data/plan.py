"""The plan of an iteration: which rank computes which trajectories in which microbatch of which step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Layout = Literal["packed", "padded"]
Microbatch = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Microbatches of every step and rank, equal on every rank that plans from the same lengths.

    Holds primitives only, so it can be compared, pickled and kept in a checkpoint.

    Attributes:
        microbatches: `[step][rank][k]` to the indices of its trajectories; `()` is a filler, computed with weight 0
            so that all ranks do the same number of passes. The indices are the caller's.
        max_tokens: The most positions that a microbatch may hold, padding included.
        layout: "packed": segments one after the other, no padding. "padded": one row per trajectory, each as long
            as the longest of the microbatch.
        num_tokens: Tokens of all trajectories in the plan.
        num_positions: Positions computed for them, padding included; fillers are not counted.
        lockstep_ratio: Cost of the dearest rank at every microbatch index, summed, over the mean cost of a rank:
            what sharded training pays, where ranks wait for each other at every microbatch. 1 is perfect.
        rank_total_ratio: Cost of the dearest rank of every step, summed, over the mean cost of a rank: what
            replicated training pays, where ranks wait once a step. 1 is perfect.

    Raises:
        ValueError: The ranks of a step, or the steps, have different numbers of microbatches.

    Example:
        >>> plan = StepPlan(microbatches=((((0, 2),), ((1,),)),), max_tokens=8, layout="packed", num_tokens=12,
        ...                 num_positions=12, lockstep_ratio=1.0, rank_total_ratio=1.0)
        >>> plan.num_steps, plan.world_size, plan.microbatches_per_step, plan.num_fillers, plan.steps
        (1, 2, 1, 0, ((0, 1, 2),))
    """

    microbatches: tuple[tuple[tuple[Microbatch, ...], ...], ...]
    max_tokens: int
    layout: Layout
    num_tokens: int
    num_positions: int
    lockstep_ratio: float
    rank_total_ratio: float

    def __post_init__(self) -> None:
        ranks = {len(step) for step in self.microbatches}
        counts = {len(rank) for step in self.microbatches for rank in step}
        if len(ranks) != 1 or len(counts) != 1 or 0 in ranks | counts:
            raise ValueError(
                f"a plan needs the same ranks in every step and the same microbatches on every rank, at least one of "
                f"each; got {sorted(ranks)} ranks and {sorted(counts)} microbatches"
            )

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return len(self.microbatches)

    @property
    def world_size(self) -> int:
        """Ranks W."""
        return len(self.microbatches[0])

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches K of each rank in each step: what `accumulate_grad_batches` has to be."""
        return len(self.microbatches[0][0])

    @property
    def num_microbatches(self) -> int:
        """Microbatches with trajectories, over all steps and ranks."""
        return sum(bool(microbatch) for step in self.microbatches for rank in step for microbatch in rank)

    @property
    def num_fillers(self) -> int:
        """Microbatches without trajectories, over all steps and ranks."""
        return self.num_steps * self.world_size * self.microbatches_per_step - self.num_microbatches

    @property
    def padding_share(self) -> float:
        """Share of the computed positions that hold no token; 0 when nothing is computed."""
        return 1.0 - self.num_tokens / self.num_positions if self.num_positions else 0.0

    @property
    def fill_share(self) -> float:
        """Share of the budget of the microbatches with trajectories that holds tokens; 0 without any."""
        return self.num_tokens / (self.num_microbatches * self.max_tokens) if self.num_microbatches else 0.0

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Ascending indices of the trajectories of each step, over all ranks."""
        return tuple(
            tuple(sorted(index for rank in step for microbatch in rank for index in microbatch))
            for step in self.microbatches
        )

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal plans of the same tokens, in any process: whether a position in one means anything."""
        return hashlib.sha256(repr((self.microbatches, self.num_tokens)).encode()).hexdigest()[:16]

    def for_rank(self, rank: int) -> list[Microbatch]:
        """What one rank computes, in order: the K microbatches of the first step, then those of the next.

        Args:
            rank: Number of the rank.

        Returns:
            `num_steps` x K tuples of indices.

        Raises:
            ValueError: There is no such rank in the plan.

        Example:
            >>> plan = StepPlan(microbatches=((((0,), ()),), (((1,), (2,)),)), max_tokens=8, layout="packed",
            ...                 num_tokens=3, num_positions=3, lockstep_ratio=1.0, rank_total_ratio=1.0)
            >>> plan.for_rank(0)
            [(0,), (), (1,), (2,)]
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"`rank` is {rank}, but the plan is for ranks 0 to {self.world_size - 1}")
        return [microbatch for step in self.microbatches for microbatch in step[rank]]
