"""How the hidden state after each new token is computed: with the model's own key-value cache, or without one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Decoder(Protocol):
    """The network while some rows are being generated; rows leave through `keep`."""

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        """Reads B prompts, to be continued by at most `room` tokens: [B, D] hidden states of their last tokens."""
        ...

    def advance(self, token_ids: Tensor) -> Tensor:
        """Appends one token, int64 [A], to each of the A open rows: [A, D] hidden states of these tokens."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Drops all open rows but these, int64 [at most A] in increasing order."""
        ...


class CachedDecoder:
    """Decodes with the model's own attention and key-value cache.

    Prompts are padded on the left, so that all rows grow at the same column; equal prompts (the attempts of one
    group) are read once and their cache is copied.

    Args:
        backbone: The part of a transformers causal LM that computes hidden states.
        cache_argument: How it calls its cache.
    """

    def __init__(self, backbone: nn.Module, cache_argument: str) -> None:
        self.backbone = backbone
        self.cache_argument = cache_argument
        self.accepted = set(inspect.signature(backbone.forward).parameters)
        self.device = _device(backbone)
        self.cache: Any = None

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        """Reads the prompts; see `Decoder.start`."""
        distinct: dict[tuple[int, ...], int] = {}
        copies = [distinct.setdefault(tuple(prompt), len(distinct)) for prompt in prompts]
        width = max(map(len, distinct))
        lengths = torch.tensor([len(prompt) for prompt in distinct], device=self.device)
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in distinct], device=self.device)
        columns = torch.arange(width + room, device=self.device)
        self.mask = (columns >= (width - lengths)[:, None]).long()
        self.column = width
        self.positions = lengths
        self.padded = len(set(map(len, distinct))) > 1
        positions = (columns[:width] - (width - lengths)[:, None]).clamp(min=0)
        hidden = self._forward(ids, positions)
        if len(distinct) < len(prompts):
            rows = torch.tensor(copies, device=self.device)
            self.keep(rows)
            hidden = hidden.index_select(0, rows.to(hidden.device))
        return hidden

    def advance(self, token_ids: Tensor) -> Tensor:
        """Appends one token per row; see `Decoder.advance`."""
        self.column += 1
        hidden = self._forward(token_ids[:, None].to(self.device), self.positions[:, None])
        self.positions = self.positions + 1
        return hidden

    def keep(self, rows: Tensor) -> None:
        """Selects rows (also repeatedly) of the cache; see `Decoder.keep`."""
        rows = rows.to(self.device)
        self.cache.reorder_cache(rows)
        self.mask = self.mask.index_select(0, rows)
        self.positions = self.positions.index_select(0, rows)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, "return_dict": True}
        # Without padding the plain causal mask is right, and attention kernels have a faster path for it.
        arguments["attention_mask"] = self.mask[:, : self.column] if self.padded else None
        if "position_ids" in self.accepted:
            arguments["position_ids"] = positions
        if self.cache is not None:
            arguments[self.cache_argument] = self.cache
        output = self.backbone(**arguments)
        self.cache = getattr(output, self.cache_argument)
        return output.last_hidden_state[:, -1]


class PrefixDecoder:
    """Decodes without a cache, by running the whole prefix again for every token.

    For the user's own network, `forward(input_ids, position_ids) -> hidden states`, and for transformers models
    without a cache. Rows are padded on the right, which a causal network cannot see. The cost per token grows with
    the length of the prefix.

    Args:
        network: Called with ids and positions [B, L], and `segment_ids` if it takes them; a transformers model with
            those of its arguments that it has.
    """

    def __init__(self, network: nn.Module) -> None:
        from transformers import PreTrainedModel

        self.network = network
        self.device = _device(network)
        self.accepted = set(inspect.signature(network.forward).parameters)
        self.is_transformers = isinstance(network, PreTrainedModel)

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        """Reads the prompts; see `Decoder.start`."""
        self.width = max(map(len, prompts))
        space = self.width + room
        self.ids = torch.tensor([[*prompt, *[0] * (space - len(prompt))] for prompt in prompts], device=self.device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        return self._forward()

    def advance(self, token_ids: Tensor) -> Tensor:
        """Appends one token per row; see `Decoder.advance`."""
        self.ids.scatter_(1, self.lengths[:, None], token_ids[:, None].to(self.device))
        self.lengths = self.lengths + 1
        self.width += 1
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        """Drops rows; see `Decoder.keep`."""
        rows = rows.to(self.device)
        self.ids = self.ids.index_select(0, rows)
        self.lengths = self.lengths.index_select(0, rows)
        self.width = int(self.lengths.max())

    def _forward(self) -> Tensor:
        ids = self.ids[:, : self.width]
        positions = torch.arange(self.width, device=self.device).expand_as(ids)
        options: dict[str, Any] = {"use_cache": False}
        options["segment_ids"] = torch.where(positions < self.lengths[:, None], 0, -1)
        options = {name: value for name, value in options.items() if name in self.accepted}
        if self.is_transformers and "position_ids" not in self.accepted:
            output = self.network(ids, **options)
        elif self.is_transformers:
            output = self.network(ids, position_ids=positions, **options)
        else:
            output = self.network(ids, positions, **options)
        hidden = getattr(output, "last_hidden_state", output)
        last = (self.lengths - 1).to(hidden.device)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return hidden.gather(1, last).squeeze(1)


@contextmanager
def generation_mode(policy: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; not inference mode, whose tensors could not enter autograd later."""
    modes = [(module, module.training) for module in policy.modules()]
    policy.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def model_end_ids(model: nn.Module) -> list[int]:
    """The end tokens that a model's generation configuration, or else its configuration, names.

    Args:
        model: A transformers causal LM.

    Returns:
        At least one id.

    Raises:
        ValueError: There is none.
    """
    configurations = (getattr(model, "generation_config", None), getattr(model, "config", None), _text_config(model))
    found = (getattr(configuration, "eos_token_id", None) for configuration in configurations)
    end_ids = next((ids for ids in found if ids is not None), None)
    if end_ids is None:
        raise ValueError(
            "the model's configuration names no end token (`eos_token_id`); pass `end_ids=(...)`, or `end_ids=()` if "
            "only `max_new_tokens` ends an action"
        )
    return [end_ids] if isinstance(end_ids, int) else list(end_ids)


def model_context(model: nn.Module) -> int | None:
    """The longest sequence a model says it can read, if it does.

    Args:
        model: With a transformers configuration, or without.

    Returns:
        `max_position_embeddings`; of a composite configuration, that of its text part.
    """
    return getattr(_text_config(model), "max_position_embeddings", None)


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    read = getattr(config, "get_text_config", None)
    return config if read is None else read(decoder=True)


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device
