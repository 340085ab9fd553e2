"""The verdict on trainer against sampler log-probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_rl.checks.sampler_ratio import check_sampler_ratio
from lit_rl.data.collate import collate
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.testing import oracle_log_probs, tiny_policy_model
from lit_rl.trajectory import Trajectory
from tests.helpers import random_trajectories


def leaky_log_probs(model: torch.nn.Module, trajectories: list[Trajectory]) -> Tensor:
    """One row, causal over its whole length, with positions that run on: every segment sees those before it."""
    batch = collate(trajectories)
    with torch.no_grad():
        logits = model(batch.input_ids).logits[0]
    scores = torch.log_softmax(logits[batch.predictors], -1)
    return scores.gather(1, batch.targets[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_a_leaking_row_is_told_from_a_proper_one(architecture: str) -> None:
    model = tiny_policy_model(architecture, max_position_embeddings=128, n_positions=128)
    trajectories = random_trajectories(8, lengths=(6, 12), temperature=1.0)
    sampled = torch.cat([oracle_log_probs(model, t).detach()[t.scored] for t in trajectories])
    policy = CausalLMPolicy(model, layout="packed")
    policy.resolve_layout()
    batch = collate(trajectories)
    with torch.no_grad():
        packed = policy(batch).log_probs
    first = (batch.segment_starts == 0)[batch.scored_segments]
    proper = check_sampler_ratio(packed, sampled, first_in_row=first)
    assert proper.ok
    assert proper.figures["outside_20_percent"] == 0.0
    plain = tiny_policy_model(architecture, max_position_embeddings=128, n_positions=128)
    leaking = check_sampler_ratio(leaky_log_probs(plain, trajectories), sampled, first_in_row=first)
    assert not leaking.ok
    assert leaking.figures["outside_first"] == 0.0
    assert "likely here" in leaking.message


def log_probs(count: int = 1000, seed: int = 0) -> Tensor:
    return -torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4


def test_agreement_up_to_rounding_is_fine() -> None:
    sampled = log_probs()
    verdict = check_sampler_ratio(sampled.float(), sampled.to(torch.bfloat16).float())
    assert verdict.ok
    assert verdict.figures["outside_20_percent"] == 0.0


def test_5_8_percent_outside_is_caught_and_causes_come_in_order() -> None:
    sampled = log_probs()
    trained = sampled.clone()
    trained[:58] -= 0.5
    verdict = check_sampler_ratio(trained, sampled)
    assert not verdict.ok
    assert verdict.figures["outside_20_percent"] == pytest.approx(0.058)
    places = [verdict.message.index(word) for word in ("packing leak", "temperature", "precision", "re-tokenised")]
    assert places == sorted(places)
    assert verdict.message.startswith("5.80% of 1000 scored tokens")


def test_a_leak_shows_only_behind_other_segments() -> None:
    sampled = log_probs()
    first = torch.zeros(1000, dtype=torch.bool)
    first[:300] = True
    leaking = torch.where(first, sampled, sampled - 1.0)
    assert "likely here" in check_sampler_ratio(leaking, sampled, first_in_row=first).message
    everywhere = check_sampler_ratio(sampled - 1.0, sampled, first_in_row=first)
    assert not everywhere.ok
    assert "likely here" not in everywhere.message


def test_another_temperature_is_caught() -> None:
    logits = torch.randn(500, 20, generator=torch.Generator().manual_seed(0)) * 3
    sampled = torch.log_softmax(logits / 0.7, -1)[:, 0]
    assert not check_sampler_ratio(torch.log_softmax(logits, -1)[:, 0], sampled).ok


def test_the_allowed_share_is_the_callers() -> None:
    sampled = log_probs()
    trained = sampled.clone()
    trained[:30] += 1.0
    assert not check_sampler_ratio(trained, sampled).ok
    assert check_sampler_ratio(trained, sampled, allowed_share=0.03).ok


def test_log_probs_that_are_not_finite_fail() -> None:
    sampled = log_probs(10)
    trained = sampled.clone()
    trained[3] = float("nan")
    verdict = check_sampler_ratio(trained, sampled)
    assert not verdict.ok
    assert "1 more tokens" in verdict.message
    assert verdict.figures["non_finite"] == 1
    assert not check_sampler_ratio(torch.full((2,), float("nan")), torch.zeros(2)).ok


def test_nothing_to_compare_is_fine() -> None:
    assert check_sampler_ratio(torch.zeros(0), torch.zeros(0)).ok


def test_shapes_and_levels_are_checked() -> None:
    with pytest.raises(ValueError, match=r"shape \[2\], expected \[3\]"):
        check_sampler_ratio(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="allowed_share"):
        check_sampler_ratio(torch.zeros(3), torch.zeros(3), allowed_share=2.0)
