"""What a model computes in, as far as it decides how much of a difference is rounding."""

from __future__ import annotations

import torch
from torch import nn

_FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def least_precise(model: nn.Module, device: torch.device) -> torch.dtype:
    """The least precise number in a computation: a parameter's, or autocast's where it is on.

    Args:
        model: Its floating-point parameters are looked at.
        device: Where it runs; autocast is a matter of the kind of device.

    Returns:
        One of float64, float32, float16 and bfloat16; float32 for a model without such parameters.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     least_precise(model, torch.device("cpu"))
        torch.bfloat16
    """
    used = {parameter.dtype for parameter in model.parameters()}
    if torch.is_autocast_enabled(device.type):
        used.add(torch.get_autocast_dtype(device.type))
    known = [dtype for dtype in _FORMATS if dtype in used]
    return known[-1] if known else torch.float32
