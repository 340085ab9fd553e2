"""Log-probabilities before an iteration's first update: what the ratio of its later updates is taken against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_rl import strategies
from lit_rl.data.batch import PackedBatch
from lit_rl.trajectory import Trajectory

if TYPE_CHECKING:
    from lit_rl.policy.causal_lm import CausalLMPolicy


@torch.no_grad()
def score_trajectories(
    policy: CausalLMPolicy, batches: Iterable[PackedBatch], lengths: Sequence[int], device: torch.device
) -> list[Tensor]:
    """Scores an iteration with the microbatches it will be trained in, so that the first ratio is exactly 1.

    Args:
        policy: Before the first update; the precision context is the caller's.
        batches: This rank's microbatches, the same number on every rank.
        lengths: Tokens of each trajectory of the iteration.
        device: Where the policy is.

    Returns:
        float32 [L] for each trajectory, on the CPU, the same on every rank; 0 where a token is not scored.
    """
    mine: dict[int, Tensor] = {}
    for batch in batches:
        moved = batch.to(device)
        mine.update(_by_trajectory(batch, moved.grid(policy(moved).log_probs).flatten().cpu()))
    scored = [torch.zeros(length) for length in lengths]
    for share in strategies.gather_over_ranks(mine):
        for number, log_probs in share.items():
            scored[number] = log_probs
    return scored


def sampler_log_probs(trajectories: Sequence[Trajectory]) -> list[Tensor]:
    """The trajectories' own log-probabilities.

    Args:
        trajectories: In order.

    Returns:
        float32 [L] for each.

    Raises:
        ValueError: A trajectory has none.

    Example:
        >>> sampler_log_probs([Trajectory([1, 2], [0, 1], 1.0, log_probs=[0.0, -0.5])])[0].tolist()
        [0.0, -0.5]
    """
    found = []
    for number, trajectory in enumerate(trajectories):
        if trajectory.log_probs is None:
            raise ValueError(
                f"trajectory {number} (task {trajectory.task!r}) has no `log_probs`; `old_log_probs='sampler'` needs "
                "them, 'recompute' does not"
            )
        found.append(trajectory.log_probs)
    return found


def _by_trajectory(batch: PackedBatch, flat: Tensor) -> dict[int, Tensor]:
    pieces = zip(
        batch.trajectory_index.tolist(), batch.segment_starts.tolist(), batch.segment_lengths.tolist(), strict=True
    )
    return {index: flat[start : start + length].clone() for index, start, length in pieces if index >= 0}
