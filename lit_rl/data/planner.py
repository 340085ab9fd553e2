"""Trajectories to steps, ranks and microbatches: the same plan on every rank, from the lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lit_rl.data.balance import Objective, deal, lockstep_ratio, pack_balanced, rank_total_ratio
from lit_rl.data.bounds import fewest_rows_bound
from lit_rl.data.cost import Cost, SegmentCost, microbatch_costs, segment_costs
from lit_rl.data.packing import Lengths, as_count, as_lengths, check_choice, first_fit, fit_lengths
from lit_rl.data.padded import fewest_padded, group_padded, most_per_microbatch
from lit_rl.data.partition import Groups, Partition, Seed, canonical_order, group_ids, partition_steps, seeded_generator
from lit_rl.data.plan import Layout, Microbatch, StepPlan

__all__ = ["MicrobatchesError", "Partition", "StepPlan", "partition_steps", "plan_partition", "plan_steps"]

Integers = npt.NDArray[np.int64]


class MicrobatchesError(ValueError):
    """A fixed number of microbatches per step is too small for the token budget.

    Attributes:
        needed: The number that the trajectories need.
    """

    def __init__(self, given: int, needed: int, max_tokens: int) -> None:
        super().__init__(
            f"a step needs {needed} microbatches per rank to stay within `max_tokens`={max_tokens}, but "
            f"`microbatches_per_step` (`accumulate_grad_batches` on the Trainer) is {given}; set it to {needed}, or "
            "raise `max_tokens`"
        )
        self.needed = needed


class _Problem(NamedTuple):
    """What is the same for every step of a plan."""

    max_tokens: int
    ranks: int
    layout: Layout
    cost: Cost
    objective: Objective


class _Step(NamedTuple):
    """Trajectories of one step, sorted from long to short."""

    members: Integers
    lengths: Integers
    costs: npt.NDArray[np.float64]


def plan_steps(
    lengths: Lengths,
    *,
    max_tokens: int,
    num_steps: int = 1,
    world_size: int = 1,
    layout: Layout = "packed",
    cost: Cost | None = None,
    seed: Seed = None,
    groups: Groups | None = None,
    partition: Partition | None = None,
    objective: Objective = "lockstep",
    microbatches_per_step: int | None = None,
) -> StepPlan:
    """Plans the microbatches of `num_steps` optimizer steps on `world_size` ranks under a hard token budget.

    Steps are a random partition of the trajectories (`partition_steps`). Within a step every rank gets the same
    number K of microbatches, the smallest that was found to fit and never more than first-fit decreasing needs; the
    step that needs most sets K for all, and the others spread out over it. Fillers appear only where a step has
    fewer than K x W trajectories. Microbatches computed at the same time on different ranks cost about the same;
    their order over k is random and the same for all ranks.

    The plan is a function of the seed and of the sorted lengths (with `groups`: of each group's): another order of
    the same trajectories gives the same plan with other indices, where equal lengths may swap places.

    Args:
        lengths: [n] tokens of each trajectory, each from 1 to `max_tokens`; none is allowed and makes fillers only.
        max_tokens: The most positions of a microbatch, padding included. Equality is allowed.
        num_steps: Optimizer steps.
        world_size: Ranks W.
        layout: "packed": a microbatch holds the sum of its lengths. "padded": count x longest; trajectories of
            similar length are put together, within their step.
        cost: What is balanced: lengths of a microbatch's segments to a number, by default `SegmentCost()`. In a
            padded microbatch all segments have the longest's length. Balance is best when the cost adds up over
            segments and grows with their length; budget and counts hold for any.
        seed: Of the partition and of the order of microbatches; `None` is seed 0, as all ranks have to agree.
        groups: [n] group id of each trajectory.
        partition: What is divided into steps: "groups" (default when `groups` are given) keeps a group in one step;
            "trajectories" (default otherwise) makes steps of more equal size.
        objective: "lockstep" makes microbatches of the same index alike over ranks, for sharded strategies, where
            ranks wait for each other in every microbatch; "rank_total" makes the ranks' totals alike, for replicated
            ones, where they wait once a step.
        microbatches_per_step: A fixed K instead of the smallest.

    Returns:
        The plan.

    Raises:
        TypeError: A length or count is not an integer.
        ValueError: A trajectory is empty or above the budget (named, before anything is planned), or an argument
            cannot work.
        MicrobatchesError: `microbatches_per_step` is too small; says how many are needed.

    Example:
        >>> plan = plan_steps([9, 2, 4, 7], max_tokens=10, world_size=2)
        >>> plan.microbatches_per_step, plan.num_fillers, plan.padding_share
        (2, 0, 0.0)
        >>> sorted(plan.for_rank(0) + plan.for_rank(1))
        [(0,), (1,), (2,), (3,)]
    """
    values = as_lengths(lengths)
    if partition is None:
        partition = "trajectories" if groups is None else "groups"
    check_choice(partition, "partition", ("groups", "trajectories"))
    if partition == "groups" and groups is None:
        raise ValueError("`partition='groups'` needs `groups`, one id for each trajectory")
    ids = None if groups is None else group_ids(groups, len(values))
    order = canonical_order(values, ids if partition == "groups" else None)
    keys = None if ids is None or partition == "trajectories" else [ids[index] for index in order.tolist()]
    steps = [order[part] for part in partition_steps(len(values), num_steps, groups=keys, seed=seed)]
    return plan_partition(
        values,
        steps,
        max_tokens=max_tokens,
        world_size=world_size,
        layout=layout,
        cost=cost,
        seed=seed,
        objective=objective,
        microbatches_per_step=microbatches_per_step,
    )


def plan_partition(
    lengths: Lengths,
    steps: Sequence[Sequence[int] | Integers],
    *,
    max_tokens: int,
    world_size: int = 1,
    layout: Layout = "packed",
    cost: Cost | None = None,
    seed: Seed = None,
    objective: Objective = "lockstep",
    microbatches_per_step: int | None = None,
) -> StepPlan:
    """Plans microbatches for steps that are already chosen; trajectories in no step stay out of the plan.

    Args:
        lengths: [n] tokens of each trajectory; only those in `steps` are looked at.
        steps: Indices of the trajectories of each step; an empty step makes fillers.
        max_tokens: As for `plan_steps`, like all that follow.
        world_size: Ranks W.
        layout: "packed" or "padded".
        cost: Lengths of a microbatch's segments to a number, by default `SegmentCost()`.
        seed: Of the order of microbatches.
        objective: "lockstep" or "rank_total".
        microbatches_per_step: A fixed K instead of the smallest.

    Returns:
        The plan; its indices are those of `lengths`.

    Raises:
        TypeError: A length or count is not an integer.
        ValueError: A trajectory in a step is empty, above the budget or there twice, or an argument cannot work.
        MicrobatchesError: `microbatches_per_step` is too small; says how many are needed.

    Example:
        >>> plan_partition([9, 2, 4, 7], [[1, 2], [3]], max_tokens=10).microbatches
        ((((2, 1),),), (((3,),),))
    """
    values = as_lengths(lengths)
    check_choice(layout, "layout", ("packed", "padded"))
    check_choice(objective, "objective", ("lockstep", "rank_total"))
    if cost is not None and not callable(cost):
        raise TypeError(f"`cost` must map the lengths of a microbatch to a number, got {cost!r}")
    as_count(len(steps), "number of steps")
    problem = _Problem(
        as_count(max_tokens, "max_tokens"), as_count(world_size, "world_size"), layout, cost or SegmentCost(), objective
    )
    members = [as_lengths(step, "steps") for step in steps]
    _check_members(values, members, problem.max_tokens)
    sorted_steps = [_sorted_step(values, step, problem) for step in members]
    needed = max(_fewest_per_rank(step, problem) for step in sorted_steps)
    per_rank = needed if microbatches_per_step is None else as_count(microbatches_per_step, "microbatches_per_step")
    if per_rank < needed:
        raise MicrobatchesError(per_rank, needed, problem.max_tokens)
    generator = seeded_generator(seed, "order")
    planned = [_plan_step(step, per_rank, problem, generator) for step in sorted_steps]
    costs = np.stack([step_costs for _, step_costs in planned])
    microbatches = tuple(microbatches for microbatches, _ in planned)
    return StepPlan(
        microbatches=microbatches,
        max_tokens=problem.max_tokens,
        layout=layout,
        num_tokens=sum(int(step.lengths.sum()) for step in sorted_steps),
        num_positions=sum(_positions(microbatch, values, layout) for s in microbatches for r in s for microbatch in r),
        lockstep_ratio=lockstep_ratio(costs),
        rank_total_ratio=rank_total_ratio(costs),
    )


def _check_members(lengths: Integers, steps: list[Integers], max_tokens: int) -> None:
    indices = np.concatenate(steps)
    if indices.size and indices.max() >= len(lengths):
        raise ValueError(f"`steps` names trajectory {indices.max()}, but there are {len(lengths)} lengths")
    planned, counts = np.unique(indices, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"trajectory {planned[np.argmax(counts > 1)]} is in `steps` more than once")
    # Lengths outside the plan are made harmless instead of removed, so that an error names the caller's index.
    looked_at = np.ones_like(lengths)
    looked_at[planned] = lengths[planned]
    fit_lengths(looked_at, max_tokens, name="max_tokens")


def _sorted_step(lengths: Integers, members: Integers, problem: _Problem) -> _Step:
    # Caller's indices decide between equal lengths.
    members = np.sort(members)
    members = members[np.argsort(-lengths[members], kind="stable")]
    return _Step(members, lengths[members], segment_costs(problem.cost, lengths[members]))


def _fewest_per_rank(step: _Step, problem: _Problem) -> int:
    if not len(step.members):
        return 1
    if problem.layout == "padded":
        return -(-fewest_padded(most_per_microbatch(step.lengths, problem.max_tokens)) // problem.ranks)
    per_rank = -(-len(first_fit(step.lengths.tolist(), problem.max_tokens)) // problem.ranks)
    bound = -(-fewest_rows_bound(step.lengths, problem.max_tokens) // problem.ranks)
    while per_rank > bound and _pack(step, per_rank - 1, problem) is not None:
        per_rank -= 1
    return per_rank


def _pack(step: _Step, per_rank: int, problem: _Problem) -> tuple[list[list[int]], Integers | None] | None:
    return pack_balanced(step.lengths, step.costs, problem.max_tokens, problem.ranks, per_rank, problem.objective)


def _plan_step(
    step: _Step, per_rank: int, problem: _Problem, generator: np.random.Generator
) -> tuple[tuple[tuple[Microbatch, ...], ...], npt.NDArray[np.float64]]:
    owners = None
    if problem.layout == "packed":
        packed = _pack(step, per_rank, problem)
        assert packed is not None, "the same packing succeeded before"
        bins, owners = packed
    else:
        bins = group_padded(
            step.lengths, step.costs, problem.max_tokens, problem.ranks * per_rank, balance=problem.ranks > 1
        )
    costs = microbatch_costs(problem.cost, [_computed_lengths(chosen, step.lengths, problem.layout) for chosen in bins])
    if owners is None:
        dealt = deal(costs, problem.ranks, problem.objective)
    else:
        dealt = np.lexsort((-costs, owners)).reshape(problem.ranks, per_rank)
    # One order over k for all ranks keeps what is computed together alike; no rank is always the one served first.
    dealt = dealt[generator.permutation(problem.ranks)][:, generator.permutation(per_rank)]
    members = step.members.tolist()
    contents = [tuple(members[position] for position in chosen) for chosen in bins]
    return tuple(tuple(contents[number] for number in rank) for rank in dealt.tolist()), costs[dealt]


def _computed_lengths(positions: list[int], lengths: Integers, layout: Layout) -> list[int]:
    tokens: list[int] = lengths[positions].tolist()
    return tokens if layout == "packed" or not tokens else [max(tokens)] * len(tokens)


def _positions(microbatch: Microbatch, lengths: Integers, layout: Layout) -> Any:
    tokens = lengths[list(microbatch)]
    if not len(tokens):
        return 0
    return int(tokens.sum()) if layout == "packed" else int(tokens.max()) * len(tokens)
