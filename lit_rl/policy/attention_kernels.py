"""What segment attention computes: one causal attention per segment, by torch's own kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Fewest queries that a block of windowed attention holds: smaller blocks spend their time on calls.
_SMALLEST_BLOCK = 128


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Which earlier tokens of its own segment a token attends to, and what is done to the scores.

    Args:
        window: A token sees itself and the `window - 1` tokens before it; `None` is all of them.
        chunk: Segments are cut into chunks of this many tokens that do not see each other.
        softcap: Scores become `softcap * tanh(scores / softcap)`.
        sinks: [heads] one extra score per head that takes part in the softmax and has no value.
    """

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    cu_seqlens: Tensor,
    pattern: AttentionPattern,
    *,
    scaling: float | None = None,
    dense_mask: Tensor | None = None,
) -> Tensor:
    """Causal attention within each segment of a flattened microbatch.

    On CUDA in half precision this is torch's variable-length kernel (FlashAttention); everywhere else each segment
    is its own `scaled_dot_product_attention`, equally long segments in one call. Soft caps and sinks, which those
    kernels lack, are computed in the open, one segment at a time.

    Args:
        query: [rows, heads, width, size], any floating-point dtype.
        key: [rows, key heads, width, size]; heads are shared where there are fewer.
        value: [rows, key heads, width, value size].
        lengths: Tokens of each piece; they add up to rows * width.
        cu_seqlens: int32 [pieces + 1] the same as cumulative lengths, on the device.
        pattern: What a token sees within its segment.
        scaling: What scores are multiplied by; `None` is `size ** -0.5`.
        dense_mask: [rows, 1 or heads, width, width] boolean (true = attends) or additive mask that replaces the
            causal pattern; only the blocks on its diagonal are read.

    Returns:
        [rows, width, heads, value size].

    Example:
        >>> x = torch.randn(1, 2, 5, 8)
        >>> packed = attend_segments(x, x, x, [3, 2], torch.tensor([0, 3, 5]), AttentionPattern())
        >>> alone = functional.scaled_dot_product_attention(x[:, :, 3:], x[:, :, 3:], x[:, :, 3:], is_causal=True)
        >>> torch.allclose(packed[:, 3:], alone.transpose(1, 2), atol=1e-6)
        True
    """
    rows, _, width, _ = query.shape
    query, key, value = _same_dtype(query, key, value)
    flat_query, flat_key, flat_value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if pattern.chunk is not None and max(lengths) > pattern.chunk:
        lengths = [piece for length in lengths for piece in _chunks(length, pattern.chunk)]
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(query.device)
    if dense_mask is not None:
        output = _under_dense_mask(flat_query, flat_key, flat_value, lengths, width, pattern, scaling, dense_mask)
    elif _has_varlen_kernel(query, value, pattern):
        output = _varlen(flat_query, flat_key, flat_value, cu_seqlens, max(lengths), pattern.window, scaling)
    else:
        output = _by_length(flat_query, flat_key, flat_value, lengths, pattern, scaling)
    return output.unflatten(0, (rows, width))


def _same_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, normalized queries and keys can come in float32 beside values in half precision."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _chunks(length: int, chunk: int) -> list[int]:
    whole, rest = divmod(length, chunk)
    return [chunk] * whole + [rest] * (rest > 0)


def _has_varlen_kernel(query: Tensor, value: Tensor, pattern: AttentionPattern) -> bool:
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and size == value.shape[-1]
        and size <= 256
        and size % 8 == 0
        and pattern.softcap is None
        and pattern.sinks is None
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    window: int | None,
    scaling: float | None,
) -> Tensor:
    """FlashAttention over [tokens, heads, size]; its window counts the tokens to the left, itself excluded."""
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None or window >= longest else window - 1
    output = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens.int(),
        cu_seqlens.int(),
        longest,
        longest,
        scale=scaling,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)  # a pair only where the log-sum-exp is asked for
    return output


def _by_length(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], pattern: AttentionPattern, scaling: float | None
) -> Tensor:
    """One call per distinct length where that saves calls, otherwise one per segment, without copying."""
    counts = Counter(lengths)
    if 2 * len(counts) > len(lengths):
        return _in_order(query, key, value, [(length, 1) for length in lengths], pattern, scaling)
    order = _by_length_order(lengths)
    index = order.to(query.device)
    sorted_output = _in_order(query[index], key[index], value[index], sorted(counts.items()), pattern, scaling)
    return sorted_output[order.argsort().to(query.device)]


def _by_length_order(lengths: Sequence[int]) -> Tensor:
    """Flat positions, the shortest segments first; within a segment in order."""
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    by_size = sizes.argsort(stable=True)
    sizes, starts = sizes[by_size], starts[by_size]
    within = torch.arange(int(sizes.sum())) - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    return torch.repeat_interleave(starts, sizes) + within


def _in_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    groups: Sequence[tuple[int, int]],
    pattern: AttentionPattern,
    scaling: float | None,
) -> Tensor:
    """[tokens, heads, size] that consist of `count` segments of `length` tokens for each of the groups."""
    # `split` and `cat` write each gradient once; slices would each write a gradient of full size.
    sizes = [length * count for length, count in groups]
    outputs = []
    for (length, count), *pieces in zip(groups, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (piece.unflatten(0, (count, length)).transpose(1, 2) for piece in pieces)
        outputs.append(_attend(q, k, v, pattern, scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern, scaling: float | None) -> Tensor:
    """[segments, heads, length, size], equally long."""
    length = query.shape[2]
    window = pattern.window
    if window is not None and window < length:
        block = max(window, _SMALLEST_BLOCK)
        blocks = [
            _window_block(query, key, value, start, min(start + block, length), pattern, scaling)
            for start in range(0, length, block)
        ]
        return torch.cat(blocks, dim=2)
    if pattern.softcap is None and pattern.sinks is None:
        shared = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
        )
    mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return _masked(query, key, value, mask, pattern, scaling)


def _window_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: int,
    end: int,
    pattern: AttentionPattern,
    scaling: float | None,
) -> Tensor:
    """Queries start..end-1 against the keys that any of them sees, so that the mask stays as narrow as the window."""
    window = pattern.window or 0
    first = max(0, start - window + 1)
    rows = torch.arange(start, end, device=query.device)[:, None]
    columns = torch.arange(first, end, device=query.device)[None, :]
    mask = (columns <= rows) & (columns > rows - window)
    return _masked(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], mask, pattern, scaling)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, pattern: AttentionPattern, scaling: float | None
) -> Tensor:
    """Attention under a mask that broadcasts to [segments, heads, queries, keys]."""
    if pattern.softcap is None and pattern.sinks is None:
        shared = query.shape[1] != key.shape[1]
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=shared
        )
    shared_by = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared_by, 1), value.repeat_interleave(shared_by, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if pattern.softcap is not None:
        scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if pattern.sinks is not None:
        sinks = pattern.sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _under_dense_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    width: int,
    pattern: AttentionPattern,
    scaling: float | None,
    mask: Tensor,
) -> Tensor:
    """Each segment under its own block of a mask that the model built."""
    sizes = list(lengths)
    outputs = []
    start = 0
    for pieces in zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        length = pieces[0].shape[0]
        row, column = divmod(start, width)
        block = mask[min(row, mask.shape[0] - 1), :, column : column + length, column : column + length]
        q, k, v = (piece.transpose(0, 1).unsqueeze(0) for piece in pieces)
        outputs.append(_masked(q, k, v, block, pattern, scaling).squeeze(0).transpose(0, 1))
        start += length
    return torch.cat(outputs)
