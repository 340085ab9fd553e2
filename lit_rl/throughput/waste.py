"""What a token budget wastes: padding, and ranks that wait for the slowest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_rl.data.planner import plan_steps
from lit_rl.throughput.flops import AttentionConvention, model_flops
from lit_rl.throughput.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class BudgetWaste:
    """One token budget on a set of lengths.

    Args:
        max_tokens: The budget.
        microbatches: Microbatches per step and rank.
        padding_share: Share of the computed positions that are padding.
        useful_share: Of the time in which ranks compute or wait for the slowest of them, the share that they compute.
    """

    max_tokens: int
    microbatches: int
    padding_share: float
    useful_share: float


def budget_waste(
    shape: ModelShape,
    lengths: Sequence[int],
    max_tokens: int,
    *,
    gpus: int,
    steps: int = 1,
    attention: AttentionConvention = "causal_half",
) -> BudgetWaste:
    """Plans the lengths as the data module would, and counts the time ranks wait for each other.

    Args:
        shape: For the FLOPs of a segment.
        lengths: Tokens of each trajectory of the iteration.
        max_tokens: The token budget.
        gpus: Data-parallel ranks.
        steps: Optimizer steps per iteration.
        attention: Convention for attention pairs.

    Returns:
        The plan's waste, when every microbatch ends with the slowest rank.

    Raises:
        ValueError: A length exceeds the budget.
    """
    plan = plan_steps(list(lengths), max_tokens=max_tokens, num_steps=steps, world_size=gpus)
    costs = [model_flops(shape, [length], attention=attention).model for length in lengths]
    slowest = 0.0
    for ranks in plan.microbatches:
        for microbatch in zip(*ranks, strict=True):
            slowest += max(sum(costs[index] for index in indices) for indices in microbatch)
    return BudgetWaste(
        max_tokens=max_tokens,
        microbatches=plan.microbatches_per_step,
        padding_share=plan.padding_share,
        useful_share=sum(costs) / (gpus * slowest),
    )


def padded_share(lengths: Sequence[int], sequences: int = 8) -> float:
    """Padding of a padded batch: share of positions that are none when every `sequences` in a row share a width.

    Example:
        >>> padded_share([1, 1, 1, 5], sequences=4)
        0.6
    """
    groups = [lengths[start : start + sequences] for start in range(0, len(lengths), sequences)]
    positions = sum(len(group) * max(group) for group in groups)
    return 1 - sum(lengths) / positions
