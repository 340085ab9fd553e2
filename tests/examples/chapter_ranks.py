"""What two processes do for `test_chapter_exercises.py`: one scalar is summed before the backward pass, or none."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lit_rl import CausalLMPolicy, Trajectory, collate, loss_weights
from lit_rl.checks.gradients import relation, take_gradients
from lit_rl.objectives import supervised
from lit_rl.testing import tiny_policy_model

# Scored tokens by rank and microbatch: as uneven as a scheduler may make them.
COUNTS = [[[1, 2], [4]], [[3, 9], [2, 2, 2]]]


def trajectory(rank: int, microbatch: int, index: int, scored: int) -> Trajectory:
    generator = torch.Generator().manual_seed(100 * rank + 10 * microbatch + index)
    ids = torch.randint(3, 32, (2 + scored,), generator=generator)
    return Trajectory(ids, [False, False] + [True] * scored, 0.0)


def microbatches(rank: int) -> list[list[Trajectory]]:
    return [[trajectory(rank, k, i, n) for i, n in enumerate(counts)] for k, counts in enumerate(COUNTS[rank])]


def gradient(policy: CausalLMPolicy, parts: list[list[Trajectory]], weights: list[Tensor]) -> dict[str, Tensor]:
    policy.zero_grad(set_to_none=True)
    for part, weight in zip(parts, weights, strict=True):
        batch = collate(part, weights=weight)
        (batch.weights * supervised(policy(batch).log_probs)).sum().backward()
    return take_gradients(policy)


def summed(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """What DDP does to gradients, times the number of ranks."""
    for value in own.values():
        dist.all_reduce(value)
    return own


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    policy = CausalLMPolicy(tiny_policy_model(dtype=torch.float64), layout="packed")
    own = microbatches(rank)
    counts = [[t.num_scored for t in part] for part in own]

    # One scalar, before any backward pass.
    total = torch.tensor(sum(map(sum, counts)))
    dist.all_reduce(total)
    with_scalar = [loss_weights(part, mode="constant", constant=float(total)) for part in counts]

    # None: the plan is the same on every rank, so each knows all counts.
    everywhere = [n for rank_counts in COUNTS for part in rank_counts for n in part]
    without = [loss_weights(everywhere)[: len(part)] for part in counts]

    # The mistake: each microbatch divides by its own tokens, the loop by K, the strategy by the ranks.
    mistaken = [loss_weights(part) / (len(own) * ranks) for part in counts]

    single = [part for other in range(ranks) for part in microbatches(other)]
    whole = [trajectory for part in single for trajectory in part]
    reference = gradient(policy, [whole], [loss_weights(everywhere)])
    errors = {
        name: relation(summed(gradient(policy, own, weights)), reference)[0]
        for name, weights in (("one scalar", with_scalar), ("no scalar", without), ("mistaken", mistaken))
    }
    factors = [float(weight[0] * total) for weight in mistaken]
    derived = [float(total) / (ranks * len(own) * sum(part)) for part in counts]
    assert all(abs(found - expected) < 1e-12 for found, expected in zip(factors, derived, strict=True)), factors
    assert errors["one scalar"] < 1e-12, errors
    assert errors["no scalar"] < 1e-12, errors
    assert errors["mistaken"] > 0.05, errors
    print(f"rank {rank} of {ranks}: {errors}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
