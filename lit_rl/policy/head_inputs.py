"""Checks on what the log-probability head is given, and its layout as flat rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_rl.options import as_integer
from lit_rl.policy.head_products import HeadInputs


def check_number(name: str, value: float, *, optional: bool = False) -> None:
    """Refuse a number that is not positive and finite.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive, or not finite.

    >>> check_number("softcap", -30.0)
    Traceback (most recent call last):
    ValueError: `softcap` must be a positive number, got -30.0.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a positive number, got {type(value).__name__}.")
    if not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a positive number, got {value}.")


def check_count(name: str, value: int | None) -> None:
    """Refuse a count that is neither None nor a whole number of at least 1.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below 1.

    >>> check_count("chunk_tokens", 0)
    Traceback (most recent call last):
    ValueError: `chunk_tokens` must be at least 1, got 0.
    """
    if value is None:
        return
    count = as_integer(value)
    if count is None:
        raise TypeError(f"`{name}` must be a whole number, got {type(value).__name__}.")
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}.")


def prepare_inputs(
    hiddens: Sequence[Tensor],
    weights: Sequence[Tensor],
    targets: Tensor,
    *,
    bias: Tensor | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    vocab_size: int | None,
) -> HeadInputs:
    """Check the arguments of one call and lay them out as rows.

    Args:
        hiddens: Hidden states `[..., D_i]`, one per weight.
        weights: Weights `[V, D_i]`.
        targets: Token ids `[...]`.
        bias: `[V]`, or None.
        temperature: A number, or `[...]`.
        logit_scale: Positive number.
        softcap: Positive number, or None.
        vocab_size: At most `V`; None is `V`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape, value or device.
    """
    _check_tensors(hiddens, weights, targets, bias)
    check_number("logit_scale", logit_scale)
    check_number("softcap", softcap, optional=True)  # type: ignore[arg-type]
    check_count("vocab_size", vocab_size)
    rows = weights[0].shape[0]
    if vocab_size is not None and vocab_size > rows:
        raise ValueError(f"`vocab_size` is {vocab_size}, more than the {rows} rows of `weight`.")
    row_temperature: Tensor | None = None
    if isinstance(temperature, Tensor):
        row_temperature, temperature = _row_temperature(temperature, targets), 1.0
    else:
        check_number("temperature", temperature)
    device = targets.device.type
    return HeadInputs(
        hiddens=[hidden.reshape(-1, hidden.shape[-1]) for hidden in hiddens],
        weights=list(weights),
        bias=bias,
        targets=targets.reshape(-1).long(),
        row_temperature=row_temperature,
        temperature=float(temperature),
        logit_scale=float(logit_scale),
        softcap=None if softcap is None else float(softcap),
        vocab_size=vocab_size or rows,
        autocast_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
    )


def _check_tensors(hiddens: Sequence[Tensor], weights: Sequence[Tensor], targets: Tensor, bias: Tensor | None) -> None:
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype in (torch.bool, torch.complex64):
        raise TypeError(f"`targets` must be a tensor of token ids, got {_kind(targets)}.")
    named = [("hidden", hidden) for hidden in hiddens] + [("weight", weight) for weight in weights]
    for name, tensor in [*named, ("bias", bias)] if bias is not None else named:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"`{name}` must be a floating-point tensor, got {_kind(tensor)}.")
        if tensor.device != targets.device:
            raise ValueError(f"`{name}` is on {tensor.device} but `targets` on {targets.device}: move one of them.")
    for hidden, weight in zip(hiddens, weights, strict=True):
        if weight.dim() != 2 or weight.shape[0] == 0:
            raise ValueError(
                f"`weight` must have shape [V, D], got {tuple(weight.shape)}: gather a sharded parameter first."
            )
        if hidden.shape != (*targets.shape, weight.shape[1]):
            raise ValueError(
                f"`hidden` must have shape {(*targets.shape, weight.shape[1])} to go with `targets` "
                f"{tuple(targets.shape)} and `weight` {tuple(weight.shape)}, got {tuple(hidden.shape)}."
            )
    if bias is not None and bias.shape != weights[0].shape[:1]:
        raise ValueError(f"`bias` must have shape {tuple(weights[0].shape[:1])}, got {tuple(bias.shape)}.")


def _row_temperature(temperature: Tensor, targets: Tensor) -> Tensor:
    if temperature.requires_grad:
        raise ValueError("`temperature` requires a gradient, which the head does not compute: detach it.")
    if temperature.dim() and temperature.shape != targets.shape:
        raise ValueError(
            f"`temperature` must be a number or have the shape of `targets`, {tuple(targets.shape)}, "
            f"got {tuple(temperature.shape)}."
        )
    return temperature.to(targets.device).expand(targets.shape).reshape(-1)


def _kind(value: object) -> str:
    return f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
