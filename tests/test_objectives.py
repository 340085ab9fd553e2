from __future__ import annotations

import math

import pytest
import torch

from lit_rl import objectives

LN2 = math.log(2.0)


def test_clipped_ratio_by_hand():
    # Ratios 2, 0.5, 2, 0.5 against clips 0.8 and 1.3, advantages +1, +1, -1, -1.
    log_probs = torch.tensor([LN2, -LN2, LN2, -LN2], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    loss = objectives.clipped_ratio(log_probs, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.3)
    assert loss.tolist() == pytest.approx([-1.3, -0.5, 2.0, 0.8])
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    # The gradient is -A * ratio where the clip is not active, 0 where it is.
    assert gradient.tolist() == pytest.approx([0.0, -0.5, 2.0, 0.0])


def test_on_policy_ratio_is_exactly_one_and_its_gradient_is_reinforce():
    log_probs = torch.randn(5, dtype=torch.float64).requires_grad_()
    advantages = torch.randn(5, dtype=torch.float64)
    (clipped,) = torch.autograd.grad(objectives.clipped_ratio(log_probs, None, advantages).sum(), log_probs)
    (plain,) = torch.autograd.grad(objectives.reinforce(log_probs, advantages).sum(), log_probs)
    assert torch.equal(clipped, plain)
    assert objectives.ratio_diagnostics(log_probs, None, advantages).ratio.tolist() == [1.0] * 5


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    log_probs = torch.tensor([LN2, 0.0], requires_grad=True)
    loss = objectives.cispo(log_probs, torch.zeros(2), torch.tensor([1.0, -2.0]), clip_high=0.5)
    loss.sum().backward()
    assert log_probs.grad.tolist() == pytest.approx([-1.5, 2.0])  # -weight * A with weights 1.5 and 1


def test_supervised_is_the_negative_log_likelihood():
    assert objectives.supervised(torch.tensor([-0.5, -2.0])).tolist() == [0.5, 2.0]


def test_zero_advantage_gives_exactly_zero_gradient():
    for loss in (objectives.clipped_ratio, objectives.cispo):
        log_probs = torch.tensor([3.0, -3.0], requires_grad=True)
        loss(log_probs, torch.zeros(2), torch.zeros(2)).sum().backward()
        assert log_probs.grad.tolist() == [0.0, 0.0]


def test_huge_log_ratios_stay_finite_and_bad_values_surface():
    loss = objectives.clipped_ratio(torch.tensor([0.0]), torch.tensor([-1e4]), torch.tensor([-1.0]))
    assert math.isfinite(loss.item())
    assert math.isnan(objectives.clipped_ratio(torch.tensor([0.0]), torch.tensor([math.nan]), torch.ones(1)).item())


def test_diagnostics_by_hand():
    log_probs = torch.tensor([LN2, -LN2, LN2], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0])
    diagnostics = objectives.ratio_diagnostics(log_probs, torch.zeros(3), advantages)
    assert diagnostics.clipped_high.tolist() == [1.0, 0.0, 0.0]
    assert diagnostics.clipped_low.tolist() == [0.0, 1.0, 0.0]
    # k3: ratio - 1 - log ratio.
    assert diagnostics.kl.tolist() == pytest.approx([1 - LN2, -0.5 + LN2, 1 - LN2])


def test_importance_weights_by_hand():
    trainer, sampler = torch.tensor([LN2, -LN2, 3 * LN2, 0.0]), torch.zeros(4)
    weights = objectives.importance_weights
    assert weights(trainer, sampler).tolist() == pytest.approx([2.0, 0.5, 2.0, 1.0])
    assert weights(trainer, sampler, mode="mask", limit=2.5).tolist() == pytest.approx([2.0, 0.5, 0.0, 1.0])
    # Segments {0, 1} and {2, 3}: summed log-ratios 0 and 3 ln 2.
    segments = torch.tensor([0, 0, 1, 1])
    by_sequence = weights(trainer, sampler, level="sequence", limit=10.0, segments=segments)
    assert by_sequence.tolist() == pytest.approx([1.0, 1.0, 8.0, 8.0])
    with pytest.raises(ValueError, match="`limit` must be greater than 1"):
        weights(trainer, sampler, limit=1.0)
    with pytest.raises(ValueError, match="needs `segments`"):
        weights(trainer, sampler, level="sequence")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "turncate"}, r"`mode` must be one of \('truncate', 'mask'\), got 'turncate'"),
        ({"level": "sequnce"}, r"`level` must be one of \('token', 'sequence'\), got 'sequnce'"),
    ],
)
def test_a_misspelt_correction_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        objectives.importance_weights(torch.zeros(1), torch.zeros(1), **options)
