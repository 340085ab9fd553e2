"""The frozen policy that a KL term holds the trained one to."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_rl.data.batch import PackedBatch
from lit_rl.policy.backbone import load_causal_lm
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.policy.probe import vocabulary_of


def build_reference(policy: CausalLMPolicy, source: str | nn.Module | None, **arguments: Any) -> CausalLMPolicy | None:
    """Makes the reference of a policy that has not been trained yet.

    Args:
        policy: The policy that will be trained.
        source: A path for `AutoModelForCausalLM.from_pretrained`, a module, or `None`: the policy as it is now.
        arguments: Of `CausalLMPolicy`.

    Returns:
        A frozen policy. `None` where the policy is a base model under PEFT adapters and no other was given: with the
        adapters switched off it is its own reference and nothing has to be copied.

    Raises:
        ValueError: `source` is the trained model itself.
    """
    if source is None and hasattr(policy.model, "disable_adapter"):
        return None
    if source is policy.model:
        raise ValueError("`reference` is the model that is trained; give a copy, or leave it away: then one is made")
    if source is not None and not isinstance(source, (str, nn.Module)):
        raise TypeError(f"`reference` must be a path or a torch module, got {type(source).__name__}")
    if isinstance(source, (CausalLMPolicy, LightningModule)):
        raise TypeError(f"`reference` is a {type(source).__name__}; give the model inside it")
    if isinstance(source, str):
        network: nn.Module = load_causal_lm(source, "reference")
    else:
        network = copy.deepcopy(policy.model) if source is None else source
    return CausalLMPolicy(network.requires_grad_(False), **arguments)


def match_layout(policy: CausalLMPolicy, reference: CausalLMPolicy | None) -> None:
    """Settles how the reference keeps segments apart, in the layout that the policy is trained in.

    Args:
        policy: With its layout resolved.
        reference: Its reference, if it has one of its own.

    Raises:
        ValueError: The policy is packed and the reference cannot be; or their vocabularies differ.
    """
    if reference is None:
        return
    sizes = [vocabulary_of(each) for each in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the reference has {sizes[1]} token ids, the policy {sizes[0]}: they must share a vocabulary")
    reference.requested_layout = policy.layout
    try:
        reference.resolve_layout()
    except ValueError as error:
        raise ValueError(f"the reference cannot follow the policy: {error} (on the `PolicyModule`)") from error


@torch.no_grad()
def score_reference(policy: CausalLMPolicy, reference: CausalLMPolicy | None, batch: PackedBatch) -> Tensor:
    """Log-probabilities of the scored tokens under the reference.

    Args:
        policy: The trained policy; with its adapters off it is the reference where there is no other.
        reference: The reference, or `None`.
        batch: The microbatch.

    Returns:
        [M] in nats, without gradient.
    """
    if reference is not None:
        return reference(batch).log_probs
    with _adapters_off(policy.model):
        return policy(batch).log_probs


@contextmanager
def _adapters_off(model: Any) -> Iterator[None]:
    """PEFT's own context, without its changes to `requires_grad`, which FSDP2 would remember from its first forward."""
    flags = {parameter: parameter.requires_grad for parameter in model.parameters()}

    def restore() -> None:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)

    try:
        with model.disable_adapter():
            restore()
            yield
    finally:
        restore()
