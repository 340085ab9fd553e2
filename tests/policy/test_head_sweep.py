from __future__ import annotations

import random

import pytest
import torch

from lit_rl.policy.head import LogProbHead, token_log_probs
from tests.policy.head_oracle import Case, make_case, oracle

GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SEEDS = range(300)


def draw_case(seed: int) -> Case:
    """Any shape, precision and setting; sometimes ignored targets, dead tokens and odd strides."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, width, vocabulary = draw.randint(0, 14), draw.randint(1, 9), draw.choice([1, 2, 17, 63, 64, 65, 200])
    dtypes = list(GRADIENT_TOLERANCE)
    case = make_case(
        tokens,
        width,
        vocabulary,
        seed=seed,
        dtype=draw.choice(dtypes),
        weight_dtype=draw.choice(dtypes),
        bias=draw.random() < 0.5,
        temperature=draw.choice([1.0, 0.3, 2.5, torch.rand(tokens, generator=generator) + 0.2]),
        logit_scale=draw.choice([1.0, 0.0625, 3.0]),
        softcap=draw.choice([None, 0.5, 4.0, 50.0]),
        vocab_size=draw.choice([None, draw.randint(1, vocabulary)]),
        chunk_tokens=draw.choice([None, 1, 2, 3, 5, 8, 100]),
    )
    case.targets[torch.rand(tokens, generator=generator) < draw.choice([0.0, 0.3])] = -100
    case.upstream[torch.rand(tokens, generator=generator) < draw.choice([0.0, 0.6, 1.0])] = 0.0
    case.entropy_upstream[torch.rand(tokens, generator=generator) < draw.choice([0.0, 0.6])] = 0.0
    if draw.random() < 0.3:
        case.weight = case.weight.detach().t().contiguous().t().requires_grad_()
    if draw.random() < 0.3:
        case.hidden = case.hidden.detach().repeat(1, 2)[:, : 2 * width : 2].requires_grad_()
    return case


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=tolerance * max(scale, 1e-2))


def assert_gradients(case: Case, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    exact = torch.float64 in (case.hidden.dtype, case.weight.dtype)
    for leaf, gradient, wanted in zip(case.leaves, found, expected, strict=True):
        assert gradient.dtype == leaf.dtype
        tolerance = GRADIENT_TOLERANCE[leaf.dtype]
        assert_close(gradient, wanted, tolerance if exact else max(tolerance, 2e-5))


@pytest.mark.parametrize("seed", SEEDS)
def test_any_configuration_equals_the_full_computation(seed: int) -> None:
    case, entropy = draw_case(seed), seed % 2 == 0
    scores = token_log_probs(case.hidden, case.weight, case.targets, bias=case.bias, entropy=entropy, **case.settings)
    total = (case.upstream * scores.log_probs).sum()
    if scores.entropy is not None:
        total = total + (case.entropy_upstream * scores.entropy).sum()
    log_probs, entropies, expected = oracle(case, entropy=entropy)
    exact = torch.float64 in (case.hidden.dtype, case.weight.dtype)
    assert_close(scores.log_probs.detach(), log_probs, 1e-10 if exact else 1e-5)
    if scores.entropy is not None:
        assert_close(scores.entropy.detach(), entropies, 1e-10 if exact else 2e-5)
    assert_gradients(case, list(torch.autograd.grad(total, case.leaves)), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_pass_in_any_configuration(seed: int) -> None:
    case, scale = draw_case(seed), (1.0, -0.25, 0.0)[seed % 3]
    layer = torch.nn.Linear(1, 1, bias=case.bias is not None)
    layer.weight = torch.nn.Parameter(case.weight.detach())
    if case.bias is not None:
        layer.bias = torch.nn.Parameter(case.bias.detach())
    temperature = case.settings.pop("temperature")
    head = LogProbHead(layer, **case.settings)
    loss, log_probs = head.loss(
        case.hidden, case.targets, lambda chunk, part: case.upstream[part] * chunk, temperature=temperature
    )
    found = torch.autograd.grad(loss * scale, [case.hidden, *layer.parameters()])
    case.settings["temperature"] = temperature
    expected, _, gradients = oracle(case)
    exact = torch.float64 in (case.hidden.dtype, case.weight.dtype)
    assert_close(log_probs, expected, 1e-10 if exact else 1e-5)
    assert_gradients(case, list(found), [scale * gradient for gradient in gradients])
