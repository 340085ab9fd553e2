from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_rl.policy.head import LogProbHead, token_log_probs
from tests.policy.head_oracle import Case, make_case, oracle

GRADIENT_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any shape, precision and setting; sometimes ignored targets, dead tokens and odd strides."""
    tokens, vocabulary = draw(st.integers(0, 12)), draw(st.integers(1, 90))
    width, seed = draw(st.integers(1, 9)), draw(st.integers(0, 10_000))
    generator = torch.Generator().manual_seed(seed)
    dtypes = st.sampled_from(sorted(GRADIENT_TOLERANCE, key=str))
    case = make_case(
        tokens,
        width,
        vocabulary,
        seed=seed,
        dtype=draw(dtypes),
        weight_dtype=draw(dtypes),
        bias=draw(st.booleans()),
        temperature=draw(st.sampled_from([1.0, 0.3, 2.5, torch.rand(tokens, generator=generator) + 0.2])),
        logit_scale=draw(st.sampled_from([1.0, 0.0625, 3.0])),
        softcap=draw(st.sampled_from([None, 0.5, 4.0, 50.0])),
        vocab_size=draw(st.none() | st.integers(1, vocabulary)),
        chunk_tokens=draw(st.none() | st.integers(1, 14)),
    )
    case.targets[torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = -100
    case.upstream[torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.6, 1.0]))] = 0.0
    case.entropy_upstream[torch.rand(tokens, generator=generator) < draw(st.sampled_from([0.0, 0.6]))] = 0.0
    if draw(st.booleans()):
        case.weight = case.weight.detach().t().contiguous().t().requires_grad_()
    if draw(st.booleans()):
        case.hidden = case.hidden.detach().repeat(1, 2)[:, : 2 * width : 2].requires_grad_()
    return case


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected, rtol=0.0, atol=tolerance * max(scale, 1e-3))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=cases(), entropy=st.booleans())
def test_any_configuration_equals_the_full_computation(case: Case, entropy: bool) -> None:
    scores = token_log_probs(case.hidden, case.weight, case.targets, bias=case.bias, entropy=entropy, **case.settings)
    total = (case.upstream * scores.log_probs).sum()
    if scores.entropy is not None:
        total = total + (case.entropy_upstream * scores.entropy).sum()
    gradients = torch.autograd.grad(total, case.leaves)
    log_probs, entropies, expected = oracle(case, entropy=entropy)
    exact = torch.float64 in (case.hidden.dtype, case.weight.dtype)
    assert_close(scores.log_probs, log_probs, 1e-10 if exact else 1e-5)
    if scores.entropy is not None:
        assert_close(scores.entropy, entropies, 1e-10 if exact else 2e-5)
    for leaf, found, wanted in zip(case.leaves, gradients, expected, strict=True):
        assert found.dtype == leaf.dtype
        tolerance = GRADIENT_TOLERANCE[leaf.dtype]
        assert_close(found, wanted, tolerance if exact else max(tolerance, 2e-5))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=cases(), scale=st.sampled_from([1.0, -0.25, 0.0]))
def test_one_pass_equals_two_in_any_configuration(case: Case, scale: float) -> None:
    layer = torch.nn.Linear(case.weight.shape[1], case.weight.shape[0], bias=case.bias is not None)
    layer.weight = torch.nn.Parameter(case.weight.detach())
    if case.bias is not None:
        layer.bias = torch.nn.Parameter(case.bias.detach())
    settings = {name: value for name, value in case.settings.items() if name != "temperature"}
    head = LogProbHead(layer, **settings)
    loss, log_probs = head.loss(
        case.hidden,
        case.targets,
        lambda chunk, part: case.upstream[part] * chunk,
        temperature=case.settings["temperature"],
    )
    (loss * scale).backward()
    expected, _, gradients = oracle(case)
    exact = torch.float64 in (case.hidden.dtype, case.weight.dtype)
    assert_close(log_probs, expected, 1e-10 if exact else 1e-5)
    found = [case.hidden.grad, *(parameter.grad for parameter in layer.parameters())]
    for leaf, gradient, wanted in zip(case.leaves, found, gradients, strict=True):
        assert gradient.dtype == leaf.dtype
        tolerance = GRADIENT_TOLERANCE[leaf.dtype]
        assert_close(gradient, scale * wanted, tolerance if exact else max(tolerance, 2e-5))
