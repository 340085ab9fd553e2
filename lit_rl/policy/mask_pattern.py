"""Takes the mask functions of transformers apart: which pattern does a layer ask for?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import masking_utils

from lit_rl.policy.attention_kernels import AttentionPattern


def _code_of(name: str, *arguments: Any) -> Any:
    """The code of the mask function that a factory makes; `None` in releases of transformers that lack it."""
    factory = getattr(masking_utils, name, None)
    return None if factory is None else factory(*arguments).__code__


# The pieces that transformers puts its mask functions together from; their code does not depend on the arguments.
_CAUSAL = masking_utils.causal_mask_function.__code__
_SLIDING = _code_of("sliding_window_overlay", None)
_CHUNKED = _code_of("chunked_overlay", None, None)
_BOTH = _code_of("and_masks")
_REMAPPED = _code_of("remap_positions_for_packed_sequence", None, None)
_SAME_SEGMENT = _code_of("packed_sequence_mask_function", None)


def read_pattern(mask_function: Callable[..., Any]) -> AttentionPattern | None:
    """Takes a transformers mask function apart.

    Args:
        mask_function: What `create_causal_mask` and its relatives put together.

    Returns:
        The pattern within one segment, or `None` when a part of it is not known or it is not causal.

    Example:
        >>> from transformers.masking_utils import sliding_window_causal_mask_function
        >>> read_pattern(sliding_window_causal_mask_function(4)).window
        4
    """
    parts: dict[str, int] = {}
    if not _collect(mask_function, parts) or "causal" not in parts:
        return None
    return AttentionPattern(window=parts.get("window"), chunk=parts.get("chunk"))


def _collect(function: Callable[..., Any], parts: dict[str, int]) -> bool:
    """Adds what a mask function restricts to `parts`; false where a part of it is not known."""
    code = getattr(function, "__code__", None)
    if code is _CAUSAL:
        parts["causal"] = 1
        return True
    if code is None or code not in (_SLIDING, _CHUNKED, _BOTH, _REMAPPED, _SAME_SEGMENT):
        return False
    cells = inspect.getclosurevars(function).nonlocals
    if code is _BOTH:
        return all(_collect(part, parts) for part in cells["mask_functions"])
    if code is _REMAPPED:
        return _collect(cells["mask_function"], parts)
    for kind, name, key in ((_SLIDING, "sliding_window", "window"), (_CHUNKED, "chunk_size", "chunk")):
        if code is kind:
            parts[key] = min(cells[name], parts.get(key, cells[name]))
    return True
