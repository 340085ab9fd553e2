"""Exercises 1 and 3 of the chapter."""

from __future__ import annotations

import pytest
import torch

from examples.chapter.padding import alone, variants
from lit_rl import CausalLMPolicy, Trajectory, collate, loss_weights
from lit_rl.testing import tiny_policy_model
from tests.distributed.launch import launch

NOISE = 1e-5


def trajectory(*ids: int) -> Trajectory:
    return Trajectory(ids, [False] + [True] * (len(ids) - 1), 0.0)


def moved(architecture: str, *segments: Trajectory) -> dict[str, float]:
    """Largest difference in nats to the segments alone, for each way to read the packed row."""
    policy = CausalLMPolicy(tiny_policy_model(architecture), layout="packed")
    reference = alone(policy, segments, range(len(segments)))
    with torch.no_grad():
        read = {name: policy(batch).log_probs for name, batch in variants(collate(segments)).items()}
    return {name: float((log_probs - reference).abs().max()) for name, log_probs in read.items()}


def test_each_bug_is_found_by_itself():
    found = moved("gpt2", trajectory(5, 6, 7), trajectory(8, 9, 10, 11))
    assert found["restarted"] > 1e-2  # the mask bug alone
    assert found["block_running"] > 1e-2  # the position bug alone
    assert found["running"] > 1e-2
    assert found["right"] < NOISE


def test_smallest_pair_that_shows_the_position_bug_and_not_the_mask_bug():
    # The second segment begins with the only token of the first. Under a plain causal mask it attends to its own twin:
    # an average of two equal values is that value, in every layer. Running positions still move it by one.
    found = moved("gpt2", trajectory(5), trajectory(5, 9))
    assert found["restarted"] < NOISE
    assert found["block_running"] > 1e-2


def test_no_smaller_pair_shows_anything():
    # Three tokens are the fewest: a segment in front, and behind it one scored token with one to predict it.
    with_first_scored = collate([trajectory(5), trajectory(6)])
    assert with_first_scored.num_scored == 0
    found = moved("gpt2", trajectory(5, 6), trajectory(5))
    assert max(found.values()) < NOISE  # the first segment has nothing in front of it


def test_a_different_first_token_shows_the_mask_bug():
    assert moved("gpt2", trajectory(6), trajectory(5, 9))["restarted"] > 1e-2


def test_rotary_positions_hide_the_position_bug_from_any_pair():
    found = moved("qwen3", trajectory(5, 6, 7), trajectory(8, 9, 10, 11))
    assert found["block_running"] < NOISE
    assert found["restarted"] > 1e-2


@pytest.mark.parametrize("counts", [[[3, 3], [3, 3]], [[1, 7], [2, 30]], [[5]]])
def test_weight_of_a_token_under_a_mean_per_microbatch(counts):
    # Rank r of W averages over K microbatches, and the strategy over ranks: 1 / (W K n) instead of 1 / N.
    ranks, per_rank = len(counts), len(counts[0])
    total = sum(map(sum, counts))
    right = float(loss_weights([n for rank in counts for n in rank])[0])
    for rank in counts:
        for tokens in rank:
            mistaken = float(loss_weights([tokens])[0]) / per_rank / ranks
            assert mistaken / right == pytest.approx(total / (ranks * per_rank * tokens))


def test_two_ranks_need_one_scalar_or_none():
    output = launch("tests.examples.chapter_ranks", [], processes=2, timeout=120)
    assert output.count("one scalar") == 2
