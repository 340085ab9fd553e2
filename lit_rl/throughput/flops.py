"""FLOPs of segments: matrices by token, attention by segment, the head on scored tokens only.

A multiply-add is two FLOPs. Two conventions for attention are in use and both are offered by name, because a
utilization without its convention cannot be compared:

- `full_square`: a segment of n tokens costs n^2 query-key pairs, as most published utilizations count it
  (PaLM, arXiv:2204.02311, appendix B: 12 x layers x width x n per token, forward and backward);
- `causal_half`: n^2 / 2 pairs, what a causal kernel computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lit_rl.throughput.shape import LayerShape, ModelShape

AttentionConvention = Literal["full_square", "causal_half"]
Work = Literal["train", "forward"]
Recompute = Literal["none", "head", "layers", "all"]


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs by what they are spent on.

    Args:
        body: Matrices of the layers, on every token.
        attention: Scores and weighted values, by segment.
        head: The output head, on scored tokens.
        adapters: Low-rank adapters.
        recomputed: Forward work done a second time to save memory; not part of `model`.
        convention: How attention was counted.
    """

    body: float
    attention: float
    head: float
    adapters: float
    recomputed: float
    convention: AttentionConvention

    @property
    def model(self) -> float:
        """What the gradient needs: the numerator of model FLOPs utilization (MFU)."""
        return self.body + self.attention + self.head + self.adapters

    @property
    def hardware(self) -> float:
        """What the device executes, recomputation included: the numerator of hardware FLOPs utilization."""
        return self.model + self.recomputed


def attention_pairs(
    length: int, *, convention: AttentionConvention = "full_square", layer: LayerShape | None = None
) -> float:
    """Query-key pairs of one segment in one head of one layer.

    Args:
        length: Tokens of the segment, n.
        convention: `full_square` counts n^2, `causal_half` n^2 / 2.
        layer: Where windows and chunks are read from; full attention by default. With a window w < n the causal
            pairs are n w - w^2 / 2, with chunks of w they are w^2 / 2 per whole chunk; the full square is twice that.

    Returns:
        The pairs.

    Example:
        >>> attention_pairs(4), attention_pairs(4, convention="causal_half")
        (16.0, 8.0)
    """
    kind, window = ("full", None) if layer is None else (layer.attention, layer.window)
    if kind == "none":
        return 0.0
    if kind == "chunked" and window:
        whole, rest = divmod(length, window)
        half = (whole * window**2 + rest**2) / 2
    else:
        reach = min(length, window or length)
        half = length * reach - reach**2 / 2
    return 2.0 * half if convention == "full_square" else float(half)


def attention_flops(shape: ModelShape, length: int, *, convention: AttentionConvention = "full_square") -> float:
    """Forward FLOPs of attention over one segment: 2 per pair and width for scores, 2 for the weighted values."""
    return sum(
        2.0
        * layer.count
        * layer.query_heads
        * (layer.score_width + layer.value_width)
        * attention_pairs(length, convention=convention, layer=layer)
        for layer in shape.layers
    )


def model_flops(
    shape: ModelShape,
    lengths: Sequence[int],
    *,
    scored: int | None = None,
    work: Work = "train",
    attention: AttentionConvention = "full_square",
    recompute: Recompute = "none",
    adapter_weights: int | None = None,
) -> Flops:
    """FLOPs of one pass over segments of the given lengths.

    Attention is summed over segments: a row of 8 that holds [4, 4] costs 16 + 16 pairs, not 64. Look-ups cost
    nothing and idle experts cost nothing. Backward costs twice the forward: once for the gradient of the inputs,
    once for that of the weights; under low-rank adapters the frozen matrices need only the first.

    Args:
        shape: The model.
        lengths: Real tokens of each segment, padding not included.
        scored: Tokens that go through the head; all of them by default.
        work: `train` is forward and backward, `forward` a scoring or prefill pass.
        attention: How pairs are counted, see the module docstring.
        recompute: What backward computes a second time: the head, the layers, or both.
        adapter_weights: Trainable weights of low-rank adapters over a frozen model
            (`shape.adapter_weights(rank)`); `None` trains everything.

    Returns:
        FLOPs by part.

    Raises:
        ValueError: A negative length, or more scored tokens than tokens.

    Example:
        >>> shape = ModelShape.decoder(hidden=64, layers=2, vocabulary=1000, feed_forward=256, query_heads=4)
        >>> flops = model_flops(shape, [1])
        >>> flops.body + flops.head
        1170432.0
        >>> model_flops(shape, [4, 4]).attention
        49152.0
    """
    tokens = sum(lengths)
    scored = tokens if scored is None else scored
    if any(length < 0 for length in lengths) or not 0 <= scored <= tokens:
        raise ValueError(f"`lengths` must be >= 0 and `scored` within their sum {tokens}, got {scored=} and {lengths}")
    body = 2.0 * shape.body_weights * tokens
    head = 2.0 * shape.head_weights * scored
    pairs = sum(attention_flops(shape, length, convention=attention) for length in lengths)
    adapters = 2.0 * (adapter_weights or 0) * tokens
    matrices, others = (1, 1) if work == "forward" else (3 if adapter_weights is None else 2, 3)
    again = 0.0
    if work == "train":
        again += head if recompute in ("head", "all") else 0.0
        again += body + pairs + adapters if recompute in ("layers", "all") else 0.0
    return Flops(
        body=matrices * body,
        attention=others * pairs,
        head=matrices * head,
        adapters=others * adapters,
        recomputed=again,
        convention=attention,
    )
