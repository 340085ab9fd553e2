from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lit_rl.policy import head_products
from lit_rl.policy.head import LogProbHead, token_log_probs
from tests.policy.head_oracle import Case, full_scores, make_case, oracle

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def scores_and_gradients(case: Case, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, list]:
    scores = token_log_probs(case.hidden, case.weight, case.targets, bias=case.bias, entropy=entropy, **case.settings)
    total = (case.upstream * scores.log_probs).sum()
    if entropy:
        total = total + (case.entropy_upstream * scores.entropy).sum()
    return scores.log_probs.detach(), scores.entropy, list(torch.autograd.grad(total, case.leaves))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.detach().double() - expected).abs()
    return float(difference.max() / expected.abs().max().clamp_min(1e-300))


def assert_equal_to_oracle(case: Case, *, entropy: bool = False, tolerance: float | None = None) -> None:
    log_probs, entropies, gradients = scores_and_gradients(case, entropy=entropy)
    expected, expected_entropies, expected_gradients = oracle(case, entropy=entropy)
    least = min((leaf.dtype for leaf in case.leaves), key=lambda dtype: -torch.finfo(dtype).eps)
    tolerance = tolerance or TOLERANCE[least]
    exact = 1e-10 if least is torch.float64 else 1e-5
    assert relative(log_probs, expected) < exact
    if entropy:
        assert entropies is not None
        assert relative(entropies, expected_entropies) < exact * 10
    for leaf, found, wanted in zip(case.leaves, gradients, expected_gradients, strict=True):
        assert found.dtype == leaf.dtype
        assert relative(found, wanted) < tolerance


# --- one number at a time, by hand ------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "probability"), [(1.0, 2 / 3), (0.5, 4 / 5), (torch.tensor([0.5]), 4 / 5)])
def test_temperature_divides_logits(temperature: float | torch.Tensor, probability: float) -> None:
    # Logits [0, ln 2]: at temperature 1/2 they are [0, ln 4].
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(2.0)]])
    scores = token_log_probs(hidden, weight, torch.tensor([1]), temperature=temperature)
    assert scores.log_probs.item() == pytest.approx(math.log(probability), abs=1e-6)


def test_the_cap_comes_before_the_temperature_and_after_the_scale() -> None:
    # Products [0, 3], scale 2, cap 4: logits [0, 4 tanh(6 / 4)], over temperature 2.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [3.0]])
    scores = token_log_probs(hidden, weight, torch.tensor([1]), logit_scale=2.0, softcap=4.0, temperature=2.0)
    logit = 4.0 * math.tanh(6.0 / 4.0) / 2.0
    assert scores.log_probs.item() == pytest.approx(-math.log1p(math.exp(-logit)), abs=1e-6)


def test_entropy_of_a_uniform_distribution() -> None:
    scores = token_log_probs(torch.zeros(2, 3), torch.zeros(8, 3), torch.tensor([0, 7]), entropy=True)
    assert scores.entropy is not None
    torch.testing.assert_close(scores.entropy, torch.full((2,), math.log(8.0)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_never_positive_and_entropy_never_negative(dtype: torch.dtype) -> None:
    weight = torch.zeros(50, 1, dtype=dtype)
    weight[3] = 60.0
    scores = token_log_probs(torch.ones(2, 1, dtype=dtype), weight, torch.tensor([3, 4]), entropy=True)
    assert (scores.log_probs <= 0).all()
    assert (scores.entropy >= 0).all()
    assert scores.log_probs[1].item() == pytest.approx(-60.0)


# --- against the oracle -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(dtype: torch.dtype, softcap: float | None, bias: bool, entropy: bool) -> None:
    temperature = torch.rand(7, generator=torch.Generator().manual_seed(1)) + 0.5
    case = make_case(dtype=dtype, bias=bias, softcap=softcap, temperature=temperature, logit_scale=1.7, chunk_tokens=3)
    assert_equal_to_oracle(case, entropy=entropy)


@pytest.mark.parametrize("tokens", [0, 1, 5, 7])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 8, 1000, None])
def test_chunk_sizes_change_nothing(tokens: int, chunk_tokens: int | None) -> None:
    case = make_case(tokens, dtype=torch.float64, bias=True, chunk_tokens=chunk_tokens)
    log_probs, _, gradients = scores_and_gradients(case)
    expected, _, expected_gradients = oracle(case)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-12)


def test_vocabularies_of_many_tiles() -> None:
    case = make_case(40, 8, 9001, dtype=torch.float64, bias=True, softcap=20.0, chunk_tokens=16)
    assert_equal_to_oracle(case, entropy=True)


def test_zero_tokens_leave_zero_gradients() -> None:
    case = make_case(0, bias=True)
    scores = token_log_probs(case.hidden, case.weight, case.targets, bias=case.bias, entropy=True)
    assert scores.log_probs.shape == scores.entropy.shape == (0,)
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    for leaf in case.leaves:
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@pytest.mark.parametrize("entropy", [False, True])
def test_padded_vocabulary_gets_no_probability_and_no_gradient(entropy: bool) -> None:
    case = make_case(vocabulary=16, dtype=torch.float64, bias=True, vocab_size=10)
    assert_equal_to_oracle(case, entropy=entropy)
    _, _, gradients = scores_and_gradients(case, entropy=entropy)
    assert not gradients[1][10:].any()
    assert not gradients[2][10:].any()


def test_forbidden_tokens_of_minus_infinity() -> None:
    case = make_case(dtype=torch.float64, bias=True)
    with torch.no_grad():
        case.bias[5] = -torch.inf
    case.targets[case.targets == 5] = 4
    assert_equal_to_oracle(case)
    _, entropy, gradients = scores_and_gradients(case, entropy=True)
    assert entropy.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    _, expected, _ = oracle(case)
    torch.testing.assert_close(entropy.detach(), expected)


def test_large_logits_keep_their_precision() -> None:
    case = make_case(dtype=torch.float32, size=12.0, chunk_tokens=2)
    assert_equal_to_oracle(case, tolerance=1e-4)


# --- ignored tokens, and bad ones -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [None, 2])
def test_ignored_targets_are_exactly_zero_and_inert(chunk_tokens: int | None) -> None:
    case = make_case(3, vocabulary=4, chunk_tokens=chunk_tokens)
    case.targets = torch.tensor([3, -100, 1])
    with torch.no_grad():
        case.hidden[1] = torch.nan
    log_probs, entropy, (hidden, weight) = scores_and_gradients(case, entropy=True)
    assert log_probs[1] == 0
    assert entropy[1] == 0
    assert not hidden[1].any()
    clean = copy.copy(case)
    clean.hidden = torch.where(case.hidden.isnan(), 0.0, case.hidden.detach()).requires_grad_()
    _, _, expected = oracle(clean, entropy=True)
    assert relative(weight, expected[1]) < 1e-5


def test_nan_upstream_at_an_ignored_target_passes_nothing_on() -> None:
    case = make_case(3)
    case.targets[1] = -100
    case.upstream[1] = torch.nan
    _, _, gradients = scores_and_gradients(case)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_nan_at_a_scored_target_surfaces() -> None:
    case = make_case(3)
    with torch.no_grad():
        case.hidden[1] = torch.nan
    log_probs, _, _ = scores_and_gradients(case)
    assert log_probs[1].isnan()
    assert log_probs[[0, 2]].isfinite().all()


@pytest.mark.parametrize("wrong", [17, -1, -101])
def test_targets_out_of_range_name_position_and_value(wrong: int) -> None:
    case = make_case()
    case.targets[4] = wrong
    with pytest.raises(ValueError, match=rf"{wrong} at position 4.*from 0 to 16"):
        token_log_probs(case.hidden, case.weight, case.targets)


def test_targets_beyond_the_real_vocabulary_are_refused() -> None:
    case = make_case()
    case.targets[2] = 12
    with pytest.raises(ValueError, match=r"12 at position 2.*from 0 to 9"):
        token_log_probs(case.hidden, case.weight, case.targets, vocab_size=10)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperatures_that_are_not_positive_are_refused(temperature: float) -> None:
    case = make_case()
    with pytest.raises(ValueError, match="temperature"):
        token_log_probs(case.hidden, case.weight, case.targets, temperature=temperature)
    per_token = torch.ones(7)
    per_token[3] = temperature
    with pytest.raises(ValueError, match=r"`temperature` has .* at position 3"):
        token_log_probs(case.hidden, case.weight, case.targets, temperature=per_token)
    case.targets[3] = -100
    assert token_log_probs(case.hidden, case.weight, case.targets, temperature=per_token).log_probs.isfinite().all()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"chunk_tokens": 0}, ValueError, "`chunk_tokens` must be at least 1, got 0"),
        ({"chunk_tokens": -4}, ValueError, "`chunk_tokens`"),
        ({"chunk_tokens": 2.0}, TypeError, "`chunk_tokens`"),
        ({"vocab_size": 18}, ValueError, "`vocab_size` is 18, more than the 17 rows"),
        ({"softcap": 0.0}, ValueError, "`softcap`"),
        ({"logit_scale": -1.0}, ValueError, "`logit_scale`"),
        ({"logit_scale": "2"}, TypeError, "`logit_scale`"),
        ({"temperature": torch.ones(6)}, ValueError, "`temperature`"),
        ({"temperature": torch.ones(7, requires_grad=True)}, ValueError, "detach"),
        ({"bias": torch.zeros(16)}, ValueError, "`bias` must have shape"),
        ({"targets": torch.zeros(7)}, TypeError, "`targets` must be a tensor of token ids"),
        ({"targets": torch.zeros(6, dtype=torch.long)}, ValueError, "`hidden` must have shape"),
        ({"weight": torch.zeros(17, 5)}, ValueError, "`hidden` must have shape"),
        ({"weight": torch.zeros(0)}, ValueError, "`weight` must have shape"),
        ({"hidden": torch.zeros(7, 6, dtype=torch.long)}, TypeError, "`hidden` must be a floating-point"),
    ],
)
def test_wrong_arguments_are_named(change: dict, error: type[Exception], match: str) -> None:
    case = make_case()
    arguments = {"hidden": case.hidden, "weight": case.weight, "targets": case.targets, **change}
    with pytest.raises(error, match=match):
        token_log_probs(**arguments)


@pytest.mark.parametrize("chunk_tokens", [0, -1])
def test_a_bad_chunk_is_refused_at_construction(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match="chunk_tokens"):
        LogProbHead(nn.Linear(4, 9), chunk_tokens=chunk_tokens)


# --- precision --------------------------------------------------------------------------------------------------


def test_bfloat16_is_computed_in_float32() -> None:
    case = make_case(256, 64, 50_000, dtype=torch.bfloat16, size=0.4)
    log_probs = token_log_probs(case.hidden, case.weight, case.targets).log_probs
    expected, _ = full_scores(case.hidden.double(), case.weight.double(), case.targets)
    assert log_probs.dtype is torch.float32
    assert (log_probs.double() - expected).abs().max() < 1e-4


def test_weight_gradients_do_not_drift_with_the_number_of_chunks() -> None:
    gradients = []
    for chunk_tokens in (4096, 512, 32):
        case = make_case(4096, 8, 64, dtype=torch.bfloat16, chunk_tokens=chunk_tokens)
        gradients.append(scores_and_gradients(case)[2][1].float())
    step = gradients[0].abs().max() * torch.finfo(torch.bfloat16).eps
    for gradient in gradients[1:]:
        assert (gradient - gradients[0]).abs().max() <= step


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_mixed_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    case = make_case(dtype=dtype, weight_dtype=weight_dtype, bias=True, chunk_tokens=3)
    assert_equal_to_oracle(case, entropy=True)


@pytest.mark.parametrize("around", ["forward", "both", "nested_disabled"])
def test_autocast(around: str) -> None:
    case = make_case(9, 16, 40, chunk_tokens=4)
    plain = make_case(9, 16, 40)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.nn.functional.linear(plain.hidden, plain.weight).log_softmax(-1)
        if around == "nested_disabled":
            with torch.autocast("cpu", enabled=False):
                expected = torch.nn.functional.linear(plain.hidden, plain.weight).log_softmax(-1)
                scores = token_log_probs(case.hidden, case.weight, case.targets, **case.settings)
        else:
            scores = token_log_probs(case.hidden, case.weight, case.targets, **case.settings)
        if around == "both":
            (scores.log_probs * case.upstream).sum().backward()
    if around != "both":
        (scores.log_probs * case.upstream).sum().backward()
    picked = expected.gather(1, plain.targets[:, None]).squeeze(1).float()
    (picked * case.upstream).sum().backward()
    tolerance = 1e-6 if around == "nested_disabled" else 3e-2
    assert scores.log_probs.dtype is torch.float32
    assert (scores.log_probs - picked).abs().max() < tolerance * picked.abs().max()
    assert relative(case.hidden.grad, plain.hidden.grad.double()) < tolerance
    assert relative(case.weight.grad, plain.weight.grad.double()) < tolerance
    if around != "nested_disabled":
        # The factors are rounded as autocast rounds them; what follows is exact on the rounded factors.
        rounded, _ = full_scores(case.hidden.bfloat16().double(), case.weight.bfloat16().double(), case.targets)
        assert (scores.log_probs - rounded).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_products_with_float32_results(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of devices that multiply 16-bit factors themselves, with such a product emulated."""
    seen = []

    def multiply(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        seen.append((left.dtype, right.dtype, out_dtype))
        return left.to(out_dtype or left.dtype) @ right.to(out_dtype or right.dtype)

    monkeypatch.setattr(head_products, "_MIXED_PRODUCT_DEVICES", ("cpu",))
    monkeypatch.setattr(torch, "mm", multiply)
    case = make_case(dtype=dtype, bias=True, chunk_tokens=3)
    assert_equal_to_oracle(case, entropy=True)
    assert set(seen) == {(dtype, dtype, torch.float32)}


def test_fast_and_plain_products_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(64, 64, 3000, chunk_tokens=40)
    fast = scores_and_gradients(case, entropy=True)
    monkeypatch.setattr(head_products, "_uses_onednn", lambda operand: False)
    plain = scores_and_gradients(case, entropy=True)
    torch.testing.assert_close(fast[0], plain[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fast[2], plain[2], rtol=1e-4, atol=1e-4)


def test_fast_products_are_given_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gaps between rows, oneDNN takes a reference path that is hundreds of times slower."""
    factors: list[torch.Tensor] = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        factors.extend([left, right])
        return torch.mm(left, right)

    monkeypatch.setattr(head_products, "_uses_onednn", lambda operand: True)
    monkeypatch.setattr(head_products, "_onednn_product", product)
    hidden = torch.randn(512, 64)[::4].requires_grad_()
    weight = torch.randn(64, 2000).t()[:1500].requires_grad_()
    token_log_probs(hidden, weight, torch.zeros(128, dtype=torch.long)).log_probs.sum().backward()
    assert len(factors) == 2 * 4
    assert all(factor.is_contiguous() or factor.t().is_contiguous() for factor in factors)


# --- shapes, strides, and what autograd may ask -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded", "every_other"])
def test_strided_inputs(layout: str) -> None:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(2, 6, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 23, generator=generator, dtype=torch.float64).t()
    view = {
        "sliced": lambda tensor: tensor[:, :-1],
        "transposed": lambda tensor: tensor.transpose(0, 1),
        "expanded": lambda tensor: tensor[:, :1].expand(2, 5, 16),
        "every_other": lambda tensor: tensor[:, ::2],
    }[layout]
    targets = torch.randint(0, 23, view(base).shape[:-1], generator=generator)
    upstream = torch.randn(targets.shape, generator=generator, dtype=torch.float64)
    before = base.detach().clone()
    scores = token_log_probs(view(base), weight, targets, chunk_tokens=3, entropy=True)
    (found,) = torch.autograd.grad(((scores.log_probs + scores.entropy) * upstream).sum(), base)
    log_probs, entropy = full_scores(view(base), weight, targets)
    (expected,) = torch.autograd.grad(((log_probs + entropy) * upstream).sum(), base)
    assert scores.log_probs.shape == scores.entropy.shape == targets.shape
    torch.testing.assert_close(scores.log_probs, log_probs)
    torch.testing.assert_close(found, expected)
    assert torch.equal(base, before)


def test_inputs_are_never_changed_and_calls_repeat_exactly() -> None:
    case = make_case(bias=True, softcap=5.0, temperature=torch.full((7,), 0.7), chunk_tokens=3)
    case.targets[2] = -100
    before = copy.deepcopy([tensor.detach() for tensor in case.leaves])
    first, second = (scores_and_gradients(case, entropy=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
    assert all(torch.equal(leaf, kept) for leaf, kept in zip(case.leaves, before, strict=True))
    assert torch.equal(case.settings["temperature"], torch.full((7,), 0.7))
    assert case.targets[2] == -100


@pytest.mark.parametrize("frozen", ["weight", "hidden", "bias", "weight and bias", "all"])
def test_only_gradients_that_are_asked_for(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(dtype=torch.float64, bias=True)
    _, _, expected = oracle(case)
    products = _count_products(monkeypatch)
    for name in ("hidden", "weight", "bias"):
        getattr(case, name).requires_grad_(name not in frozen and frozen != "all")
    scores = token_log_probs(case.hidden, case.weight, case.targets, bias=case.bias)
    assert scores.log_probs.requires_grad is (frozen != "all")
    if frozen == "all":
        return
    (scores.log_probs * case.upstream).sum().backward()
    for leaf, wanted in zip(case.leaves, expected, strict=True):
        assert (leaf.grad is not None) is leaf.requires_grad
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, wanted)
    assert len(products) == 2 + case.hidden.requires_grad + case.weight.requires_grad


def _count_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Records the multiplications of each matrix product that the head makes."""
    made: list[tuple[int, ...]] = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        made.append((*left.shape, right.shape[1]))
        return torch.mm(left, right)

    monkeypatch.setattr(head_products, "multiply", multiply)
    monkeypatch.setattr("lit_rl.policy.head_passes.multiply", multiply)
    return made


def test_exact_zeros_cost_nothing_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(10, dtype=torch.float64, bias=True, chunk_tokens=4)
    case.upstream[[0, 3, 4, 5, 6, 9]] = 0.0
    products = _count_products(monkeypatch)
    _, _, gradients = scores_and_gradients(case)
    _, _, expected = oracle(case)
    torch.testing.assert_close(gradients, expected)
    work = sum(math.prod(shape) for shape in products)
    one_product = 6 * 17
    assert work == (10 + 3 * 4) * one_product


def test_no_live_token_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    case.upstream.zero_()
    products = _count_products(monkeypatch)
    _, _, gradients = scores_and_gradients(case)
    assert len(products) == 1
    assert not any(gradient.any() for gradient in gradients)


def test_entropy_alone_keeps_tokens_live() -> None:
    case = make_case(dtype=torch.float64)
    case.upstream.zero_()
    case.entropy_upstream[:4] = 0.0
    assert_equal_to_oracle(case, entropy=True)


def test_results_may_be_used_twice() -> None:
    case = make_case(dtype=torch.float64)
    scores = token_log_probs(case.hidden, case.weight, case.targets, entropy=True)
    total = (scores.log_probs * case.upstream).sum() + (scores.log_probs.exp() * scores.entropy).sum()
    found = torch.autograd.grad(total, case.leaves, retain_graph=True)
    again = torch.autograd.grad(total, case.leaves)
    log_probs, entropy = full_scores(case.hidden, case.weight, case.targets)
    expected = torch.autograd.grad((log_probs * case.upstream).sum() + (log_probs.exp() * entropy).sum(), case.leaves)
    torch.testing.assert_close(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_around_it(use_reentrant: bool) -> None:
    case = make_case(dtype=torch.float64, chunk_tokens=3)

    def run(hidden: torch.Tensor) -> torch.Tensor:
        return token_log_probs(hidden.tanh(), case.weight, case.targets, **case.settings).log_probs

    total = (checkpoint(run, case.hidden, use_reentrant=use_reentrant) * case.upstream).sum()
    total.backward()
    expected = torch.autograd.grad((run(case.hidden) * case.upstream).sum(), case.leaves)
    torch.testing.assert_close([case.hidden.grad, case.weight.grad], list(expected))


def test_a_second_derivative_is_refused() -> None:
    case = make_case()
    log_probs = token_log_probs(case.hidden, case.weight, case.targets).log_probs
    (gradient,) = torch.autograd.grad(log_probs.sum(), case.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.square().sum().backward()


def test_gradient_modes() -> None:
    case = make_case()
    with torch.no_grad():
        assert not token_log_probs(case.hidden, case.weight, case.targets).log_probs.requires_grad
    with torch.inference_mode():
        token_log_probs(case.hidden, case.weight, case.targets, entropy=True)


def test_compiled_whole_whatever_the_number_of_tokens() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list) -> object:
        graphs.append(graph)
        return graph.forward

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = token_log_probs(hidden * 2.0, weight, targets, softcap=9.0, entropy=True)
        return scores.log_probs - 0.1 * scores.entropy

    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for tokens in (3, 7, 20, 64, 65):
        case = make_case(tokens)
        found = torch.autograd.grad(
            (compiled(case.hidden, case.weight, case.targets) * case.upstream).sum(), case.leaves
        )
        plain = torch.autograd.grad((run(case.hidden, case.weight, case.targets) * case.upstream).sum(), case.leaves)
        torch.testing.assert_close(found, plain)
    assert len(graphs) <= 2


def test_compiled_through_autograd() -> None:
    """Ahead-of-time autograd sees forward and backward as operators with the shapes that they really have."""
    head = LogProbHead(nn.Linear(6, 17), softcap=9.0).double()
    layer = nn.Linear(6, 6).double()

    def run(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return head(layer(inputs), targets, entropy=True).log_probs

    case = make_case(dtype=torch.float64)
    parameters = [*layer.parameters(), *head.parameters()]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    found = torch.autograd.grad((compiled(case.hidden, case.targets) * case.upstream).sum(), parameters)
    expected = torch.autograd.grad((run(case.hidden, case.targets) * case.upstream).sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_the_operators_keep_the_rules_of_torch() -> None:
    case = make_case(3, bias=True)
    arguments = ([case.hidden], [case.weight], case.bias, case.targets, None, 1.0, 1.0, None, 17, None, 2, True)
    operator = torch.ops.lit_rl.token_log_probs.default
    torch.library.opcheck(
        operator, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
