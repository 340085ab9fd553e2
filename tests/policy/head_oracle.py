"""The slow computation that the log-probability head is compared with: full logits, float64, plain autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass
class Case:
    """Inputs of one call and the upstream gradients of its results."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    settings: dict
    upstream: Tensor
    entropy_upstream: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.weight, self.bias) if tensor is not None]


def make_case(
    tokens: int = 7,
    width: int = 6,
    vocabulary: int = 17,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    bias: bool = False,
    size: float = 1.0,
    **settings: object,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(size).to(kind).requires_grad_()

    weight_dtype = weight_dtype or dtype
    real = settings.get("vocab_size") or vocabulary
    return Case(
        hidden=random(tokens, width),
        weight=random(vocabulary, width, kind=weight_dtype),
        targets=torch.randint(0, int(real), (tokens,), generator=generator),  # type: ignore[call-overload]
        bias=random(vocabulary, kind=weight_dtype) if bias else None,
        settings=settings,
        upstream=torch.randn(tokens, generator=generator),
        entropy_upstream=torch.randn(tokens, generator=generator),
    )


def full_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from full logits, in the inputs' own precision."""
    logits = hidden @ weight.t()
    logits = (logits if bias is None else logits + bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits[..., :vocab_size] / (temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature)
    all_log_probs = logits.log_softmax(-1)
    log_probs = all_log_probs.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    entropy = -(all_log_probs.exp() * all_log_probs.clamp_min(-1e4)).sum(-1)
    kept = targets != -100
    return torch.where(kept, log_probs, 0.0), torch.where(kept, entropy, 0.0)


def oracle(case: Case, *, entropy: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probabilities, entropies, and the gradients of hidden states, weight and bias, all float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in case.leaves]
    bias = leaves[2] if case.bias is not None else None
    settings = {name: value.double() if isinstance(value, Tensor) else value for name, value in case.settings.items()}
    settings.pop("chunk_tokens", None)
    log_probs, entropies = full_scores(leaves[0], leaves[1], case.targets, bias=bias, **settings)
    total = (case.upstream.double() * log_probs).sum()
    if entropy:
        total = total + (case.entropy_upstream.double() * entropies).sum()
    return log_probs.detach(), entropies.detach(), list(torch.autograd.grad(total, leaves))


def peak_bytes(run: Callable[[], object], kept: Callable[[], Sequence[Tensor | None]]) -> int:
    """Largest number of bytes that torch held at a time during `run`, beyond what `kept` still holds afterwards."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest - sum(tensor.numel() * tensor.element_size() for tensor in kept() if tensor is not None)
