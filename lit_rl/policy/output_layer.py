"""Reading output layers: plain ones, adapted ones, sharded ones, and what the model does to logits afterwards."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

# Where transformers keeps what a causal LM does to the output layer's result. `logits_scaling` is a divisor in
# Granite and MiniCPM and a multiplier in HyperCLOVA X; MPT has a `logit_scale` that its model does not use.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_REAL_SIZES = ("unpadded_vocab_size",)
_UNUSED = {"mpt": ("logit_scale",)}
_INVERTED = ("hyperclovax",)


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its output layer's result.

    Attributes:
        scale: Multiplier, applied first.
        softcap: Logits become `softcap * tanh(logits / softcap)`; None leaves them alone.
        vocab_size: Size the logits are cut to; None leaves them alone.
    """

    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None

    @classmethod
    def from_config(cls, config: Any) -> LogitTransform:
        """Read the transform from a transformers configuration; of a composite one, from its text part.

        >>> from transformers import Gemma2Config, GraniteConfig
        >>> LogitTransform.from_config(GraniteConfig(logits_scaling=8.0))
        LogitTransform(scale=0.125, softcap=None, vocab_size=None)
        >>> LogitTransform.from_config(Gemma2Config())
        LogitTransform(scale=1.0, softcap=30.0, vocab_size=None)
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        kind = str(getattr(config, "model_type", ""))
        scale = 1.0
        for name in _MULTIPLIERS + _DIVISORS:
            value = getattr(config, name, None)
            if value is None or name in _UNUSED.get(kind, ()):
                continue
            divides = name in _DIVISORS and not kind.startswith(_INVERTED)
            scale = scale / float(value) if divides else scale * float(value)
        softcaps = [getattr(config, name, None) for name in _SOFTCAPS]
        sizes = [getattr(config, name, None) for name in _REAL_SIZES]
        return cls(scale, next(filter(None, softcaps), None), next(filter(None, sizes), None))


@dataclass(frozen=True)
class OutputTerms:
    """An output layer taken apart: its result is `sum_i hiddens[i] @ weights[i].T + bias`."""

    hiddens: list[Tensor]
    weights: list[Tensor]
    bias: Tensor | None


def find_output_layer(model: nn.Module) -> nn.Module:
    """The module that turns a model's hidden states into logits.

    Raises:
        TypeError: The model has neither `get_output_embeddings()` nor `lm_head`.
    """
    get = getattr(model, "get_output_embeddings", None)
    layer = get() if get is not None else getattr(model, "lm_head", None)
    if not isinstance(layer, nn.Module):
        raise TypeError(
            f"{type(model).__name__} has no output layer: expected `get_output_embeddings()` or `lm_head` to be a "
            f"module, got {type(layer).__name__}. Add one, or build `LogProbHead` from the layer itself."
        )
    return layer


def check_output_layer(layer: nn.Module) -> None:
    """Refuse an output layer that the head could not evaluate as the module does.

    Raises:
        TypeError: The layer, or what it wraps, is more than a matrix and a bias; the message names its type.
    """
    layer = _active_module(layer)
    if _is_lora(layer):
        _check_lora(layer)
        layer = layer.base_layer  # type: ignore[assignment]
    weight = getattr(layer, "weight", None)
    plain = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    plain = plain and (type(weight) in (Tensor, nn.Parameter) or is_sharded(weight))
    if not plain or not (_runs_plain_forward(layer) or _equals_its_matrix(layer)):
        raise TypeError(
            f"the output layer is a {type(layer).__module__}.{type(layer).__name__}, whose result is not that of its "
            "`weight` and `bias` alone: expected `torch.nn.Linear`, a layer that computes the same, or one adapted "
            "with PEFT's LoRA or `modules_to_save`. Merge or unwrap it, or leave the output layer out of the adapter."
        )


def read_output_layer(layer: nn.Module, hidden: Tensor) -> OutputTerms:
    """Take an output layer apart as it stands now: adapters may be switched, merged or disabled between calls.

    Args:
        layer: A layer that `check_output_layer` accepts.
        hidden: Hidden states `[M, D]`; an adapter's low-rank ones are computed from them, differentiably.
    """
    layer = _active_module(layer)
    if not _is_lora(layer):
        return OutputTerms([hidden], [gather(layer.weight)], gather_optional(getattr(layer, "bias", None)))
    adapted: Any = layer
    if adapted.disable_adapters and adapted.merged:
        adapted.unmerge()
    terms = read_output_layer(adapted.base_layer, hidden)
    if adapted.disable_adapters or adapted.merged:
        return terms
    bias = terms.bias
    for name in adapted.active_adapters:
        if name not in adapted.lora_A:
            continue
        _check_lora(layer)
        down, up, scaling = adapted.lora_A[name], adapted.lora_B[name], adapted.scaling[name]
        inner = adapted.lora_dropout[name](hidden.to(down.weight.dtype))
        terms.hiddens.append(functional.linear(inner, gather(down.weight)) * scaling)
        terms.weights.append(gather(up.weight))
        if up.bias is not None:
            bias = gather(up.bias) * scaling if bias is None else bias + gather(up.bias) * scaling
    return OutputTerms(terms.hiddens, terms.weights, bias)


def _active_module(layer: nn.Module) -> nn.Module:
    """The module that PEFT's `modules_to_save` would run; any other layer itself."""
    peft = sys.modules.get("peft.utils.other")
    while peft is not None and isinstance(layer, peft.ModulesToSaveWrapper):
        active = [] if layer.disable_adapters else layer.active_adapters
        layer = layer.modules_to_save[active[0]] if active else layer.original_module
    return layer


def _is_lora(layer: nn.Module) -> bool:
    peft = sys.modules.get("peft.tuners.lora.layer")
    return peft is not None and isinstance(layer, peft.Linear)


def _merges_its_weight(layer: nn.Module) -> bool:
    """Whether `weight` is put together from all of the layer's parameters, as PEFT does for trainable tokens."""
    peft = sys.modules.get("peft.utils.other")
    return peft is not None and isinstance(layer, peft.TrainableTokensWrapper)


def _check_lora(layer: Any) -> None:
    variants = sorted(getattr(kind, "__name__", type(kind).__name__) for kind in layer.lora_variant.values())
    if variants or layer.fan_in_fan_out:
        raise TypeError(
            f"the output layer is adapted by {type(layer).__module__}.{type(layer).__name__} with "
            f"{', '.join(variants) or 'fan_in_fan_out'}: expected plain LoRA. Leave the output "
            "layer out of the adapter's `target_modules`."
        )


def _runs_plain_forward(layer: nn.Module) -> bool:
    plain = (nn.Linear.forward, nn.Embedding.forward)
    hooked = bool(layer._forward_hooks or layer._forward_pre_hooks) and not is_sharded(layer.weight)
    return type(layer).forward in plain and "forward" not in vars(layer) and not hooked


@torch.no_grad()
def _equals_its_matrix(layer: nn.Module) -> bool:
    """Whether an unknown layer has nothing but a weight and a bias, and gives what they give, whatever the input."""
    weight: Any = layer.weight
    bias: Any = getattr(layer, "bias", None)
    # An adapter that starts as the identity would pass the comparison below.
    known = {id(weight), id(bias)}
    extra = any(id(parameter) not in known for parameter in layer.parameters()) and not _merges_its_weight(layer)
    if extra or is_sharded(weight) or weight.is_meta:
        return False
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, weight.shape[1], generator=generator).to(weight)
    tolerance = 100 * torch.finfo(weight.dtype).eps
    for size in (1.0, 100.0):
        expected = functional.linear(size * probe, weight, bias)
        try:
            found = layer(size * probe)
        except (TypeError, ValueError, RuntimeError):
            return False
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return False
        if not torch.allclose(
            found.to(expected), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        ):
            return False
    return True


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`: a shard of a larger one, as FSDP2 keeps parameters between uses."""
    return isinstance(tensor, DTensor)


class _Gather(torch.autograd.Function):
    """The whole of a sharded tensor; its gradient is averaged over the ranks and sharded again, as FSDP2 does."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        return tensor.full_tensor()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        partial = [Partial("sum")] * ctx.mesh.ndim
        total = DTensor.from_local(gradients[0] / ctx.mesh.size(), ctx.mesh, partial, run_check=False)
        return total.redistribute(ctx.mesh, ctx.placements)


def gather(tensor: Any) -> Tensor:
    """The whole of a tensor that may be sharded, differentiably; one collective call per sharded tensor.

    The gradient of a sharded tensor is the mean over the ranks of its device mesh, which is what FSDP2 gives.
    """
    return _Gather.apply(tensor) if is_sharded(tensor) else tensor


def gather_optional(tensor: Any) -> Tensor | None:
    """`gather` for a tensor that may be None."""
    return None if tensor is None else gather(tensor)
