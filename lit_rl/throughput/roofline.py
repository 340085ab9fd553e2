"""How fast one device can decode and train: what must be read against what must be multiplied.

Two ways to count, by name:

- `first_order`: every parameter is read once per decode step and costs 6 FLOPs per training token; attention is
  left out. The estimate on the back of an envelope, close for a large dense model.
- `counted`: only weights that are multiplied (no embedding table), attention by segment.

In both, experts that no sequence of the batch was sent to are not read, and idle experts are not multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_rl.throughput.flops import AttentionConvention, model_flops
from lit_rl.throughput.hardware import Accelerator, find_accelerator
from lit_rl.throughput.shape import ModelShape

Counting = Literal["first_order", "counted"]


@dataclass(frozen=True, kw_only=True)
class DecodeRate:
    """One decode step of a batch on one device.

    Args:
        batch: Sequences, one new token each.
        context: Tokens in the cache of each.
        weight_bytes: Bytes of weights read.
        cache_bytes: Bytes of cache read, all sequences.
        memory_seconds: Time to read both.
        compute_seconds: Time to multiply at the dense peak.
    """

    batch: int
    context: int
    weight_bytes: float
    cache_bytes: float
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        """The least time of the step: the slower of the two."""
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """Which of the two it is."""
        return "memory" if self.memory_seconds >= self.compute_seconds else "compute"

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second and device."""
        return self.batch / self.seconds


def read_seconds(
    weight_bytes: float, cache_bytes_per_token: float, *, batch: int, context: int, bandwidth: float
) -> float:
    """Seconds a decode step takes to read its weights once and every sequence's cache.

    Args:
        weight_bytes: Bytes of weights read per step.
        cache_bytes_per_token: Bytes of cache per token of context.
        batch: Sequences.
        context: Tokens of context of each.
        bandwidth: Bytes per second.

    Example:
        >>> seconds = read_seconds(14e9, 131072, batch=64, context=4096, bandwidth=4.8e12)
        >>> round(1e3 * seconds, 2), round(64 / seconds)
        (10.07, 6352)
    """
    return (weight_bytes + batch * context * cache_bytes_per_token) / bandwidth


def bandwidth_share(bytes_moved: float, seconds: float, bandwidth: float) -> float:
    """The share of the bandwidth that was used: bytes read and written, over time, over the peak.

    Example:
        >>> bandwidth_share(700e9, 1.0, 2e12)
        0.35
    """
    return bytes_moved / seconds / bandwidth


def read_weights(shape: ModelShape, batch: int, *, counting: Counting = "first_order") -> float:
    """Weights one decode step reads, on average over which experts a batch is sent to.

    With E experts of which each token uses k, chosen evenly, a batch of b touches E (1 - (1 - k/E)^b) of them.
    """
    idle = sum(
        layer.count
        * (layer.expert_weights + layer.expert_small_weights)
        * layer.experts
        * (1 - layer.experts_per_token / layer.experts) ** batch
        for layer in shape.layers
        if layer.experts
    )
    if counting == "first_order":
        return shape.parameters - idle
    looked_up = 0 if shape.tied else shape.embedding_weights
    return shape.parameters - looked_up - idle


def decode_rate(
    shape: ModelShape,
    accelerator: str | Accelerator,
    *,
    batch: int,
    context: int,
    counting: Counting = "first_order",
    parameters: float | None = None,
    weight_bits: float = 16,
    cache_bits: float = 16,
) -> DecodeRate:
    """The decode roofline of one device: (weights + batch x context x cache) / bandwidth, or the dense peak.

    It is an upper bound: scheduling, kernels below the peak and communication are not in it. A group of t devices
    that share weights and cache reads t times as fast, so the rate per device is that of the group's batch here.

    Args:
        shape: The model.
        accelerator: A name of the table or an `Accelerator`.
        batch: Sequences decoded together.
        context: Tokens each has in its cache; windows read no more than their width.
        counting: What counts as read and multiplied, see the module docstring.
        parameters: Parameters to assume instead of the counted ones, such as a model card's rounded figure.
        weight_bits: Bits per weight.
        cache_bits: Bits per cached value.

    Returns:
        Bytes, seconds, the bound, and `tokens_per_second` per device.

    Example:
        >>> shape = ModelShape.from_config("qwen3-8b")
        >>> [round(decode_rate(shape, "h200", batch=b, context=c, parameters=8.2e9).tokens_per_second)
        ...  for b, c in [(64, 2048), (64, 16384), (256, 16384)]]
        [8598, 1796, 1935]
    """
    _at_least_one(batch=batch, context=context)
    device = find_accelerator(accelerator)
    weights = read_weights(shape, batch, counting=counting) if parameters is None else parameters
    cache = batch * shape.cache_bytes(context, bytes_per_value=cache_bits / 8)
    flops = 2.0 * batch * (shape.active_parameters if parameters is None else parameters)
    if counting == "counted":
        one = model_flops(shape, [1], work="forward")
        step = sum(
            2.0 * layer.count * layer.query_heads * (layer.score_width + layer.value_width) * layer.attended(context)
            for layer in shape.layers
        )
        flops = batch * (one.body + one.head + step)
    weight_bytes = weights * weight_bits / 8
    return DecodeRate(
        batch=batch,
        context=context,
        weight_bytes=weight_bytes,
        cache_bytes=cache,
        memory_seconds=(weight_bytes + cache) / device.bandwidth,
        compute_seconds=flops / device.peak_flops,
    )


def sequences_that_fit(
    shape: ModelShape,
    accelerator: str | Accelerator,
    *,
    context: int,
    weight_bits: float = 16,
    cache_bits: float = 16,
    tensor_parallel: int = 1,
    reserve: float = 0.1,
) -> int | None:
    """Sequences of `context` tokens whose cache fits beside the weights, with a share of memory kept free.

    Args:
        shape: The model.
        accelerator: A name of the table or an `Accelerator`.
        context: Tokens of each sequence.
        weight_bits: Bits per weight.
        cache_bits: Bits per cached value.
        tensor_parallel: Devices that share weights and cache.
        reserve: Share of the memory left for everything else.

    Returns:
        Their number; 0 where the weights alone do not fit; `None` where a sequence leaves nothing in the cache (a
        model of state-space layers only), so that the cache sets no limit.

    Example:
        >>> sequences_that_fit(ModelShape.from_config("qwen3-8b"), "h200", context=16384)
        45
    """
    device = find_accelerator(accelerator)
    free = tensor_parallel * device.memory * (1 - reserve) - shape.parameters * weight_bits / 8
    cache = shape.cache_bytes(context, bytes_per_value=cache_bits / 8)
    if free <= 0:
        return 0
    return int(free // cache) if cache > 0 else None


def forward_flops_per_token(
    shape: ModelShape,
    *,
    length: int = 1,
    scored_share: float = 1.0,
    counting: Counting = "first_order",
    parameters: float | None = None,
    attention: AttentionConvention = "full_square",
) -> float:
    """Forward FLOPs per token: 2 per active parameter, or counted over a segment of `length` tokens."""
    if counting == "first_order":
        return 2.0 * (shape.active_parameters if parameters is None else parameters)
    scored = round(scored_share * length)
    return model_flops(shape, [length], scored=scored, work="forward", attention=attention).model / length


def train_rate(
    shape: ModelShape,
    accelerator: str | Accelerator,
    *,
    mfu: float = 0.4,
    length: int = 1,
    scored_share: float = 1.0,
    counting: Counting = "first_order",
    parameters: float | None = None,
    attention: AttentionConvention = "full_square",
) -> float:
    """Tokens per second and device of forward and backward at a given utilization.

    Args:
        shape: The model.
        accelerator: A name of the table or an `Accelerator`.
        mfu: Model FLOPs utilization, the share of the dense peak that is reached. An assumption until measured.
        length: Tokens of a typical segment; only `counted` looks at it.
        scored_share: Share of tokens that go through the head; only `counted` looks at it.
        counting: `first_order` is 6 FLOPs per active parameter and token.
        parameters: Parameters to assume instead of the counted ones.
        attention: Convention for attention pairs.

    Example:
        >>> round(train_rate(ModelShape.from_config("qwen3-8b"), "h200", mfu=0.4), -1)
        8050.0
    """
    if not 0 < mfu <= 1:
        raise ValueError(f"`mfu` must be in (0, 1], got {mfu}; 0.4 means 40%")
    forward = forward_flops_per_token(
        shape,
        length=length,
        scored_share=scored_share,
        counting=counting,
        parameters=parameters,
        attention=attention,
    )
    return mfu * find_accelerator(accelerator).peak_flops / (3 * forward)


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}")
