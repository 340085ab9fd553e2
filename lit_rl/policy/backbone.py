"""The parts of a causal LM: what is inside a PEFT wrapper, what computes the hidden states, what its forward takes."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel


def base_model_of(model: nn.Module) -> nn.Module:
    """The model inside a PEFT wrapper; adapters are layers inside it, so nothing is lost by going around."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if inner is not model:
        for name, config in getattr(model, "peft_config", {}).items():
            if getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"adapter {name!r} is prompt learning ({type(config).__name__}): it adds virtual tokens that "
                    "trajectories do not have; use adapters on layers, such as LoRA"
                )
    return inner


def backbone_of(model: nn.Module) -> nn.Module:
    """What computes the last hidden states of a transformers causal LM; the module itself for the user's own."""
    base = base_model_of(model)
    if not isinstance(base, PreTrainedModel):
        return base
    backbone = base.base_model
    if backbone is base:  # Some prefixes name another attribute than the backbone has.
        backbone = getattr(base, "model", base)
    if backbone is base:
        raise TypeError(
            f"{type(base).__name__} has no backbone under `base_model`; pass a causal LM "
            "(`AutoModelForCausalLM`), not a bare model"
        )
    return backbone


def hidden_of(output: Any) -> Tensor:
    """The last hidden states [R, L, D] in whatever a backbone returns."""
    if isinstance(output, Tensor):
        return output
    hidden = getattr(output, "last_hidden_state", None)
    return output[0] if hidden is None else hidden


def accepted_names(module: nn.Module, *names: str) -> list[str]:
    """Those of the names that a module's forward takes."""
    parameters = inspect.signature(module.forward).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [name for name in names if takes_all or name in parameters]


def load_causal_lm(path: str, argument: str) -> nn.Module:
    """A transformers causal LM from a folder or hub id, with an error that says which argument named it.

    Args:
        path: For `AutoModelForCausalLM.from_pretrained`.
        argument: Name of the argument that held it.

    Returns:
        The model.

    Raises:
        ValueError: There is no such model, or it is no causal LM.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"`{argument}`={path!r} could not be loaded; give a folder that `save_pretrained` wrote, or the hub id of "
            f"a causal language model ({reason})"
        ) from error


def mention_extra_losses(model: nn.Module) -> None:
    """Says which loss of the model's own is left out of the objective."""
    config = getattr(base_model_of(model), "config", None)
    if getattr(config, "output_router_logits", False):
        rank_zero_warn("the model asks for a router loss (`output_router_logits`): it is not part of the objective")
    elif getattr(config, "router_aux_loss_coef", 0):
        rank_zero_info("the model's router loss (`router_aux_loss_coef`) is not part of the objective")
