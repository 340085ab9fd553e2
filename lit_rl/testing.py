"""Tiny models and the slow oracle: one trajectory at a time, no packing, no chunks, float64."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from lit_rl.trajectory import Trajectory

# The names under which different configurations ask for the same thing; those that one lacks are left out.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "moe_intermediate_size"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT = {"num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
_LATENT |= {"v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_key_head_dim": 8}
_HYBRID |= {"linear_num_value_heads": 2, "linear_value_head_dim": 8}
# What single architectures need on top to be tiny at all, or to show what is special about them.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "head_dim": 4},
    "falcon": {"head_dim": None, "num_kv_heads": 1},
    "falcon_h1": _MAMBA2,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4, "head_dim": None},
    "gemma2": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 4},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2, "mamba_d_state": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 4, "intermediate_size_mlp": 32, "layer_types": None},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "ministral": {"sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_text": {**_HYBRID, "num_key_value_heads": 2},
    "qwen3_next": {**_HYBRID, "num_key_value_heads": 2},
    "starcoder2": {"sliding_window": 4},
}


def tiny_config(architecture: str = "qwen3", **overrides: Any) -> PretrainedConfig:
    """The configuration of a real transformers architecture, made tiny.

    Args:
        architecture: A transformers `model_type`, such as "qwen3", "gemma2", "mamba".
        overrides: Fields of the configuration; `vocab_size` is 32 unless given.

    Returns:
        2 layers, width 16, 2 heads of size 8 sharing one key-value head, room for 64 positions, and weights large
        enough that every mistake shows in the log-probabilities.

    Example:
        >>> config = tiny_config("llama", vocab_size=50)
        >>> config.hidden_size, config.num_hidden_layers, config.vocab_size
        (16, 2, 50)
    """
    if architecture not in CONFIG_MAPPING:
        raise ValueError(f"`architecture` is {architecture!r}; expected a transformers model type such as 'qwen3'")
    kind = CONFIG_MAPPING[architecture]
    default = kind()
    sizes = {"vocab_size": 32, **{name: value for name, value in _SIZES.items() if _has(default, name)}}
    special = {**_SPECIAL.get(architecture, {}), **overrides}
    return kind(**{name: value for name, value in {**sizes, **special}.items() if value is not None})


def tiny_policy_model(
    architecture: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> nn.Module:
    """A real transformers causal LM with random weights, made tiny; see `tiny_config`.

    Args:
        architecture: A transformers `model_type`.
        seed: Of the weights; the global random state is left as it is.
        dtype: Of the weights.
        overrides: Fields of the configuration.

    Returns:
        The model, in evaluation mode.

    Example:
        >>> model = tiny_policy_model("gpt2")
        >>> sum(parameter.numel() for parameter in model.parameters()) < 20_000
        True
    """
    config = tiny_config(architecture, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return _to_dtype(model, dtype).eval()


def oracle_log_probs(model: nn.Module, trajectory: Trajectory) -> Tensor:
    """What every packed, chunked, sharded computation has to agree with.

    Args:
        model: A transformers causal LM, or any module whose output has `logits` [1, L, vocabulary] or is them. A
            float64 copy is made of it; a wrapped one should be given before it is sharded.
        trajectory: L tokens.

    Returns:
        float64 [L] log-probabilities in nats at the trajectory's temperature, with gradient to the copy only; entry
        `i` is about token `i`, entry 0 is 0.

    Example:
        >>> log_probs = oracle_log_probs(tiny_policy_model(), Trajectory([5, 6, 7], [0, 1, 1], 1.0))
        >>> log_probs.shape, float(log_probs[0]), bool((log_probs[1:] < 0).all())
        (torch.Size([3]), 0.0, True)
    """
    return _log_probs(_oracle_model(model), trajectory)


def oracle_gradient(
    model: nn.Module,
    trajectories: Sequence[Trajectory],
    loss: Callable[[Tensor, int], Tensor],
) -> dict[str, Tensor]:
    """The gradient of a sum over trajectories, one trajectory at a time.

    Args:
        model: As in `oracle_log_probs`.
        trajectories: Any number of them.
        loss: Maps the log-probabilities of a trajectory's scored tokens (float64 [m], nats) and its index to a
            scalar; the weights of the step belong in it.

    Returns:
        float64 gradient by parameter name; parameters that got none are left out.

    Example:
        >>> trajectory = Trajectory([5, 6, 7], [0, 1, 1], 1.0)
        >>> gradient = oracle_gradient(tiny_policy_model(), [trajectory], lambda log_probs, _: -log_probs.sum())
        >>> gradient["model.embed_tokens.weight"].dtype
        torch.float64
    """
    reference = _oracle_model(model)
    for index, trajectory in enumerate(trajectories):
        log_probs = _log_probs(reference, trajectory)[trajectory.scored]
        if log_probs.numel():
            loss(log_probs, index).backward()
    return {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


def _oracle_model(model: nn.Module) -> nn.Module:
    from lit_rl.policy.attention import detach_segment_attention

    reference = _to_dtype(copy.deepcopy(model), torch.float64).eval()
    reference.zero_grad(set_to_none=True)
    detach_segment_attention(reference)
    return reference


def _log_probs(reference: nn.Module, trajectory: Trajectory) -> Tensor:
    device = next(reference.parameters()).device
    ids = trajectory.token_ids.to(device)
    has_cache = "use_cache" in inspect.signature(reference.forward).parameters
    output = reference(ids[None], **({"use_cache": False} if has_cache else {}))
    logits = getattr(output, "logits", output)[0, :-1]
    temperature = trajectory.temperature.to(device, torch.float64)[1:, None]
    scores = torch.log_softmax(logits.double() / temperature, dim=-1)
    return torch.cat([scores.new_zeros(1), scores.gather(1, ids[1:, None])[:, 0]])


def _to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # type: ignore[operator]  # The grouped product of experts has no float64.
    return model.to(dtype)


def _has(config: PretrainedConfig, name: str) -> bool:
    """Some configurations refuse to be asked for attributes that differ from layer to layer."""
    try:
        return hasattr(config, name)
    except Exception:
        return False
