"""The shape of a decoder: which weights it multiplies, looks up and caches. Pure numbers, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

AttentionKind = Literal["full", "sliding", "chunked", "none"]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One kind of decoder layer, and how many layers of the model are of that kind.

    "Weights" are entries of matrices that a token is multiplied with; biases and norms are `small_weights`.

    Args:
        count: Layers of this kind.
        attention: Which earlier tokens a token attends to: all of them, the last `window`, those in its own
            chunk of `window`, or none (linear attention and state-space layers, whose scan is not counted).
        window: Tokens in the window or chunk; required for "sliding" and "chunked".
        attention_weights: Matrices of attention (or of the mixer that replaces it).
        feed_forward_weights: Matrices of the feed-forward part that every token meets: a dense network, shared
            experts, the router.
        expert_weights: Matrices of one routed expert.
        expert_small_weights: Biases of one routed expert.
        experts: Routed experts, 0 for a dense layer.
        experts_per_token: How many of them one token is sent to.
        small_weights: Norms, biases and convolutions: stored, never counted as multiplied.
        query_heads: Query heads.
        score_width: Width of one head's query and key.
        value_width: Width of one head's value.
        cached_values: Numbers that one token leaves in the cache: keys plus values, or the latent of multi-head
            latent attention; 0 where a layer reads another layer's cache, a fraction where a cache is scaled.
        attention_fan: Sum of inputs and outputs of the attention matrices: what a rank-1 adapter on each costs.
        feed_forward_fan: The same for the feed-forward matrices that one token meets.
    """

    count: int = 1
    attention: AttentionKind = "full"
    window: int | None = None
    attention_weights: int = 0
    feed_forward_weights: int = 0
    expert_weights: int = 0
    expert_small_weights: int = 0
    experts: int = 0
    experts_per_token: int = 0
    small_weights: int = 0
    query_heads: int = 0
    score_width: int = 0
    value_width: int = 0
    cached_values: float = 0
    attention_fan: int = 0
    feed_forward_fan: int = 0

    def __post_init__(self) -> None:
        if self.attention in ("sliding", "chunked") and not self.window:
            raise ValueError(f"a layer with {self.attention} attention needs `window` > 0, got {self.window}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"`experts_per_token` is {self.experts_per_token} but there are {self.experts} experts")

    @property
    def parameters(self) -> int:
        """Parameters of one layer, idle experts included."""
        experts = self.experts * (self.expert_weights + self.expert_small_weights)
        return self.attention_weights + self.feed_forward_weights + self.small_weights + experts

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts of one layer that a token is not sent to."""
        return (self.experts - self.experts_per_token) * (self.expert_weights + self.expert_small_weights)

    @property
    def multiplied_weights(self) -> int:
        """Weights of one layer that one token is multiplied with."""
        return self.attention_weights + self.feed_forward_weights + self.experts_per_token * self.expert_weights

    def attended(self, length: int) -> int:
        """Tokens a new token at context `length` attends to, and hence cached tokens that are kept and read."""
        if self.attention == "none":
            return 0
        return length if self.window is None else min(length, self.window)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the throughput formulas need to know of a model.

    Args:
        name: For tables.
        hidden: Width of the residual stream.
        vocabulary: Rows of the output head.
        layers: The layers, grouped by kind.
        embedding_weights: Tables that are looked up (token and learned position embeddings), never multiplied.
        head_weights: Weights of the output head, counted whether or not the head shares them with the embedding.
        tied: Whether the head is the embedding table; it is then stored once.
        other_weights: Matrices outside the layers and the head that every token meets.
        small_weights: Norms and biases outside the layers.
        shared_weights: Weights that several layers use and that are stored once: counted as multiplied each time.
        notes: What the shape leaves out, for the reader of a table.

    Example:
        >>> shape = ModelShape.decoder(hidden=4096, layers=32, vocabulary=32000, feed_forward=11008,
        ...                            query_heads=32, key_value_heads=8, head_width=128)
        >>> shape.cache_bytes_per_token()
        131072
    """

    name: str
    hidden: int
    vocabulary: int
    layers: tuple[LayerShape, ...]
    embedding_weights: int
    head_weights: int
    tied: bool
    other_weights: int = 0
    small_weights: int = 0
    shared_weights: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(layer.count for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters, a tied table once: what `sum(p.numel() for p in model.parameters())` says."""
        body = sum(layer.count * layer.parameters for layer in self.layers)
        head = 0 if self.tied else self.head_weights
        return body + self.embedding_weights + head + self.other_weights + self.small_weights - self.shared_weights

    @property
    def active_parameters(self) -> int:
        """Parameters without the experts that a token is not sent to; embedding tables count."""
        return self.parameters - sum(layer.count * layer.idle_parameters for layer in self.layers)

    @property
    def body_weights(self) -> int:
        """Weights that every token is multiplied with before the head."""
        return self.other_weights + sum(layer.count * layer.multiplied_weights for layer in self.layers)

    @property
    def multiplied_weights(self) -> int:
        """Weights that a scored token is multiplied with: the body and the head, no look-up table, no idle expert."""
        return self.body_weights + self.head_weights

    def cache_bytes(self, context: int, *, bytes_per_value: float = 2) -> float:
        """Bytes one sequence of `context` tokens keeps in the cache; windows stop growing at their width."""
        values = sum(layer.count * layer.cached_values * layer.attended(context) for layer in self.layers)
        return values * bytes_per_value

    def cache_bytes_per_token(self, *, bytes_per_value: float = 2) -> int:
        """Bytes one more token adds to the cache while no window is full: 2 x layers x KV heads x head width x bytes.

        With multi-head latent attention it is the latent and the shared rotary key that are cached.
        """
        return int(self.cache_bytes(1, bytes_per_value=bytes_per_value))

    def adapter_weights(self, rank: int, *, targets: Literal["attention", "all"] = "attention") -> int:
        """Weights of low-rank adapters of `rank` on the matrices of attention, or of every layer matrix.

        A rank-r adapter on a matrix of `in` x `out` has r x (in + out) weights; routed experts count as met by
        one token.
        """
        fans = sum(
            layer.count * (layer.attention_fan + (layer.feed_forward_fan if targets == "all" else 0))
            for layer in self.layers
        )
        return rank * fans

    def with_cache_scaled(self, scale: float) -> ModelShape:
        """The same model with a cache of `scale` times the size: fewer KV heads, or fewer bits per value."""
        layers = tuple(replace(layer, cached_values=layer.cached_values * scale) for layer in self.layers)
        return replace(self, layers=layers)

    @classmethod
    def decoder(
        cls,
        *,
        hidden: int,
        layers: int,
        vocabulary: int,
        feed_forward: int,
        query_heads: int,
        head_width: int | None = None,
        key_value_heads: int | None = None,
        experts: int = 0,
        experts_per_token: int = 0,
        window: int | None = None,
        gated: bool = True,
        tied: bool = False,
        name: str = "decoder",
    ) -> ModelShape:
        """A shape from its dimensions alone, matrices only: no norms, biases or router.

        Args:
            hidden: Width of the residual stream.
            layers: Number of layers, all equal.
            vocabulary: Rows of the head and of the embedding table.
            feed_forward: Inner width of the feed-forward network, or of one expert.
            query_heads: Query heads.
            head_width: Width of one head; `hidden / query_heads` by default.
            key_value_heads: Key and value heads; as many as query heads by default.
            experts: Routed experts per layer, 0 for a dense model.
            experts_per_token: How many of them one token is sent to.
            window: Sliding window in tokens, on every layer.
            gated: Three feed-forward matrices (SwiGLU and the like) instead of two.
            tied: The head is the embedding table.
            name: For tables.

        Example:
            >>> moe = ModelShape.decoder(hidden=64, layers=2, vocabulary=1000, feed_forward=256, query_heads=4,
            ...                          experts=8, experts_per_token=2, tied=True)
            >>> moe.multiplied_weights, moe.parameters
            (293376, 883200)
        """
        width = head_width or hidden // query_heads
        key_value_heads = key_value_heads or query_heads
        feed = (3 if gated else 2) * hidden * feed_forward
        feed_fan = (3 if gated else 2) * (hidden + feed_forward)
        layer = LayerShape(
            count=layers,
            attention="sliding" if window else "full",
            window=window,
            attention_weights=2 * hidden * width * (query_heads + key_value_heads),
            feed_forward_weights=0 if experts else feed,
            expert_weights=feed if experts else 0,
            experts=experts,
            experts_per_token=experts_per_token,
            query_heads=query_heads,
            score_width=width,
            value_width=width,
            cached_values=2 * key_value_heads * width,
            attention_fan=4 * hidden + 2 * width * (query_heads + key_value_heads),
            feed_forward_fan=feed_fan * max(experts_per_token, 1),
        )
        table = vocabulary * hidden
        return cls(
            name=name,
            hidden=hidden,
            vocabulary=vocabulary,
            layers=(layer,),
            embedding_weights=table,
            head_weights=table,
            tied=tied,
        )

    @classmethod
    def from_config(cls, config: Any | Mapping[str, Any] | str | Path) -> ModelShape:
        """The shape of the model that a transformers config describes; see `reading.shape_from_config`.

        Args:
            config: A transformers config, its dictionary (with `model_type`), a local folder or `config.json`, or
                the name of a built-in shape such as "qwen3-8b".
        """
        from lit_rl.throughput.reading import shape_from_config

        return shape_from_config(config)

    @classmethod
    def from_module(cls, model: nn.Module, config: Any | None = None) -> ModelShape:
        """The shape of a transformers causal LM that is already built; see `reading.shape_from_module`."""
        from lit_rl.throughput.reading import shape_from_module

        return shape_from_module(model, config)
