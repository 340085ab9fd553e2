"""Read a `ModelShape` off a transformers model, built on the meta device where only a config is given.

Weights are counted on the real modules, so a new architecture needs no table of formulas here; what modules do not
say (windows, latent caches, experts per token) is read from the config. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_rl.throughput.presets import PRESETS
from lit_rl.throughput.shape import AttentionKind, LayerShape, ModelShape

_MIXER_NAMES = (
    *("self_attn", "attn", "attention", "self_attention"),
    *("linear_attn", "mamba", "mixer", "conv", "ssm", "temporal_block"),
)
# What an attention module projects its keys with, in the order in which they are looked for.
_KEY_NAMES = ("k_proj", "kv_a_proj_with_mqa", "qkv_proj", "query_key_value", "Wqkv", "c_attn", "kv_proj", "q_proj")


def shape_from_config(config: Any | Mapping[str, Any] | str | Path) -> ModelShape:
    """The shape of the causal LM that a transformers config describes.

    Args:
        config: A config object, its dictionary (with `model_type`), a local model folder or `config.json`, or the
            name of a built-in shape (`PRESETS`).

    Returns:
        The shape, with notes on what the formulas leave out.

    Raises:
        FileNotFoundError: A path or name that is neither there nor built in.
        ValueError: transformers cannot build a causal LM from this config, or it has no layers that are recognized.

    Example:
        >>> shape = shape_from_config("qwen3-8b")
        >>> shape.parameters, shape.cache_bytes_per_token()
        (8190735360, 147456)
    """
    import torch
    from transformers import AutoModelForCausalLM

    config, name = resolve_config(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return replace(shape_from_module(model), name=name)
    except Exception as error:
        # Whatever a config of another library raises when it is built: the way out is the same.
        raise ValueError(
            f"no shape can be read from the config of {name!r} ({type(error).__name__}: {error}); build the model "
            "yourself and use `ModelShape.from_module(model)`, or give its dimensions to `ModelShape.decoder(...)`"
        ) from error


def resolve_config(config: Any) -> tuple[Any, str]:
    """The transformers config behind whatever was given, and a name for tables; see `shape_from_config`."""
    from transformers import AutoConfig

    name = ""
    if isinstance(config, str | Path):
        name = str(config)
        config = PRESETS[name] if name in PRESETS else _read_json(Path(config))
        name = Path(name).parent.name if name.endswith("config.json") else Path(name).name
    if isinstance(config, Mapping):
        fields = dict(config)
        if "model_type" not in fields:
            raise ValueError("the config has no `model_type`, so its layers are unknown; add it, for example 'llama'")
        kind = fields.pop("model_type")
        try:
            config = AutoConfig.for_model(kind, **fields)
        except Exception as error:
            raise ValueError(
                f"transformers does not accept this {kind!r} config ({type(error).__name__}: {error}); correct it, or "
                "give the model's dimensions to `ModelShape.decoder(...)`"
            ) from error
    config = config.get_text_config(decoder=True)
    return config, name or config.model_type


def _read_json(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"no config at {str(path)!r}: give a local model folder, a config.json, or one of {', '.join(PRESETS)} "
            "(nothing is downloaded)"
        )
    try:
        fields = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON ({error}); it must hold a transformers config") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{str(file)!r} holds a JSON {type(fields).__name__}; a transformers config is an object")
    return fields


def shape_from_module(model: nn.Module, config: Any | None = None) -> ModelShape:
    """The shape of a causal LM that is already built, on any device.

    Args:
        model: A transformers causal LM, or a module like one: a list of layers, an output head.
        config: Its config; `model.config` by default.

    Returns:
        The shape. Every parameter is counted where it is used; one that several layers share is stored once.

    Raises:
        ValueError: The module has no `config`, no list of `num_hidden_layers` layers, or no output head.
    """
    config = config if config is not None else getattr(model, "config", None)
    if config is None:
        raise ValueError(f"{type(model).__name__} has no `config`: give one, or use `ModelShape.decoder(...)`")
    path, layers = _layer_list(model, config.num_hidden_layers)
    kinds = Counter(_layer_shape(layer, config, index) for index, layer in enumerate(layers))
    outside = {name: value for name, value in model.named_parameters() if not name.startswith(path + ".")}
    head, table = _head_weight(model), _table_weight(model)
    lookups = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    rest = [value for value in outside.values() if id(value) not in lookups and value is not head]
    shape = ModelShape(
        name=str(getattr(config, "model_type", type(model).__name__)),
        hidden=config.hidden_size,
        vocabulary=head.shape[0],
        layers=tuple(replace(layer, count=count) for layer, count in kinds.items()),
        embedding_weights=sum(value.numel() for value in outside.values() if id(value) in lookups),
        head_weights=head.numel(),
        tied=head is table,
        other_weights=sum(value.numel() for value in rest if value.ndim >= 2),
        small_weights=sum(value.numel() for value in rest if value.ndim < 2),
        notes=_notes(kinds, config),
    )
    stored = sum(value.numel() for value in model.parameters())
    return replace(shape, shared_weights=shape.parameters - stored)


def _layer_list(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ValueError(f"{type(model).__name__} has no nn.ModuleList of {count} layers; use `ModelShape.decoder(...)`")


def _head_weight(model: nn.Module) -> Tensor:
    get = getattr(model, "get_output_embeddings", None)
    layer = get() if get is not None else getattr(model, "lm_head", None)
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{type(model).__name__} has neither get_output_embeddings() nor lm_head with a weight")
    return weight


def _table_weight(model: nn.Module) -> Tensor | None:
    get = getattr(model, "get_input_embeddings", None)
    return None if get is None else getattr(get(), "weight", None)


def _notes(kinds: Counter[LayerShape], config: Any) -> tuple[str, ...]:
    notes = []
    linear = sum(count for layer, count in kinds.items() if layer.attention == "none")
    if linear:
        notes.append(f"{linear} layers without softmax attention: their scan and their fixed state are not counted")
    if getattr(config, "kv_lora_rank", None):
        notes.append("latent attention: the cache holds the latent and the rotary key, as inference engines keep it")
    return tuple(notes)


def _layer_shape(layer: nn.Module, config: Any, index: int) -> LayerShape:
    """Count one layer's weights by where they are used, and read its attention geometry."""
    experts = int(_first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0)
    counts: Counter[str] = Counter()
    for name, weight in layer.named_parameters():
        parts = name.split(".")
        # Convolutions and state matrices have a second dimension but are applied entry by entry.
        entrywise = parts[-1] in ("A_log", "D") or any(part.startswith("conv1d") for part in parts)
        matrix = weight.ndim >= 2 and "bias" not in parts[-1] and not entrywise
        fan = int(weight.shape[-1] + weight.shape[-2]) if matrix else 0
        # Stacked experts need not be called so: [experts, out, in].
        stacked = experts > 1 and weight.ndim == 3 and weight.shape[0] == experts and not entrywise
        if stacked or ("experts" in parts and "router" not in parts):
            counts["expert_weights" if matrix else "expert_small_weights"] += _one_expert(parts, weight, experts)
            counts["expert_fan"] += fan if _one_expert(parts, weight, experts) else 0
        elif not matrix:
            counts["small_weights"] += weight.numel()
        else:
            part = "attention" if parts[0] in _MIXER_NAMES else "feed_forward"
            counts[f"{part}_weights"] += weight.numel()
            counts[f"{part}_fan"] += fan
    routed = _experts_per_token(config) if counts["expert_weights"] else 0
    counts["feed_forward_fan"] += routed * counts.pop("expert_fan", 0)
    fields: dict[str, Any] = {**counts, **_geometry(layer, config, index)}
    return LayerShape(experts=experts if routed else 0, experts_per_token=routed, **fields)


def _one_expert(parts: list[str], weight: Tensor, experts: int) -> int:
    """Entries of one expert: its share of a stacked tensor, or the first of a list of equal experts."""
    following = parts[parts.index("experts") + 1 :] if "experts" in parts else []
    if following and following[0].isdigit():
        return weight.numel() if following[0] == "0" else 0
    return weight.numel() // experts


def _experts_per_token(config: Any) -> int:
    routed = _first(config, "num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
    if not routed:
        raise ValueError("the model has routed experts but its config does not say `num_experts_per_tok`; set it")
    return int(routed)


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value[0] if isinstance(value, list | tuple) else value
    return None


def _geometry(layer: nn.Module, config: Any, index: int) -> dict[str, Any]:
    """Heads, widths, window and cached numbers of one layer's attention."""
    module = next((m for name in _KEY_NAMES for m in layer.modules() if hasattr(m, name)), None)
    kind, window = _attention_kind(layer, config, index)
    if kind == "none" or module is None:
        return {"attention": "none"}
    heads = _first(config, "num_attention_heads", "n_heads", "n_head")
    width = _first(module, "qk_head_dim", "head_dim") or _first(config, "head_dim") or config.hidden_size // heads
    value_width = _first(module, "v_head_dim") or _first(config, "v_head_dim") or width
    geometry: dict[str, Any] = {"attention": kind, "window": window, "query_heads": heads}
    latent = getattr(config, "kv_lora_rank", None)
    cached = latent + config.qk_rope_head_dim if latent else _cached(module, config, width, value_width)
    return geometry | {"score_width": width, "value_width": value_width, "cached_values": cached}


def _cached(module: nn.Module, config: Any, width: int, value_width: int) -> int:
    """Keys and values of one token, from the projections where they stand apart."""
    key = getattr(getattr(module, "k_proj", None), "weight", None)
    if key is not None:
        value = getattr(getattr(module, "v_proj", None), "weight", key)
        return int(key.shape[0] + value.shape[0])
    if getattr(config, "num_kv_shared_layers", 0):
        return 0  # reads the cache of an earlier layer
    heads = _first(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads", "n_heads", "n_head")
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        heads = 1
    return int(heads * (width + value_width))


def _attention_kind(layer: nn.Module, config: Any, index: int) -> tuple[AttentionKind, int | None]:
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    window = _first(config, "sliding_window", "attention_window_size")
    kind = types[index] if types else "sliding" if getattr(config, "use_sliding_window", True) else "full"
    if kind == "local":  # GPT-Neo's name for it
        return "sliding", config.window_size
    if "chunked" in kind:
        return "chunked", config.attention_chunk_size
    # A layer may run a state-space mixer beside its attention.
    mixers = [name for name, _ in layer.named_children() if name in _MIXER_NAMES]
    if any(word in kind for word in ("linear", "mamba", "conv", "recurrent")) and len(mixers) < 2:
        return "none", None
    return ("sliding", window) if "sliding" in kind and window else ("full", None)
