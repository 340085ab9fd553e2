"""The policy: a causal language model that turns microbatches into log-probabilities of their scored tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from lit_rl.policy.backbone import accepted_names, backbone_of, base_model_of, hidden_of, mention_extra_losses
from lit_rl.policy.dropout import switch_off_dropout
from lit_rl.policy.head import LogProbHead, TokenLogProbs
from lit_rl.policy.isolation import Isolation, measure_isolation, probing_mode
from lit_rl.policy.probing import check_finite, raising_module

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

    Dropout is switched off at construction, on the modules and in the configuration: with it, the ratio of two passes
    over the same weights would be noise instead of 1. A model that is random in training mode for other reasons
    (router jitter) is warned about, with the module's name. Extra losses of a model, such as a router's balance loss,
    are not part of the objective. Only the hidden states that predict a scored token reach the head. Everything runs
    inside `forward`, so hooks of DDP and FSDP2 on the policy see every use of a parameter.

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
        if hasattr(model, "_orig_mod"):
            raise TypeError(
                "`model` is wrapped by `torch.compile(model)`, which hides its hidden states; compile it in place with "
                "`model.compile()`"
            )
        if layout not in ("auto", "packed", "padded"):
            raise ValueError(f'`layout` must be "auto", "packed" or "padded", got {layout!r}')
        self.model = model
        self.requested_layout = layout
        self.isolation: Isolation | None = None  # what was measured last, for reports
        self._attention: Attention | None = None
        # Not a submodule: its parameters are the model's, and state dicts must not list them twice.
        head = LogProbHead.from_model(model, chunk_tokens=chunk_tokens, vocab_size=vocab_size)
        self.__dict__["head"] = head
        backbone_of(model)
        switch_off_dropout(model)
        mention_extra_losses(model)

    head: LogProbHead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Settles the layout before the first forward pass, outside of any hook of it."""
        if self._attention is None:
            self.resolve_layout()
        return super().__call__(*args, **kwargs)

    def forward(
        self,
        batch: PackedBatch,
        *,
        entropy: bool = False,
        objective: Callable[[Tensor, slice], Tensor] | None = None,
        output: Literal["log_probs", "model_logits"] = "log_probs",
    ) -> TokenLogProbs | Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities of the scored tokens of one microbatch.

        Args:
            batch: The microbatch, on the model's device.
            entropy: Also returns the entropy of each scored token's distribution, in nats.
            objective: Forms loss and gradients in one pass over the output layer, see `LogProbHead.loss`; for losses
                where each token's depends on its own log-probability only.
            output: "model_logits" returns what the model itself computes, [M, vocabulary], for checks on a
                microbatch in the padded layout.

        Returns:
            `TokenLogProbs` with M entries in the order of `batch.scored`; with an `objective` its summed loss, with
            gradient, and the log-probabilities [M], detached.

        Raises:
            TypeError: `batch` is not a `PackedBatch`; the message names the first field that is missing.
            ValueError: A packed batch was given to a policy that is not packed.
        """
        _check_batch(batch)
        if output == "model_logits":
            return self._model_logits(batch)
        hidden = self.hidden_states(batch).flatten(0, 1).index_select(0, batch.predictors)
        if objective is not None:
            return self.head.loss(hidden, batch.targets, objective, temperature=batch.temperature)
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
        if not isinstance(base_model_of(self.model), PreTrainedModel):
            return self._own_module_hidden(batch)
        if batch.layout == "padded" or self.attention == "padded":
            return hidden_of(self._call_backbone(input_ids=batch.input_ids))
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
        return hidden_of(output)

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
                module whose output changed. Or not even padded rows are isolated: the model is not causal, or has
                weights that are no numbers.
        """
        if self._attention is not None:
            return self.layout
        reasons: dict[str, list[str]] = {}
        self._attention = "padded"  # For the search for randomness.
        try:
            with probing_mode(self):
                self._attention = next((a for a in self._candidates() if self._is_isolated(a, reasons)), None)
        except BaseException:
            self._attention = None
            raise
        base = base_model_of(self.model)
        if self._attention != "segments" and isinstance(base, PreTrainedModel):
            detach_segment_attention(base)
        if self._attention is None:
            check_finite(self.model)
        explained = "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in reasons.items())
        if self._attention is None and self.requested_layout == "packed":
            raise ValueError(
                f'layout="packed" was asked for, but this model cannot be packed: {explained}. Use layout="auto" or '
                '"padded"'
            )
        if self._attention is None:
            raise ValueError(f"{type(self.model).__name__} is no causal language model: {explained}")
        if self._attention == "padded" and reasons:
            rank_zero_warn(f"trajectories are padded, in rows of one, instead of packed: {explained}")
        elif reasons:
            rank_zero_info(f"packed by {_NAMES[self._attention]}, because of {explained}")
        return self.layout

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Recomputes layers in the backward pass instead of keeping their activations.

        Args:
            gradient_checkpointing_kwargs: Passed on to `torch.utils.checkpoint.checkpoint`.
        """
        base: Any = base_model_of(self.model)
        # The name that transformers has used since 5.2x; its older releases and other modules know the other one.
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs)

    def embedding(self) -> nn.Module | None:
        """The module that turns ids into vectors, where the model says which it is."""
        get = getattr(self.model, "get_input_embeddings", None)
        if get is not None:
            return get()
        return next((module for module in self.model.modules() if isinstance(module, nn.Embedding)), None)

    @contextmanager
    def reference_attention(self) -> Iterator[None]:
        """Within it, the model runs the attention it came with."""
        base = base_model_of(self.model)
        with own_attention(base) if isinstance(base, PreTrainedModel) else nullcontext():
            yield

    # --- private -----------------------------------------------------------------------------------------------

    def _candidates(self) -> list[Attention]:
        own = isinstance(base_model_of(self.model), PreTrainedModel)
        packed: list[Attention] = ["segments", "own_mask"] if own else ["segment_ids"]
        padded: list[Attention] = ["padded"]
        return {"auto": packed + padded, "packed": packed, "padded": padded}[self.requested_layout]

    def _is_isolated(self, attention: Attention, reasons: dict[str, list[str]]) -> bool:
        """Whether segments are isolated this way; if not, adds why to the reasons."""
        reason = self._cannot(attention)
        if reason is None:
            self._attention = attention
            try:
                self.isolation = measure_isolation(self, layout=self.layout)
                reason = None if self.isolation.ok else self.isolation.message
            except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                where = raising_module(error, self.model)
                reason = f"{type(error).__name__}{'' if where is None else f' in {where}'}: {error}"
                if attention == "padded":
                    raise RuntimeError(f"{type(self.model).__name__} does not run on padded rows: {reason}") from error
            finally:
                self._attention = None
        if reason is not None:
            reasons.setdefault(reason, []).append(_NAMES[attention])
        return reason is None

    def _cannot(self, attention: Attention) -> str | None:
        """Sets the attention on the model; says why where it cannot be."""
        base, backbone = base_model_of(self.model), backbone_of(self.model)
        if attention == "segments":
            return attach_segment_attention(base)
        if isinstance(base, PreTrainedModel):
            detach_segment_attention(base)
        needed = {"segment_ids": "segment_ids", "own_mask": "position_ids"}.get(attention)
        if needed is not None and needed not in accepted_names(backbone, needed):
            return f"`{type(backbone).__name__}.forward` takes no `{needed}`"
        return None

    def _call_backbone(self, **arguments: Any) -> Any:
        """Calls the backbone with those of the arguments that it takes."""
        backbone = backbone_of(self.model)
        arguments["use_cache"] = False
        return backbone(**{name: arguments[name] for name in accepted_names(backbone, *arguments)})

    def _own_module_hidden(self, batch: PackedBatch) -> Tensor:
        positions = batch.position_ids
        if batch.layout == "padded":
            positions = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
        extra = {"segment_ids": batch.segment_ids} if accepted_names(self.model, "segment_ids") else {}
        return hidden_of(self.model(batch.input_ids, positions, **extra))

    def _model_logits(self, batch: PackedBatch) -> Tensor:
        if batch.segment_starts.numel() > batch.input_ids.shape[0]:
            raise ValueError(
                'the model\'s own logits are defined for rows of one segment; collate with layout="padded"'
            )
        base = base_model_of(self.model)
        if isinstance(base, PreTrainedModel):
            extra = {"use_cache": False} if accepted_names(base, "use_cache") else {}
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


def _check_batch(batch: Any) -> None:
    missing = next((name for name in _NEEDED if not hasattr(batch, name)), None)
    if missing is not None:
        raise TypeError(
            f"a microbatch must be a PackedBatch, got {type(batch).__name__} without `{missing}`; build it with "
            "`lit_rl.collate`, or let `PackedDataModule` do it"
        )
