"""What a step's loss is checked for: fields that have to be there, losses that have to have a gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_rl.checks.gradients import whole
from lit_rl.data.batch import PackedBatch

_MISSING = {
    "sampler_log_probs": "a sampler correction compares with the sampler's log-probabilities; give the trajectories "
    '`log_probs`, or leave `sampler_correction` at "none"',
    "reference_log_probs": "the KL term compares with the reference policy; pass the batch through "
    "`PolicyModule.with_reference` first",
}


def required(value: Tensor | None, name: str) -> Tensor:
    """A field of a microbatch that the loss cannot do without.

    Args:
        value: The field.
        name: Its name.

    Returns:
        The field.

    Raises:
        ValueError: It is `None`; the message says where it comes from.
    """
    if value is not None:
        return value
    advice = _MISSING.get(
        name,
        "they are decided on the whole step, before it is split; use `PackedDataModule`, or pass "
        f"`{name}` to `lit_rl.collate` (weights come from `lit_rl.loss_weights`)",
    )
    raise ValueError(f"the microbatch has no `{name}`: {advice}")


def check_losses(losses: Any, log_probs: Tensor) -> Tensor:
    """Refuses what an overridden `objective` must not return.

    Args:
        losses: What it returned.
        log_probs: [m] what it was given.

    Returns:
        The losses.

    Raises:
        TypeError: They are no tensor.
        ValueError: They have another shape than [m], or no gradient.
    """
    if not isinstance(losses, Tensor):
        raise TypeError(f"`objective` returned {type(losses).__name__}, expected a tensor with one loss per token")
    if log_probs.requires_grad and log_probs.numel() and not losses.requires_grad:
        raise ValueError("`objective` returned losses without gradient; compute them from `log_probs`, not detached")
    if losses.shape != log_probs.shape:
        raise ValueError(
            f"`objective` returned shape {list(losses.shape)}, expected one loss per scored token "
            f"{list(log_probs.shape)}; do not sum or average, the weights do that"
        )
    return losses


def explain_loss(loss: float, seen: list[tuple[PackedBatch, Tensor]]) -> str:
    """Names the first trajectory of this rank's microbatches with a log-probability that is no number.

    Args:
        loss: Of the step; not finite.
        seen: This rank's microbatches with their log-probabilities [M].

    Returns:
        What happened and where to look.
    """
    for batch, log_probs in seen:
        bad = ~torch.isfinite(log_probs)
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            index = int(batch.trajectory_index[batch.scored_segments[token]])
            return (
                f"the loss of a step is {loss}: trajectory {index} of the iteration has a log-probability of "
                f"{float(log_probs[token])}; the weights were not updated. Look for weights that are not finite, a "
                "learning rate that is too large, or a precision that overflows"
            )
    for name in ("advantages", "weights", "old_log_probs", "sampler_log_probs", "reference_log_probs"):
        fields = [value for batch, _ in seen if (value := getattr(batch, name)) is not None]
        bad_values = sum(int((~torch.isfinite(value)).sum()) for value in fields)
        if bad_values:
            return f"the loss of a step is {loss}: {bad_values} of `{name}` are not finite; weights were not updated"
    return (
        f"the loss of a step is {loss} although everything this rank gave to `objective` is finite; weights were not "
        "updated. Look for a division by 0 or an overflow in `objective`, or at the other ranks' messages"
    )


def explain_gradient(norm: float, parameters: Mapping[str, Tensor]) -> str:
    """Names the first parameter whose gradient is no number; every rank must call it.

    Args:
        norm: Of the whole gradient; not finite.
        parameters: Parameter by name, with gradients.

    Returns:
        What happened and where to look.
    """
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    first = next((name for name, gradient in gradients.items() if not torch.isfinite(whole(gradient)).all()), None)
    where = "the norm overflows" if first is None else f"that of `{first}` is the first with NaN or infinite values"
    return (
        f"the loss of a step is finite, but the norm of its gradient is {norm}: {where}; the weights were not updated. "
        "Look at the derivative of `objective` (a root or a logarithm at 0), or at a precision that overflows"
    )
