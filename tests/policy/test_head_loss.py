from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lit_rl.policy import head_products
from lit_rl.policy.head import LogProbHead


def make_head(vocabulary: int = 41, width: int = 6, *, dtype: torch.dtype = torch.float64, **settings) -> LogProbHead:
    torch.manual_seed(0)
    return LogProbHead(nn.Linear(width, vocabulary), **settings).to(dtype)


def make_tokens(count: int = 11, width: int = 6, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(count, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, torch.randint(0, 41, (count,), generator=generator)


class Clipped:
    """The clipped surrogate, every token with its own advantage, ratio and weight; some are clipped, some are dead."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(2)
        self.advantages = torch.randn(count, generator=generator).to(dtype)
        self.advantages[::4] = 0.0
        self.old = (torch.randn(count, generator=generator) * 0.5 - 3.7).to(dtype)
        self.weights = torch.rand(count, generator=generator).to(dtype)

    def __call__(self, log_probs: Tensor, part: slice) -> Tensor:
        ratio = (log_probs - self.old[part]).exp()
        advantages = self.advantages[part]
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -self.weights[part] * surrogate


def gradients_of(head: LogProbHead, hidden: Tensor, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *head.parameters()]))


@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, "per token"])
def test_equal_to_two_passes(chunk_tokens: int | None, softcap: float | None, temperature: float | str) -> None:
    head = make_head(softcap=softcap, logit_scale=1.5, vocab_size=41, chunk_tokens=chunk_tokens)
    hidden, targets = make_tokens()
    targets[3] = -100
    row = torch.rand(11, generator=torch.Generator().manual_seed(4)) + 0.5 if temperature == "per token" else 0.7
    objective = Clipped(11)
    loss, log_probs = head.loss(hidden, targets, objective, temperature=row)
    two_pass = head(hidden, targets, temperature=row).log_probs
    expected = objective(two_pass, slice(0, 11)).sum()
    assert not log_probs.requires_grad
    torch.testing.assert_close(log_probs, two_pass.detach())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        gradients_of(head, hidden, loss * 0.3), gradients_of(head, hidden, expected * 0.3), rtol=1e-9, atol=1e-12
    )


def test_float32_agrees_to_rounding() -> None:
    head, objective = make_head(dtype=torch.float32, chunk_tokens=4), Clipped(11, torch.float32)
    hidden, targets = make_tokens(dtype=torch.float32)
    loss, _ = head.loss(hidden, targets, objective)
    expected = objective(head(hidden, targets).log_probs, slice(0, 11)).sum()
    torch.testing.assert_close(gradients_of(head, hidden, loss), gradients_of(head, hidden, expected))


def test_weight_gradients_are_accumulated_in_float32() -> None:
    gradients = []
    for chunk_tokens in (2048, 256, 16):
        head = make_head(64, 8, dtype=torch.bfloat16, chunk_tokens=chunk_tokens)
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(2048, 8, generator=generator).bfloat16().requires_grad_()
        targets = torch.randint(0, 64, (2048,), generator=generator)
        upstream = torch.randn(2048, generator=generator)
        loss, _ = head.loss(hidden, targets, lambda log_probs, part, upstream=upstream: upstream[part] * log_probs)
        loss.backward()
        gradients.append(head.output_layer.weight.grad.float())
    step = gradients[0].abs().max() * torch.finfo(torch.bfloat16).eps
    assert all((gradient - gradients[0]).abs().max() <= step for gradient in gradients)


def test_three_products_and_none_for_dead_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    work = []

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        work.append(left.numel() * right.shape[1])
        return torch.mm(left, right)

    monkeypatch.setattr(head_products, "multiply", multiply)
    monkeypatch.setattr("lit_rl.policy.head_passes.multiply", multiply)
    head, (hidden, targets) = make_head(chunk_tokens=4), make_tokens()
    upstream = torch.ones(11, dtype=torch.float64)
    head.loss(hidden, targets, lambda log_probs, part: upstream[part] * log_probs)[0].backward()
    assert sum(work) == 3 * 11 * 6 * 41
    work.clear()
    upstream[[0, 1, 2, 3, 7, 8]] = 0.0
    head.loss(hidden, targets, lambda log_probs, part: upstream[part] * log_probs)[0].backward()
    assert sum(work) == (11 + 2 * 5) * 6 * 41


def test_no_gradient_no_second_product() -> None:
    head, (hidden, targets) = make_head(), make_tokens()
    with torch.no_grad():
        loss, log_probs = head.loss(hidden, targets, lambda log_probs, part: -log_probs)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, -log_probs.sum())


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    head, (hidden, targets) = make_head(), make_tokens()
    (hidden if frozen == "hidden" else head.output_layer.weight).requires_grad_(False)
    loss, _ = head.loss(hidden, targets, Clipped(11))
    loss.backward()
    assert (hidden.grad is None) is (frozen == "hidden")
    assert (head.output_layer.weight.grad is None) is (frozen == "weight")
    assert head.output_layer.bias.grad is not None


def test_zero_tokens() -> None:
    head, (hidden, targets) = make_head(), make_tokens(0)
    loss, log_probs = head.loss(hidden, targets, lambda log_probs, part: -log_probs)
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.shape == (0,)
    assert not any(tensor.grad.any() for tensor in (hidden, *head.parameters()))


def test_a_constant_objective_has_zero_gradients() -> None:
    head, (hidden, targets) = make_head(), make_tokens()
    loss, _ = head.loss(hidden, targets, lambda log_probs, part: torch.ones_like(log_probs))
    loss.backward()
    assert loss.item() == 11.0
    assert not hidden.grad.any()


@pytest.mark.parametrize("returned", ["mean", "none", "longer"])
def test_an_objective_must_give_one_loss_per_token(returned: str) -> None:
    head, (hidden, targets) = make_head(), make_tokens()
    wrong = {
        "mean": lambda log_probs, part: log_probs.mean(),
        "none": lambda log_probs, part: None,
        "longer": lambda log_probs, part: torch.cat([log_probs, log_probs]),
    }[returned]
    with pytest.raises(ValueError, match=r"`objective` returned .*expected one weighted loss per token, shape \(11,\)"):
        head.loss(hidden, targets, wrong)


def test_flat_targets_only() -> None:
    head, (hidden, targets) = make_head(), make_tokens(12)
    with pytest.raises(ValueError, match=r"`targets` must have shape \[M\], got \(3, 4\)"):
        head.loss(hidden.reshape(3, 4, 6), targets.reshape(3, 4), Clipped(12))


def test_wrong_targets_are_refused_before_the_objective_is_called() -> None:
    head, (hidden, targets) = make_head(chunk_tokens=2), make_tokens()
    targets[9] = 41
    calls = []
    with pytest.raises(ValueError, match="41 at position 9"):
        head.loss(hidden, targets, lambda log_probs, part: calls.append(part) or -log_probs)
    assert not calls


def test_the_parts_cover_all_tokens_in_order() -> None:
    head, (hidden, targets) = make_head(chunk_tokens=4), make_tokens()
    parts = []
    head.loss(hidden, targets, lambda log_probs, part: parts.append(part) or -log_probs)
    assert [(part.start, part.stop) for part in parts] == [(0, 4), (4, 8), (8, 11)]


def test_backward_runs_once() -> None:
    head, (hidden, targets) = make_head(), make_tokens()
    loss, _ = head.loss(hidden, targets, Clipped(11))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


def test_a_second_derivative_is_refused() -> None:
    head, (hidden, targets) = make_head(), make_tokens()
    loss, _ = head.loss(hidden, targets, Clipped(11))
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_inside_a_compiled_function() -> None:
    head, (hidden, targets), objective = make_head(), make_tokens(), Clipped(11)

    def run(hidden: Tensor) -> Tensor:
        return head.loss(hidden * 2.0, targets, objective)[0] * 3.0

    found = gradients_of(head, hidden, torch.compile(run, backend="eager")(hidden))
    torch.testing.assert_close(found, gradients_of(head, hidden, run(hidden)))


def test_under_autocast() -> None:
    head, (hidden, targets) = make_head(dtype=torch.float32), make_tokens(dtype=torch.float32)
    objective = Clipped(11, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, log_probs = head.loss(hidden, targets, objective)
        expected = objective(head(hidden, targets).log_probs, slice(0, 11)).sum()
    assert log_probs.dtype is torch.float32
    torch.testing.assert_close(gradients_of(head, hidden, loss), gradients_of(head, hidden, expected))
