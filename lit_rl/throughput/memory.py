"""What one GPU holds while it trains a microbatch: weights, gradients, optimizer, activations, logits, cache.

Arithmetic, not measurement: `lit-rl budget` measures. Bytes per number are stated where they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lit_rl.throughput.shape import ModelShape

Precision = Literal["bf16-mixed", "bf16-true", "32-true"]
Checkpointing = Literal["none", "selective", "full"]
Head = Literal["full", "chunked", "recomputed"]

# Bytes per parameter of (stored weights, gradient, AdamW's two moments). Mixed keeps float32 weights and computes
# with bf16 copies of them.
_STATE_BYTES: dict[Precision, tuple[int, int, int]] = {
    "bf16-mixed": (4, 4, 8),
    "bf16-true": (2, 2, 4),
    "32-true": (4, 4, 8),
}
# Peak bytes per logit of forward and backward through the head: half-precision product and its gradient, float32
# copy and log-softmax. Chunks of bf16 product and float32 copy are transient; the log-softmax of a chunk is not.
_LOGIT_PEAK, _LOGIT_TRANSIENT, _LOGIT_SAVED = 12, 6, 4


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on one GPU.

    Args:
        parameters: This GPU's share of the weights.
        gradients: Its share of the gradients.
        optimizer: Its share of AdamW's moments.
        gathered: Whole layers that sharding gathers to compute with: two at a time, one being fetched ahead.
        activations: What the layers keep for backward, and the layer being recomputed.
        logits: The head: logits, their copies and gradients, and the gradient of its weight before it is sharded.
        cache: Keys and values of sequences that decode on this GPU meanwhile.
        assumptions: How the numbers were chosen, for the reader of a table.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    cache: float
    assumptions: tuple[str, ...]

    def by_part(self) -> dict[str, float]:
        """Bytes of each part."""
        names = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "cache")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        """All of it, as if every part peaked at once: an upper estimate."""
        return sum(self.by_part().values())


def logits_bytes(
    vocabulary: int, hidden: int, tokens: int, *, head: Head = "recomputed", chunk_tokens: int = 1024
) -> float:
    """Peak bytes of forward and backward through the output head, beyond hidden states and weight.

    Args:
        vocabulary: Rows of the head.
        hidden: Width of the hidden states.
        tokens: Scored tokens of the microbatch.
        head: `full` holds all logits at once (12 bytes each); `chunked` computes them in chunks but keeps every
            chunk's log-softmax for backward (4 bytes each); `recomputed` keeps nothing but one chunk.
        chunk_tokens: Tokens of a chunk.

    Returns:
        Bytes; with chunks, the bf16 gradient of the head's weight is held beside them.

    Example:
        >>> heads = ("full", "chunked", "recomputed")
        >>> [round(logits_bytes(151_936, 1024, 16_384, head=head) / 1e9, 1) for head in heads]
        [29.9, 11.2, 2.2]
    """
    chunk = min(chunk_tokens, tokens)
    gradient = 2.0 * vocabulary * hidden
    peaks: dict[Head, Callable[[], float]] = {
        "full": lambda: float(_LOGIT_PEAK * vocabulary * tokens),
        "chunked": lambda: _LOGIT_SAVED * vocabulary * tokens + _LOGIT_TRANSIENT * vocabulary * chunk + gradient,
        "recomputed": lambda: _LOGIT_PEAK * vocabulary * chunk + gradient,
    }
    return peaks[head]()


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    checkpointing: Checkpointing = "selective",
    bytes_per_value: float = 2,
    kept_widths: float = 4,
) -> float:
    """Bytes the layers keep for backward, with an attention kernel that keeps no scores.

    Args:
        shape: The model.
        tokens: Positions of the microbatch, padding included.
        checkpointing: `none` keeps the inputs and outputs of every matrix; `selective` keeps `kept_widths` tensors
            of the model's width per layer; `full` keeps each layer's input and one layer's insides.
        bytes_per_value: Bytes of one activation.
        kept_widths: Only for `selective`: an assumption, a few by experience.

    Returns:
        Bytes.
    """
    insides = [layer.attention_fan + layer.feed_forward_fan for layer in shape.layers]
    if checkpointing == "none":
        values = float(sum(layer.count * inside for layer, inside in zip(shape.layers, insides, strict=True)))
    elif checkpointing == "selective":
        values = kept_widths * shape.hidden * shape.num_layers
    else:
        values = float(shape.hidden * shape.num_layers + max(insides))
    return tokens * values * bytes_per_value


def memory_breakdown(
    shape: ModelShape,
    tokens: int,
    *,
    shards: int = 8,
    precision: Precision = "bf16-mixed",
    checkpointing: Checkpointing = "selective",
    kept_widths: float = 4,
    head: Head = "recomputed",
    chunk_tokens: int = 1024,
    scored_share: float = 1.0,
    trainable_weights: int | None = None,
    cached_tokens: int = 0,
) -> MemoryBreakdown:
    """Per-GPU memory of training one microbatch with fully sharded weights, gradients and AdamW moments.

    Args:
        shape: The model.
        tokens: Positions of the microbatch on this GPU.
        shards: GPUs that share weights, gradients and moments; 1 for no sharding.
        precision: As in `Trainer(precision=...)`.
        checkpointing: See `activation_bytes`.
        kept_widths: See `activation_bytes`.
        head: See `logits_bytes`.
        chunk_tokens: See `logits_bytes`.
        scored_share: Share of the positions that go through the head.
        trainable_weights: Weights with gradient and moments; all of them by default, an adapter's under LoRA.
        cached_tokens: Tokens in the KV cache of an engine on the same GPU.

    Returns:
        Bytes by part, with the assumptions in words.

    Raises:
        ValueError: Tokens or shards below 1, or a share outside [0, 1].

    Example:
        >>> shape = ModelShape.from_config("qwen3-8b")
        >>> parts = memory_breakdown(shape, 32_768, head="full").by_part()
        >>> max(parts, key=parts.get), round(parts["logits"] / 1e9, 1)
        ('logits', 59.7)
    """
    if tokens < 1 or shards < 1 or not 0 <= scored_share <= 1:
        raise ValueError(
            f"need tokens >= 1, shards >= 1, scored_share in [0, 1]; got {tokens}, {shards}, {scored_share}"
        )
    weight_bytes, gradient_bytes, moment_bytes = _STATE_BYTES[precision]
    compute_bytes = 4 if precision == "32-true" else 2
    trained = shape.parameters if trainable_weights is None else trainable_weights
    largest = max(layer.parameters for layer in shape.layers)
    gathered = 2 * compute_bytes * largest if shards > 1 or precision == "bf16-mixed" else 0
    scored = max(1, round(scored_share * tokens))
    return MemoryBreakdown(
        parameters=weight_bytes * shape.parameters / shards,
        gradients=gradient_bytes * trained / shards,
        optimizer=moment_bytes * trained / shards,
        gathered=float(gathered),
        activations=activation_bytes(
            shape, tokens, checkpointing=checkpointing, bytes_per_value=compute_bytes, kept_widths=kept_widths
        ),
        logits=logits_bytes(shape.vocabulary, shape.hidden, scored, head=head, chunk_tokens=chunk_tokens),
        cache=cached_tokens * float(shape.cache_bytes_per_token()),
        assumptions=(
            f"precision {precision}: {weight_bytes} bytes per weight, {gradient_bytes} per gradient, {moment_bytes} "
            f"for AdamW, over {shards} GPUs",
            f"activations: checkpointing {checkpointing}"
            + (f", {kept_widths:g} model widths kept per layer" if checkpointing == "selective" else ""),
            f"head: {head}, {scored:,} scored tokens" + ("" if head == "full" else f", chunks of {chunk_tokens:,}"),
        ),
    )
