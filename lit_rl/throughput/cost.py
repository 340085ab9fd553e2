"""The cost by which microbatches are balanced, from a model's shape."""

from __future__ import annotations

from typing import Any

from lit_rl.data.cost import SegmentCost
from lit_rl.throughput.flops import model_flops
from lit_rl.throughput.shape import ModelShape


def segment_cost(shape: ModelShape, *, typical_length: int = 4096) -> SegmentCost:
    """Training FLOPs of a segment as a function of its length, for `plan_steps(cost=...)`.

    Args:
        shape: The model.
        typical_length: Tokens at which the attention of layers with windows or chunks is read off.

    Returns:
        Matrix products by token, attention by pair of tokens (half a square, as it is causal).

    Example:
        >>> cost = segment_cost(ModelShape.from_config("qwen3-8b"))
        >>> round(cost.linear / cost.quadratic)  # the length at which attention costs as much as the rest
        51324
    """
    flops = model_flops(shape, [typical_length], attention="causal_half")
    return SegmentCost(linear=(flops.body + flops.head) / typical_length, quadratic=flops.attention / typical_length**2)


def segment_cost_of(model: Any) -> SegmentCost | None:
    """The cost of a transformers model, or `None` where its configuration does not tell its shape.

    Args:
        model: A module, with a `config` if it is of transformers.

    Returns:
        The cost, or `None`.
    """
    config = getattr(model, "config", None)
    if config is None:
        return None
    try:
        return segment_cost(ModelShape.from_config(config))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
