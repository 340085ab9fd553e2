"""The policy: a causal language model that turns microbatches into log-probabilities of their scored tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.data.batch import Layout, PackedBatch
from lit_rl.policy.attention import (
    Segments,
    attach_segment_attention,
    detach_segment_attention,
    own_attention,
    packed_forward,
)
from lit_rl.policy.dropout import switch_off_dropout
from lit_rl.policy.head import LogProbHead, TokenLogProbs
from lit_rl.policy.isolation import measure_isolation

# How segments are kept apart: by segment attention, by the mask that transformers builds from restarted positions,
# by the user's own module from `segment_ids`, or by giving each its own row.
Attention = Literal["segments", "own_mask", "segment_ids", "padded"]
_NEEDED = ("input_ids", "position_ids", "segment_ids", "segment_starts", "segment_lengths", "scored", "predictors")


class CausalLMPolicy(nn.Module):
    """A causal language model behind one `forward`, packed only where isolation is proved on the model itself.

    A segment's log-probabilities and gradients are those of the trajectory alone, or the model is not packed. Which
    it is gets decided once, on the first call or by `resolve_layout`, by running a few short random segments: packed
    and alone, and again with one segment's tokens replaced. Tried in turn: attention per segment (see
    `lit_rl.policy.attention`), the model's own attention under the block-diagonal mask that transformers builds from
    restarted positions, and rows of one segment with padding on the right.

    Dropout and router jitter are switched off at construction, on the modules and in the configuration: with them,
    the ratio to the sampler would be noise. Extra losses of a model, such as a router's balance loss, are not part of
    the objective. Only the hidden states that predict a scored token reach the head. Everything runs inside
    `forward`, so hooks of DDP and FSDP2 on the policy see every use of a parameter.

    Args:
        model: A transformers causal LM, possibly wrapped by PEFT, or your own module with
            `forward(input_ids [R, L], position_ids [R, L]) -> hidden [R, L, D]` and an output layer (`lm_head` or
            `get_output_embeddings()`). If its forward takes `segment_ids` [R, L] (-1 = padding) it may be packed.
        chunk_tokens: Scored tokens whose logits exist at a time; `None` lets the head choose.
        layout: "packed" insists on packing, "padded" never packs, "auto" packs where isolation is proved and says
            why where it is not.
        vocab_size: Size of the real vocabulary where the output layer has more rows; `None` uses all of them.

    Raises:
        TypeError: `model` is no module, or one without the pieces named above.
        ValueError: `layout` is not one of the three, or a prompt-learning adapter is on the model.

    Example:
        >>> from lit_rl.testing import tiny_policy_model
        >>> from lit_rl import Trajectory, collate
        >>> policy = CausalLMPolicy(tiny_policy_model())
        >>> pair = [Trajectory([5, 6, 7], [0, 1, 1], 1.0), Trajectory([8, 9], [0, 1], 0.0)]
        >>> policy(collate(pair)).log_probs.shape, policy.layout, policy.attention
        (torch.Size([3]), 'packed', 'segments')
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk_tokens: int | None = None,
        layout: Literal["auto", "packed", "padded"] = "auto",
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch module, got {type(model).__name__}")
        if layout not in ("auto", "packed", "padded"):
            raise ValueError(f'`layout` must be "auto", "packed" or "padded", got {layout!r}')
        self.model = model
        self.requested_layout = layout
        self._attention: Attention | None = None
        # Not a submodule: its parameters are the model's, and state dicts must not list them twice.
        head = LogProbHead.from_model(model, chunk_tokens=chunk_tokens, vocab_size=vocab_size)
        self.__dict__["head"] = head
        _backbone(model)
        switch_off_dropout(model)
        _mention_extra_losses(model)

    head: LogProbHead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Settles the layout before the first forward pass, outside of any hook of it."""
        if self._attention is None:
            self.resolve_layout()
        return super().__call__(*args, **kwargs)

    def forward(
        self, batch: PackedBatch, *, entropy: bool = False, output: Literal["log_probs", "model_logits"] = "log_probs"
    ) -> Any:
        """Log-probabilities of the scored tokens of one microbatch.

        Args:
            batch: The microbatch, on the model's device.
            entropy: Also returns the entropy of each scored token's distribution, in nats.
            output: "model_logits" returns what the model itself computes, [M, vocabulary], for checks on a
                microbatch in the padded layout.

        Returns:
            `TokenLogProbs` with M entries in the order of `batch.scored`.

        Raises:
            TypeError: `batch` is not a `PackedBatch`; the message names the first field that is missing.
            ValueError: A packed batch was given to a policy that is not packed.
        """
        _check_batch(batch)
        if output == "model_logits":
            return self._model_logits(batch)
        hidden = self.hidden_states(batch).flatten(0, 1).index_select(0, batch.predictors)
        return self.head(hidden, batch.targets, temperature=batch.temperature, entropy=entropy)

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """The last hidden states of one microbatch, what the output layer is applied to.

        Args:
            batch: The microbatch, on the model's device.

        Returns:
            [R, L, D]; at padding positions finite numbers without meaning.
        """
        rows = batch.input_ids.shape[0]
        if self.attention == "padded" and batch.segment_starts.numel() > rows:
            raise ValueError(
                f"the batch packs {batch.segment_starts.numel()} segments into {rows} rows, but this policy keeps "
                'segments apart by rows; collate with layout="padded" (`policy.layout` says which)'
            )
        if not isinstance(_base_model(self.model), PreTrainedModel):
            return self._own_module_hidden(batch)
        if batch.layout == "padded" or self.attention == "padded":
            return _hidden(self._call_backbone(input_ids=batch.input_ids))
        width = batch.input_ids.shape[1]
        starts, lengths = batch.segment_starts.tolist(), batch.segment_lengths.tolist()
        segments = Segments.from_rows(starts, lengths, rows=rows, width=width, device=batch.input_ids.device)
        context = packed_forward(segments) if self.attention == "segments" else nullcontext()
        row_index = torch.repeat_interleave(
            torch.arange(len(segments.lengths), dtype=torch.int32), torch.tensor(segments.lengths)
        )
        with context:
            output = self._call_backbone(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                seq_idx=row_index.view(rows, width).to(batch.input_ids.device),
                **segments.keyword_arguments,
            )
        return _hidden(output)

    @property
    def attention(self) -> Attention:
        """How segments are kept apart; settles it on the first question."""
        if self._attention is None:
            self.resolve_layout()
        assert self._attention is not None
        return self._attention

    @property
    def layout(self) -> Layout:
        """How microbatches for this policy are collated."""
        return "padded" if self.attention == "padded" else "packed"

    def resolve_layout(self) -> Layout:
        """Decides how segments are kept apart, by measuring isolation on the model; later calls only return it.

        Returns:
            "packed" or "padded".

        Raises:
            ValueError: `layout="packed"` was asked for and segments see each other; the message names the first
                module whose output changed. Or not even padded rows are isolated: the model is not causal.
        """
        if self._attention is not None:
            return self.layout
        reasons: list[str] = []
        for attention in self._candidates():
            reason = self._why_not(attention)
            if reason is None:
                self._attention = attention
                break
            reasons.append(f"{_NAMES[attention]}: {reason}")
        detached = self._attention != "segments" and isinstance(_base_model(self.model), PreTrainedModel)
        if detached:
            detach_segment_attention(_base_model(self.model))
        if self._attention is None:
            raise ValueError(self._refusal(reasons))
        if reasons and self._attention == "padded":
            rank_zero_warn("trajectories are not packed but padded, in rows of one. " + " ".join(reasons))
        elif reasons:
            rank_zero_info(f"packed by {_NAMES[self._attention]}. " + " ".join(reasons))
        return self.layout

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        """Recomputes layers in the backward pass instead of keeping their activations; see the transformers method."""
        self.model.gradient_checkpointing_enable(**kwargs)  # type: ignore[operator]

    def embedding(self) -> nn.Module | None:
        """The module that turns ids into vectors, where the model says which it is."""
        get = getattr(self.model, "get_input_embeddings", None)
        embeddings = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
        return get() if get is not None else next(iter(embeddings), None)

    @contextmanager
    def reference_attention(self) -> Iterator[None]:
        """Within it, the model runs the attention it came with."""
        base = _base_model(self.model)
        with own_attention(base) if isinstance(base, PreTrainedModel) else nullcontext():
            yield

    # --- private -----------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Attention]:
        own = isinstance(_base_model(self.model), PreTrainedModel)
        packed: list[Attention] = ["segments", "own_mask"] if own else ["segment_ids"]
        padded: list[Attention] = ["padded"]
        return {"auto": packed + padded, "packed": packed, "padded": padded}[self.requested_layout]

    def _why_not(self, attention: Attention) -> str | None:
        """`None` when segments are isolated this way, otherwise the reason why not."""
        base = _base_model(self.model)
        if attention == "segments" and (reason := attach_segment_attention(base)) is not None:
            return reason
        if attention == "own_mask":
            detach_segment_attention(base)
        if attention == "segment_ids" and not _accepts(base, "segment_ids"):
            return f"`{type(base).__name__}.forward` takes no `segment_ids`"
        if attention == "own_mask" and not _accepts(_backbone(self.model), "position_ids"):
            return f"`{type(_backbone(self.model)).__name__}.forward` takes no `position_ids`"
        self._attention = attention
        try:
            result = measure_isolation(self, layout=self.layout)
        except (NotImplementedError, TypeError, AttributeError, ValueError, RuntimeError, KeyError, IndexError) as error:
            if attention == "padded":
                raise
            return f"{type(error).__name__}: {error}"
        finally:
            self._attention = None
        return None if result.ok else result.message

    def _refusal(self, reasons: list[str]) -> str:
        if self.requested_layout == "packed":
            return (
                'layout="packed" was asked for, but this model cannot be packed; use layout="auto" or "padded". '
                + " ".join(reasons)
            )
        return f"{type(self.model).__name__} is no causal language model: " + reasons[-1]

    def _call_backbone(self, **arguments: Any) -> Any:
        """Calls the backbone with those of the arguments that it takes."""
        backbone = _backbone(self.model)
        arguments["use_cache"] = False
        return backbone(**{name: value for name, value in arguments.items() if _accepts(backbone, name)})

    def _own_module_hidden(self, batch: PackedBatch) -> Tensor:
        positions = batch.position_ids
        if batch.layout == "padded":
            positions = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        extra = {"segment_ids": batch.segment_ids} if _accepts(self.model, "segment_ids") else {}
        return _hidden(self.model(batch.input_ids, positions, **extra))

    def _model_logits(self, batch: PackedBatch) -> Tensor:
        if batch.segment_starts.numel() > batch.input_ids.shape[0]:
            raise ValueError('the model\'s own logits are defined for rows of one segment; collate with layout="padded"')
        base = _base_model(self.model)
        if isinstance(base, PreTrainedModel):
            extra = {"use_cache": False} if _accepts(base, "use_cache") else {}
            output = self.model(input_ids=batch.input_ids, **extra)
            logits = output.logits if hasattr(output, "logits") else output[0]
        else:
            logits = self.head.output_layer(self._own_module_hidden(batch))
        if logits is None:
            raise ValueError(f"`{type(self.model).__name__}.forward` returned no logits: its output path was patched")
        return logits.flatten(0, 1).index_select(0, batch.predictors)


_NAMES: dict[Attention, str] = {
    "segments": "attention per segment",
    "own_mask": "the model's own attention and mask",
    "segment_ids": "the module's own use of `segment_ids`",
    "padded": "padded rows",
}
assert set(_NAMES) == set(get_args(Attention))


def _base_model(model: nn.Module) -> nn.Module:
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


def _backbone(model: nn.Module) -> nn.Module:
    """What computes the last hidden states of a transformers causal LM; the module itself for the user's own."""
    base = _base_model(model)
    if not isinstance(base, PreTrainedModel):
        return base
    backbone = base.base_model
    if backbone is base:
        raise TypeError(
            f"{type(base).__name__} has no backbone under `base_model`; pass a causal LM "
            "(`AutoModelForCausalLM`), not a bare model"
        )
    return backbone


def _hidden(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    hidden = getattr(output, "last_hidden_state", None)
    return output[0] if hidden is None else hidden


def _accepts(module: nn.Module, name: str) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _check_batch(batch: Any) -> None:
    missing = next((name for name in _NEEDED if not hasattr(batch, name)), None)
    if missing is not None:
        raise TypeError(
            f"a microbatch must be a PackedBatch, got {type(batch).__name__} without `{missing}`; build it with "
            "`lit_rl.collate`, or let `PackedDataModule` do it"
        )


def _mention_extra_losses(model: nn.Module) -> None:
    config = getattr(_base_model(model), "config", None)
    if getattr(config, "output_router_logits", False):
        rank_zero_warn("the model asks for a router loss (`output_router_logits`): it is not part of the objective")
    elif getattr(config, "router_aux_loss_coef", 0):
        rank_zero_info("the model's router loss (`router_aux_loss_coef`) is not part of the objective")
