"""The verdict on trainer against sampler log-probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_rl.checks.sampler_ratio import check_sampler_ratio
from lit_rl.checks.verdict import Verdict
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


LOGITS = torch.randn(2000, 200, generator=torch.Generator().manual_seed(0)) * 2


def top_p(logits: Tensor, kept: float) -> Tensor:
    ordered, order = logits.softmax(-1).sort(descending=True)
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, ordered.cumsum(-1) - ordered < kept)
    return logits.where(mask, -torch.inf)


def top_k(logits: Tensor, k: int) -> Tensor:
    return logits.where(logits >= logits.topk(k)[0][:, -1:], -torch.inf)


def drawn(trainer: Tensor, sampler: Tensor, count: int, seed: int = 0) -> Verdict:
    """Draws one token per row from the sampler and compares."""
    torch.manual_seed(seed)
    rows = torch.randperm(len(trainer))[:count]
    trainer, sampler = trainer[rows].log_softmax(-1), sampler[rows].log_softmax(-1)
    ids = sampler.exp().multinomial(1)
    return check_sampler_ratio(trainer.gather(1, ids)[:, 0], sampler.gather(1, ids)[:, 0])


@pytest.mark.parametrize("sampler", [top_p(LOGITS, 0.95), top_p(LOGITS, 0.85), top_k(LOGITS, 40), top_k(LOGITS, 1)])
def test_a_cut_distribution_is_seen_and_named_first(sampler: Tensor) -> None:
    verdict = drawn(LOGITS, sampler, 300)
    assert not verdict.ok
    kept = LOGITS.softmax(-1).where(sampler > -torch.inf, 0.0).sum(-1).mean()
    assert verdict.figures["mean_ratio"] == pytest.approx(float(kept), abs=0.02)
    assert "(1) cut distribution (top-p, top-k)" in verdict.message
    assert "(2) packing leak" in verdict.message
    assert f"the mean ratio is {verdict.figures['mean_ratio']:.4f}" in verdict.message


@pytest.mark.parametrize("count", [1, 3, 30, 300])
def test_healthy_samplers_are_not_called_cut(count: int) -> None:
    noise = torch.randn(LOGITS.shape, generator=torch.Generator().manual_seed(1)) * 0.02
    # Exact, with noise of a kernel, in bfloat16, and at another temperature that the trajectories record.
    for sampler in (LOGITS, LOGITS + noise, LOGITS.to(torch.bfloat16).float()):
        for temperature in (1.0, 0.7):
            for seed in range(20):
                verdict = drawn(LOGITS / temperature, sampler / temperature, count, seed)
                assert verdict.ok, verdict.message


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_another_temperature_is_not_called_a_cut(temperature: float) -> None:
    for seed in range(10):
        verdict = drawn(LOGITS, LOGITS / temperature, 300, seed)
        assert not verdict.ok
        assert "(1) packing leak" in verdict.message


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
