"""How the hidden state after each new token is computed: with the model's own key-value cache, or without one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lit_rl.policy.causal_lm import CausalLMPolicy

# transformers 5 renamed the argument and the output; models of either generation are spoken to in their own words.
_CACHE_ARGUMENTS = ("cache", "past_key_values")


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


def make_decoder(policy: CausalLMPolicy) -> Decoder:
    """Chooses how to decode with a policy.

    Args:
        policy: The policy; a transformers model with a cache decodes with it, every other network without.

    Returns:
        A decoder for one batch of prompts.
    """
    backbone = transformers_backbone(policy.model)
    if backbone is None:
        return PrefixDecoder(policy.model)
    accepted = inspect.signature(backbone.forward).parameters
    cache_argument = next((name for name in _CACHE_ARGUMENTS if name in accepted), None)
    if cache_argument is None or "attention_mask" not in accepted:
        return PrefixDecoder(backbone)
    return CachedDecoder(backbone, cache_argument, with_positions="position_ids" in accepted)


class CachedDecoder:
    """Decodes with the model's own attention and key-value cache.

    Prompts are padded on the left, so that all rows grow at the same column; equal prompts (the attempts of one
    group) are read once and their cache is copied.
    """

    def __init__(self, backbone: nn.Module, cache_argument: str, *, with_positions: bool) -> None:
        self.backbone = backbone
        self.cache_argument = cache_argument
        self.with_positions = with_positions
        self.device = device_of(backbone)
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
            hidden = hidden.index_select(0, rows)
        return hidden

    def advance(self, token_ids: Tensor) -> Tensor:
        """Appends one token per row; see `Decoder.advance`."""
        positions = self.positions[:, None]
        self.column += 1
        hidden = self._forward(token_ids[:, None], positions)
        self.positions = self.positions + 1
        return hidden

    def keep(self, rows: Tensor) -> None:
        """Selects rows (also repeatedly) of the cache; see `Decoder.keep`."""
        self.cache.reorder_cache(rows)
        self.mask = self.mask.index_select(0, rows)
        self.positions = self.positions.index_select(0, rows)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True, "return_dict": True}
        # Without padding the plain causal mask is right, and attention kernels have a faster path for it.
        arguments["attention_mask"] = self.mask[:, : self.column] if self.padded else None
        if self.with_positions:
            arguments["position_ids"] = positions
        if self.cache is not None:
            arguments[self.cache_argument] = self.cache
        output = self.backbone(**arguments)
        self.cache = getattr(output, self.cache_argument)
        return output.last_hidden_state[:, -1]


class PrefixDecoder:
    """Decodes without a cache, by running the whole prefix again for every token.

    For the user's own network, `forward(input_ids, position_ids) -> hidden states`. Rows are padded on the right,
    which a causal network cannot see. The cost per token grows with the length of the prefix.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.device = device_of(network)

    def start(self, prompts: Sequence[Sequence[int]], room: int) -> Tensor:
        """Reads the prompts; see `Decoder.start`."""
        width = max(map(len, prompts)) + room
        self.ids = torch.tensor([list(prompt) + [0] * (width - len(prompt)) for prompt in prompts], device=self.device)
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.width = width - room
        return self._forward()

    def advance(self, token_ids: Tensor) -> Tensor:
        """Appends one token per row; see `Decoder.advance`."""
        self.ids.scatter_(1, self.lengths[:, None], token_ids[:, None])
        self.lengths = self.lengths + 1
        self.width += 1
        return self._forward()

    def keep(self, rows: Tensor) -> None:
        """Drops rows; see `Decoder.keep`."""
        self.ids = self.ids.index_select(0, rows)
        self.lengths = self.lengths.index_select(0, rows)

    def _forward(self) -> Tensor:
        ids = self.ids[:, : self.width]
        positions = torch.arange(self.width, device=self.device).expand_as(ids)
        output = self.network(input_ids=ids, position_ids=positions)
        hidden = output if isinstance(output, Tensor) else output.last_hidden_state
        last = (self.lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return hidden.gather(1, last).squeeze(1)
