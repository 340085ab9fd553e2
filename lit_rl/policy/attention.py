"""Segment attention: every segment of a packed row attends to itself only, without a block mask ever being built.

It is registered with transformers' attention and mask registries and stays set on the model. A forward pass that
carries no boundaries (generation, prefill, decoding, padded batches) is handed to the attention the model came with,
so its numbers there are the model's own. The boundaries travel as arguments of the layers, never in state around
them: a layer that is recomputed in the backward pass (activation checkpointing) sees the ones it saw at first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from lit_rl.policy.attention_kernels import AttentionPattern, attend_segments
from lit_rl.policy.mask_pattern import read_pattern

# The attention a model came with -> the registered segment attention that hands over to it.
SEGMENT_ATTENTION = {"sdpa": "lit_rl_segments", "eager": "lit_rl_segments_eager"}
_BASE_ATTENTION = {name: base for base, name in SEGMENT_ATTENTION.items()}
# Arguments that models pass along and that do not change what attention computes.
_WITHOUT_EFFECT = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "layer_idx"),
        *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "logits_to_keep"),
        *("deterministic", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
)
_active: ContextVar[Segments | None] = ContextVar("lit_rl_segments", default=None)


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the pieces of a flattened microbatch lie; padding between and after segments forms pieces of its own.

    Args:
        lengths: Tokens of each piece, none of them 0, in order; they add up to rows x width.
        cu_seqlens: int32 [pieces + 1] cumulative lengths on the device of the model.

    Example:
        >>> Segments.from_rows([0, 3], [3, 2], rows=1, width=8, device="cpu").lengths
        (3, 2, 3)
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def from_rows(
        cls, starts: list[int], lengths: list[int], *, rows: int, width: int, device: torch.device | str
    ) -> Segments:
        """Cuts `rows` rows of `width` positions at the given segments.

        Args:
            starts: Flat index (row * width + column) of each segment's first token, increasing.
            lengths: Tokens of each segment, at least 1.
            rows: Number of rows.
            width: Positions per row.
            device: Where the cumulative lengths are needed.

        Raises:
            ValueError: A segment is empty, overlaps the one before it, or crosses the end of its row.
        """
        pieces: list[int] = []
        position = 0
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if length < 1:
                raise ValueError(f"segment {index} has length {length}; expected at least 1")
            if start < position or start + length > rows * width or start // width != (start + length - 1) // width:
                raise ValueError(
                    f"segment {index} covers flat positions {start}..{start + length - 1}; expected it to begin at "
                    f"{position} or later and to end within its row of {width}"
                )
            pieces += [*_padding(position, start, width), length]
            position = start + length
        pieces += _padding(position, rows * width, width)
        return cls.from_lengths(pieces, device=device)

    @classmethod
    def from_lengths(cls, lengths: list[int], *, device: torch.device | str) -> Segments:
        """The pieces of the given lengths, one after another."""
        cumulative = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
        return cls(tuple(lengths), cumulative)

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest piece."""
        return max(self.lengths)

    @property
    def keyword_arguments(self) -> dict[str, Any]:
        """The boundaries under the names that transformers models hand down to their attention."""
        return {
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }


def _padding(start: int, end: int, width: int) -> list[int]:
    """Lengths of the padding pieces between two flat positions, cut at the ends of rows."""
    pieces = []
    while start < end:
        stop = min(end, (start // width + 1) * width)
        pieces.append(stop - start)
        start = stop
    return pieces


@dataclass(frozen=True, eq=False)
class SegmentMask:
    """What the mask function hands to the layers in place of a mask: the boundaries and the layer's own pattern."""

    segments: Segments
    pattern: AttentionPattern


@contextmanager
def packed_forward(segments: Segments) -> Iterator[None]:
    """Within it, the masks that a model asks for are `SegmentMask`s over these segments."""
    token = _active.set(segments)
    try:
        yield
    finally:
        _active.reset(token)


def register_segment_attention() -> None:
    """Adds segment attention to transformers' attention and mask registries; calling it again changes nothing."""
    for base, name in SEGMENT_ATTENTION.items():
        AttentionInterface.register(name, partial(_attention_forward, base))
        AttentionMaskInterface.register(name, partial(_mask_forward, base))


def attach_segment_attention(model: nn.Module) -> str | None:
    """Sets segment attention on a transformers model.

    Args:
        model: A transformers `PreTrainedModel`.

    Returns:
        `None` when it is set, otherwise why it cannot be.
    """
    register_segment_attention()
    current = attention_name(model)
    if current in _BASE_ATTENTION:
        return None
    if current not in SEGMENT_ATTENTION:
        return f"its attention is {current!r}, which is used as it is"
    if not model._can_set_attn_implementation():  # type: ignore[operator]
        return f"{type(model).__name__} does not take its attention from transformers' AttentionInterface"
    model.set_attn_implementation(SEGMENT_ATTENTION[current])  # type: ignore[operator]
    return None


def detach_segment_attention(model: nn.Module) -> None:
    """Gives a transformers model back the attention it came with."""
    base = _BASE_ATTENTION.get(attention_name(model) or "")
    if base is not None:
        model.set_attn_implementation(base)  # type: ignore[operator]


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Within it, the model runs the attention it came with, in every respect."""
    attached = attention_name(model)
    detach_segment_attention(model)
    try:
        yield
    finally:
        detach_segment_attention(model)
        if attached in _BASE_ATTENTION:
            model.set_attn_implementation(attached)  # type: ignore[operator]


def attention_name(model: nn.Module) -> str | None:
    """The name of the attention that is set on a transformers model; `None` for any other module."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def _attention_forward(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The registered attention: [rows, heads, width, size] each -> [rows, width, heads, size]."""
    if not isinstance(attention_mask, SegmentMask) and options.get("cu_seq_lens_q") is None:
        return _base_attention(base, module)(module, query, key, value, attention_mask, **options)
    return _segment_attention(module, query, key, value, attention_mask, options), None


# Compiled, its loop over segments would be one graph for every microbatch; uncompiled, what lies between is one.
@torch.compiler.disable
def _segment_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, options: dict[str, Any]
) -> Tensor:
    given = attention_mask.segments if isinstance(attention_mask, SegmentMask) else _segments_from(options)
    if query.shape[2] != key.shape[2] or query.shape[0] * query.shape[2] != sum(given.lengths):
        raise NotImplementedError(
            f"segments cover {sum(given.lengths)} positions, but attention got queries {list(query.shape)} and keys "
            f"{list(key.shape)}; segments cannot be combined with a key-value cache or changed row shapes"
        )
    pattern = _pattern(module, attention_mask, options)
    dense = attention_mask if isinstance(attention_mask, Tensor) else None
    return attend_segments(
        query, key, value, given.lengths, given.cu_seqlens, pattern, scaling=options.get("scaling"), dense_mask=dense
    )


def _segments_from(options: dict[str, Any]) -> Segments:
    """Boundaries that came as keyword arguments only, as for models that build their masks by themselves."""
    cumulative = options["cu_seq_lens_q"]
    return Segments(tuple(cumulative.diff().tolist()), cumulative)


def _pattern(module: nn.Module, attention_mask: Any, options: dict[str, Any]) -> AttentionPattern:
    """The layer's pattern from its mask and arguments; whatever is not understood is refused, by name."""
    known = {"scaling", "softcap", "s_aux", "sliding_window", "dropout", "is_causal", *_WITHOUT_EFFECT}
    unknown = [
        name for name, value in options.items() if name not in known and value is not None and value is not False
    ]
    if unknown:
        raise NotImplementedError(f"segment attention does not know the argument `{unknown[0]}`")
    if options.get("dropout"):
        raise NotImplementedError(f"segment attention has no dropout, got `dropout={options['dropout']}`; set it to 0")
    extras = {"softcap": options.get("softcap"), "sinks": options.get("s_aux")}
    if isinstance(attention_mask, SegmentMask):
        # The mask, not the argument, is what the model's own attention obeys.
        return replace(attention_mask.pattern, **extras)
    if isinstance(attention_mask, Tensor):
        return AttentionPattern(**extras)
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise NotImplementedError("segment attention is causal, but the layer says `is_causal=False`")
    return AttentionPattern(window=options.get("sliding_window"), **extras)


def _base_attention(base: str, module: nn.Module) -> Callable[..., Any]:
    if base != "eager":
        return AttentionInterface()[base]
    # Eager attention is no entry of the registry: each modeling file has its own. FSDP2 makes a subclass elsewhere.
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise NotImplementedError(f"{type(module).__name__} is defined in a file without `eager_attention_forward`")


@torch.compiler.disable
def _mask_forward(base: str, **arguments: Any) -> Any:
    """The registered mask function: a `SegmentMask` in a packed forward pass, the model's own mask otherwise."""
    own_mask = AttentionMaskInterface()[base]
    segments = _active.get()
    if segments is None:
        return own_mask(**arguments)
    pattern = read_pattern(arguments["mask_function"])
    padding = arguments.get("attention_mask")
    if pattern is None or (padding is not None and not bool(padding.all())):
        # An unknown pattern is built in full and cut into its diagonal blocks; never skipped in favour of a flag.
        return own_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return SegmentMask(segments, pattern)
