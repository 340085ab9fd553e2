"""Is the gradient that accumulates over microbatches and ranks the gradient of the whole step?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_rl.checks.verdict import Verdict

Gradient = Mapping[str, Tensor]

# Two gradients that differ by less than this count as the same one; float32 sums over a step stay well below it.
TOLERANCE = 1e-3


def check_normalization(
    module: LightningModule,
    batches: Sequence[Any],
    merge: Callable[[Sequence[Any]], Any],
    *,
    tokens: Callable[[Any], float] | None = None,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Compares a step accumulated over microbatches with one pass over the same data, on any LightningModule.

    The module's own `training_step` is called on each microbatch, its loss divided by their number as a Trainer
    with `accumulate_grad_batches=len(batches)` does, and then once on all of them merged. No optimizer is involved;
    weights, gradients and mode are left as they were.

    A `PolicyModule` cancels the Trainer's division itself and therefore has to be checked inside one: attach
    `lit_rl.callbacks.GradientNormalizationCheck`.

    Args:
        module: Any module whose `training_step` returns a loss (or a dict with "loss").
        batches: The microbatches of one step, at least 2, as the loader yields them.
        merge: Makes one batch of all of them.
        tokens: What a microbatch's loss is averaged over, such as its number of loss tokens; used to name the
            mistake. `None` weighs microbatches alike.
        tolerance: Largest relative difference that passes.

    Returns:
        A verdict with `relative_error`, `cosine`, and where `tokens` is given the range of the per-token weight
        distortion, `distortion_min` and `distortion_max` (1 is right).

    Raises:
        ValueError: Fewer than 2 microbatches were given.

    Source: section "gradient accumulation and loss normalization" of the chapter that `examples/chapter` reproduces.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> uneven = [torch.randn(2, 32), torch.randn(6, 32)]
        >>> check_normalization(BoringModel(), uneven, torch.cat, tokens=len).ok
        False
    """
    if len(batches) < 2:
        raise ValueError(f"`batches` holds {len(batches)} microbatches; a step needs at least 2 to be compared")
    count = len(batches)
    counts = [1.0] * count if tokens is None else [float(tokens(batch)) for batch in batches]
    parts = [_gradient_of(module, batch) for batch in batches]
    reference = _gradient_of(module, merge(batches))
    accumulated = combine(parts, [1.0 / count] * count)
    total = sum(counts)
    candidates = {
        "each microbatch takes the mean over its own tokens": combine(parts, [n / total for n in counts]),
        "the loss is a sum, which the Trainer then divides by the number of microbatches": combine(
            parts, [1.0] * count
        ),
    }
    distortion = [total / (count * n) for n in counts if n > 0]
    return compare(accumulated, reference, candidates, distortion=distortion, tolerance=tolerance, inverse=True)


def compare(
    accumulated: Gradient,
    reference: Gradient,
    candidates: Mapping[str, Gradient],
    *,
    distortion: Iterable[float] = (),
    tolerance: float = TOLERANCE,
    inverse: bool = False,
) -> Verdict:
    """Judges an accumulated gradient against the reference, and names the mistake that explains it.

    Args:
        accumulated: Gradient by parameter name, before clipping.
        reference: Of the whole step at once.
        candidates: Mistake to the gradient it would lead to.
        distortion: Weight of a token relative to the right one, by microbatch, under the first mistake.
        tolerance: Largest relative error that passes.
        inverse: Candidates undo the mistake, and are compared with the reference instead.

    Returns:
        The verdict.

    Example:
        >>> right = {"w": torch.tensor([3.0, 4.0])}
        >>> compare({"w": torch.tensor([1.5, 2.0])}, right, {}).message
        'the accumulated gradient is 0.5 times the gradient of the whole step (relative error 0.5, cosine 1.000000)'
    """
    error, cosine, scale = relation(accumulated, reference)
    figures = {"relative_error": error, "cosine": cosine, "scale": scale}
    factors = list(distortion)
    if factors:
        figures |= {"distortion_min": min(factors), "distortion_max": max(factors)}
    if error <= tolerance:
        return Verdict(
            True, f"the accumulated gradient is that of the whole step (relative error {error:.1e})", figures
        )
    measured = f"(relative error {error:.2g}, cosine {cosine:.6f})"
    if 1 - cosine < tolerance:
        message = f"the accumulated gradient is {scale:.4g} times the gradient of the whole step {measured}"
        return Verdict(False, message, figures)
    explained = {
        name: relation(gradient, reference if inverse else accumulated)[1] for name, gradient in candidates.items()
    }
    best = max(explained, key=lambda name: explained[name], default=None)
    if best is None or 1 - explained[best] > max(tolerance, 1e-4):
        return Verdict(False, f"the accumulated gradient is not that of the whole step {measured}", figures)
    message = f"the accumulated gradient is not that of the whole step {measured}: {best}"
    if factors:
        message += f"; a token weighs from {min(factors):.2f} to {max(factors):.2f} times what it should"
    return Verdict(False, message, figures)


def relation(one: Gradient, other: Gradient) -> tuple[float, float, float]:
    """Relative error, cosine, and the factor that fits best, of one gradient to another.

    Args:
        one: Gradient by parameter name.
        other: The reference; a parameter missing on one side counts as 0 there.

    Returns:
        (|one - other| / |other|, cosine, <one, other> / <other, other>), in float64.

    Example:
        >>> relation({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])})
        (1.0, 1.0, 2.0)
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for name in {**one, **other}:
        left, right = one.get(name), other.get(name)
        a = torch.zeros(1, dtype=torch.float64) if left is None else left.detach().double().flatten().cpu()
        b = torch.zeros(1, dtype=torch.float64) if right is None else right.detach().double().flatten().cpu()
        sums += torch.stack([(a * a).sum(), (b * b).sum(), (a * b).sum()])
    left_square, right_square, product = sums.tolist()
    if right_square == 0.0:
        return (0.0 if left_square == 0.0 else math.inf), (1.0 if left_square == 0.0 else 0.0), 1.0
    # The squared difference by itself would lose half of the digits of a small error.
    difference = sum(
        float((_or_zero(one.get(name)) - _or_zero(other.get(name))).square().sum()) for name in {**one, **other}
    )
    cosine = product / math.sqrt(left_square * right_square) if left_square else 0.0
    return math.sqrt(difference / right_square), min(cosine, 1.0), product / right_square


def combine(parts: Sequence[Gradient], factors: Sequence[float]) -> dict[str, Tensor]:
    """A weighted sum of gradients.

    Args:
        parts: Gradients by parameter name.
        factors: One for each.

    Returns:
        The sum, float64.
    """
    total: dict[str, Tensor] = {}
    for part, factor in zip(parts, factors, strict=True):
        for name, gradient in part.items():
            scaled = gradient.double() * factor
            total[name] = total[name] + scaled if name in total else scaled
    return total


def take_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies the gradients a module holds, whole where they are sharded.

    Args:
        module: After a backward pass.

    Returns:
        Gradient by parameter name.
    """
    taken = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            taken[name] = gradient.detach().clone()
    return taken


def _or_zero(gradient: Tensor | None) -> Tensor:
    return torch.zeros((), dtype=torch.float64) if gradient is None else gradient.detach().double().cpu()


def _gradient_of(module: LightningModule, batch: Any) -> dict[str, Tensor]:
    before = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    try:
        outputs: Any = module.training_step(batch, 0)
        (outputs["loss"] if isinstance(outputs, Mapping) else outputs).backward()
        return take_gradients(module)
    finally:
        for name, parameter in module.named_parameters():
            parameter.grad = before[name]
