"""Is the gradient that accumulates over microbatches and ranks the gradient of the whole step?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_rl.checks.gradients import Gradient, combine, distance, norm, relation, take_gradients
from lit_rl.checks.verdict import Verdict
from lit_rl.policy.precision import least_precise
from lit_rl.policy.probe import device_of

# Two gradients that differ by less than this count as the same one; sums over a step stay well below it.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
# Rounding of one summand, in units of the last place: what is left where the summands cancel.
_STEPS = {torch.float64: 32, torch.float32: 32, torch.float16: 2, torch.bfloat16: 2}


@dataclass(frozen=True)
class Mistake:
    """A way to get the normalization wrong, and the two gradients that are multiples of each other where it was made.

    Args:
        text: What was done.
        found: Gradient by parameter name.
        expected: What `found` would be a multiple of.
        distortion: Weight of a token relative to the right one, by microbatch.
    """

    text: str
    found: Gradient
    expected: Gradient
    distortion: Sequence[float] = ()


@dataclass(frozen=True)
class Allowed:
    """How far two equal gradients may be apart.

    Args:
        relative: Share of the reference's norm.
        rounding: Norm that is allowed on top: the summands of a gradient may be larger than their sum.
        half: Whether something is computed in 16 bits.

    Example:
        >>> allowed_error(torch.nn.Linear(2, 2), None, [3.0, 4.0]).relative
        0.001
    """

    relative: float
    rounding: float = 0.0
    half: bool = False


_FLOAT32 = Allowed(_TOLERANCE[torch.float32])


def allowed_error(module: torch.nn.Module, tolerance: float | None, sizes: Sequence[float]) -> Allowed:
    """Decides on what is rounding, by the least precise number in the computation.

    Args:
        module: Its parameters' dtypes count; call it within autocast where the computation is.
        tolerance: The relative error that the caller allows, or `None`.
        sizes: Norms of the gradients that were added up.

    Returns:
        The allowed error.
    """
    dtype = least_precise(module, device_of(module))
    unit = _STEPS[dtype] * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    # Rounding of one summand is independent of the next one's.
    together = math.sqrt(sum(size * size for size in sizes if math.isfinite(size)))
    relative = _TOLERANCE[dtype] if tolerance is None else tolerance
    return Allowed(relative, unit * together, dtype in (torch.float16, torch.bfloat16))


def check_normalization(
    module: LightningModule,
    batches: Sequence[Any],
    merge: Callable[[Sequence[Any]], Any],
    *,
    tokens: Callable[[Any], float] | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Compares a step accumulated over microbatches with one pass over the same data, on any LightningModule.

    The module's own `training_step` is called on each microbatch, its loss divided by their number as a Trainer
    with `accumulate_grad_batches=len(batches)` does, and then once on all of them merged. No optimizer is involved;
    weights, gradients, buffers, mode and random state are left as they were.

    A `PolicyModule` cancels the Trainer's division itself and therefore has to be checked inside one: attach
    `lit_rl.callbacks.GradientNormalizationCheck`.

    Args:
        module: Any module whose `training_step` returns a loss (or a dict with "loss"). It has to repeat itself: one
            with dropout is checked after `module.eval()`.
        batches: The microbatches of one step, at least 2, as the loader yields them.
        merge: Makes one batch of all of them.
        tokens: What a microbatch's loss is averaged over, such as its number of loss tokens; used to name the
            mistake. `None` weighs microbatches alike.
        tolerance: Largest relative difference that passes; `None` chooses 1e-3, in 16 bits 2e-2. What rounding of
            the microbatches' gradients explains passes too, so that they may cancel.

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
    with _undisturbed(module):
        parts = [_gradient_of(module, batch) for batch in batches]
        again = _gradient_of(module, batches[0])
        reference = _gradient_of(module, merge(batches))
    sizes = [norm(part) / count for part in parts]
    allowed = allowed_error(module, tolerance, sizes)
    repeated = compare(again, parts[0], allowed=allowed)
    if not repeated.ok and repeated.figures["finite"]:
        return random_verdict(repeated.figures["relative_error"], "the first microbatch")
    accumulated = combine(parts, [1.0 / count] * count)
    mistakes = [
        Mistake(
            "the loss is a sum, which the Trainer then divides by the number of microbatches",
            combine(parts, [1.0] * count),
            reference,
        )
    ]
    total = sum(counts)
    if total > 0:
        # A mistake's gradients are undone, and then have to be those of the whole step.
        undone = combine(parts, [n / total for n in counts])
        distortion = [total / (count * n) for n in counts if n > 0]
        mistakes.insert(0, Mistake(MICROBATCH_MEAN, undone, reference, distortion))
    return compare(accumulated, reference, mistakes, allowed=allowed)


MICROBATCH_MEAN = "each microbatch takes the mean over its own tokens"


def random_verdict(error: float, what: str) -> Verdict:
    """What is said of a module that gives two gradients for one input.

    Args:
        error: Relative difference of the two.
        what: What was computed twice.

    Returns:
        A verdict that fails.

    Example:
        >>> random_verdict(0.3, "a step").ok
        False
    """
    return Verdict(
        False,
        f"the module is random in training mode: two passes over {what} differ by {error:.2g}, so gradients cannot be "
        "compared; switch dropout and other noise off, or compare after `module.eval()`",
        {"repeated_error": error},
    )


def compare(
    accumulated: Gradient,
    reference: Gradient,
    mistakes: Sequence[Mistake] = (),
    *,
    allowed: Allowed = _FLOAT32,
) -> Verdict:
    """Judges an accumulated gradient against the reference, and names the mistake that explains it.

    A mistake is named where it explains everything but an allowed error; among several, the one that leaves least.

    Args:
        accumulated: Gradient by parameter name, before clipping.
        reference: Of the whole step at once.
        mistakes: Those to be told apart.
        allowed: The error that passes.

    Returns:
        The verdict; its figure `finite` is 0 where a gradient is not.

    Example:
        >>> right = {"w": torch.tensor([3.0, 4.0])}
        >>> print(compare({"w": torch.tensor([1.5, 2.0])}, right).message)
        the accumulated gradient is 0.5 times the gradient of the whole step (relative error 0.5, allowed: 0.001, \
cosine 1.000000)
    """
    error, cosine, scale = relation(accumulated, reference)
    figures = {"relative_error": error, "cosine": cosine, "scale": scale, "finite": 1.0}
    factors = next((mistake.distortion for mistake in mistakes if mistake.distortion), ())
    if factors:
        figures |= {"distortion_min": min(factors), "distortion_max": max(factors)}
    sides = {"accumulated gradient": norm(accumulated), "gradient of the whole step, computed anew": norm(reference)}
    broken = [name for name, size in sides.items() if not math.isfinite(size)]
    if broken:
        return Verdict(False, f"not finite: the {' and the '.join(broken)}", figures | {"finite": 0.0})
    if _equal(accumulated, reference, allowed):
        message = f"the accumulated gradient is that of the whole step (relative error {error:.1e})"
        if error > allowed.relative:
            message += ", up to the rounding of summands that cancel"
        return Verdict(True, message, figures)
    measured = f"(relative error {error:.2g}, allowed: {allowed.relative:.2g}, cosine {cosine:.6f})"
    message = _explained(accumulated, reference, mistakes, allowed, scale, measured)
    return Verdict(False, message + _hint(allowed), figures)


def _unexplained(found: Gradient, expected: Gradient) -> float:
    """Share of a gradient that is no multiple of another."""
    size = norm(found)
    return distance(found, expected, relation(found, expected)[2]) / size if size else 0.0


def _explained(
    accumulated: Gradient,
    reference: Gradient,
    mistakes: Sequence[Mistake],
    allowed: Allowed,
    scale: float,
    measured: str,
) -> str:
    scaled = _unexplained(accumulated, reference)
    left = [(_unexplained(mistake.found, mistake.expected), mistake) for mistake in mistakes]
    least, best = min(left, key=lambda pair: pair[0], default=(math.inf, None))
    # Where microbatches are equally large, a mistake is a multiple too: the plainer statement goes first.
    if scaled <= allowed.relative and scaled <= least + allowed.relative / 10:
        cause = next((m.text for m in mistakes if _equal(m.found, m.expected, allowed)), None)
        named = "" if cause is None else f": {cause}"
        return f"the accumulated gradient is {scale:.4g} times the gradient of the whole step {measured}{named}"
    message = f"the accumulated gradient is not that of the whole step {measured}"
    if best is None or least > allowed.relative:
        return message
    message += f": {best.text}"
    if best.distortion:
        message += (
            f"; a token weighs from {min(best.distortion):.2f} to {max(best.distortion):.2f} times what it should"
        )
    return message


def _equal(found: Gradient, expected: Gradient, allowed: Allowed) -> bool:
    return distance(found, expected) <= allowed.relative * norm(expected) + allowed.rounding


def _hint(allowed: Allowed) -> str:
    if not allowed.half:
        return ""
    return ". Something is computed in 16 bits, where a few 1e-3 are rounding; `tolerance` sets what is allowed"


@contextmanager
def _undisturbed(module: LightningModule) -> Iterator[None]:
    """Restores the random state."""
    device = device_of(module)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _gradient_of(module: LightningModule, batch: Any) -> dict[str, Tensor]:
    """The gradient of one pass, which leaves gradients and buffers as they were."""
    before = {name: parameter.grad for name, parameter in module.named_parameters()}
    buffers = [
        (owner, name, buffer) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False)
    ]
    copies = [buffer.detach().clone() for _, _, buffer in buffers]
    module.zero_grad(set_to_none=True)
    try:
        outputs: Any = module.training_step(batch, 0)
        (outputs["loss"] if isinstance(outputs, Mapping) else outputs).backward()
        return take_gradients(module)
    finally:
        for name, parameter in module.named_parameters():
            parameter.grad = before[name]
        for (owner, name, buffer), copy in zip(buffers, copies, strict=True):
            buffer.detach().copy_(copy)
            setattr(owner, name, buffer)
