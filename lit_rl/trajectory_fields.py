"""The fields of a trajectory, each checked and brought into one form; messages begin with where the field stands.

>>> flag("False", "truncated", "row 3")
Traceback (most recent call last):
...
TypeError: row 3: `truncated` must be True or False, got 'False'
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_rl.options import as_flag, as_integer, as_number

# A log-probability above this is no rounding error of a sampler but another quantity.
_LARGEST_LOG_PROB = 1e-3


def token_ids(values: Any, where: str) -> Tensor:
    """int64 [L], at least one, none negative; from any flat sequence of integers."""
    tensor = _tensor(values, "token_ids", where)
    if tensor.numel() == 0:
        raise ValueError(f"{where}: `token_ids` is empty; a trajectory has at least 1 token")
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{where}: `token_ids` has dtype {tensor.dtype}, expected integers (ids, never text)")
    tensor = tensor.to(torch.int64)  # first: torch compares few of its unsigned types
    if int(tensor.min()) < 0:
        position = int((tensor < 0).nonzero()[0])
        raise ValueError(f"{where}: `token_ids`[{position}] is {int(tensor[position])}; ids are at least 0")
    return tensor


def action_mask(values: Any, length: int, where: str) -> Tensor:
    """Booleans [L], from booleans or from numbers that are 0 and 1."""
    tensor = _tensor(values, "action_mask", where)
    _same_length(tensor, length, "action_mask", where)
    if tensor.dtype != torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
        raise ValueError(f"{where}: `action_mask` holds values other than 0 and 1: {tensor.tolist()[:8]}")
    return tensor.to(torch.bool)


def log_probs(values: Any, scored: Tensor, where: str) -> Tensor:
    """float32 [L], finite and at most 0; 0 where not scored, whatever stood there, `None` included."""
    tensor = _tensor(values, "log_probs", where, missing=math.nan).to(torch.float32)
    _same_length(tensor, scored.numel(), "log_probs", where)
    bad = scored & ~(torch.isfinite(tensor) & (tensor <= _LARGEST_LOG_PROB))
    if bool(bad.any()):
        position = int(bad.nonzero()[0])
        got = "None" if not isinstance(values, Tensor) and values[position] is None else float(tensor[position])
        raise ValueError(
            f"{where}: `log_probs`[{position}] is {got} at a scored token; expected a finite "
            "number of at most 0 (the log-probability of that token, in nats)"
        )
    return torch.where(scored, tensor.clamp(max=0.0), torch.zeros_like(tensor))


def temperature(value: Any, length: int, where: str) -> Tensor:
    """float32 [L], finite and greater than 0; from one number or [L]."""
    is_array = getattr(value, "ndim", 0) != 0
    number = None if is_array or as_flag(value) is not None else as_number(value)
    if number is not None:
        tensor = torch.full((length,), number, dtype=torch.float32)
    else:
        tensor = _tensor(value, "temperature", where).to(torch.float32)
        _same_length(tensor, length, "temperature", where)
    if not bool((torch.isfinite(tensor) & (tensor > 0)).all()):
        raise ValueError(f"{where}: `temperature` must be finite and greater than 0, got {value!r}")
    return tensor


def reward(value: Any, where: str) -> float:
    """A finite number, or NaN where nobody could score."""
    if value is None:
        return math.nan
    number = as_number(value)
    if number is None:
        raise TypeError(f"{where}: `reward` must be a number or None, got {value!r}")
    if math.isinf(number):
        raise ValueError(f"{where}: `reward` is {number}; expected a finite number, or None where nobody could score")
    return number


def name(value: Any, field: str, where: str) -> str | None:
    """An id: a string as it is, an integer as its digits."""
    if value is None or isinstance(value, str):
        return None if value is None else str(value)
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{where}: `{field}` must be a string id (or an integer), got {type(value).__name__}")
    return str(number)


def flag(value: Any, field: str, where: str) -> bool:
    """A boolean, or 0 or 1; text such as "False" is none."""
    known = as_flag(value)
    if known is not None:
        return known
    if as_integer(value) in (0, 1):
        return bool(value)
    raise TypeError(f"{where}: `{field}` must be True or False, got {value!r}")


def info(value: Any, where: str) -> dict[str, Any]:
    """A copy of a JSON-like dict."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{where}: `info` must be a dict, got {type(value).__name__}")
    try:
        return json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: `info` must hold JSON-like values only ({error})") from error


def info_from_row(value: Any) -> Any:
    """What a data set holds under `info`: JSON as a string is read, anything else is left to `info`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(
            f"`info` is the text {value[:80]!r}, which is no JSON ({error}); give a dict, or one as json.dumps(...)"
        ) from error


def _tensor(values: Any, field: str, where: str, *, missing: float | None = None) -> Tensor:
    """A flat tensor of its own; `None` in a list stands for `missing`, where that is a number."""
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{where}: `{field}` is text; give one number per token (text is never re-encoded)")
    try:
        if isinstance(values, Tensor):
            tensor = values.detach().cpu().clone()
        else:
            items = values.tolist() if hasattr(values, "tolist") else list(values)
            tensor = torch.tensor(items if missing is None else [missing if i is None else i for i in items])
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{where}: `{field}` must be a flat sequence of numbers, got {type(values).__name__}"
        ) from error
    if tensor.dim() != 1:
        raise ValueError(f"{where}: `{field}` has shape {list(tensor.shape)}, expected one dimension [tokens]")
    return tensor


def _same_length(tensor: Tensor, length: int, field: str, where: str) -> None:
    if tensor.numel() != length:
        raise ValueError(
            f"{where}: `{field}` has {tensor.numel()} entries but `token_ids` has {length}; give one per token"
        )
