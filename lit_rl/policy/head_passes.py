"""The passes of the log-probability head over its tiles: scoring, the gradient afterwards, and both at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rl.policy.head_products import HeadInputs, Rows, VocabBlock, multiply
from lit_rl.policy.head_tiles import RowGradients, RowStatistics, TileShape, differentiate

#: A target that is not scored, as in `torch.nn.functional.cross_entropy`.
IGNORED = -100

#: From the log-probabilities of some tokens and their place among all, each token's weighted loss.
Objective = Callable[[Tensor, slice], Tensor]


def kept_tokens(targets: Tensor, vocab_size: int) -> Tensor | None:
    """Indices of the targets that are not ignored, or None if that is all of them.

    Raises:
        ValueError: A target is neither a token id below `vocab_size` nor ignored.

    >>> kept_tokens(torch.tensor([3, -100, 1]), 10)
    tensor([0, 2])
    """
    kept = targets != IGNORED
    wrong = kept & ((targets < 0) | (targets >= vocab_size))
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise ValueError(
            f"`targets` has {int(targets[position])} at position {position}: expected a token id from 0 to "
            f"{vocab_size - 1}, or {IGNORED} for a token that is not scored."
        )
    indices = kept.nonzero().squeeze(1)
    return None if len(indices) == len(targets) else indices


def _among(indices: Tensor | None, rows: slice) -> Rows:
    return rows if indices is None else indices[rows]


def _spread(values: Tensor, indices: Tensor | None, count: int) -> Tensor:
    return values if indices is None else values.new_zeros(count).index_copy_(0, indices, values)


@dataclass(frozen=True)
class Scores:
    """Log-probabilities and entropies (None if not asked for), both `[M]`, with what backward needs to know again."""

    log_probs: Tensor
    entropy: Tensor | None
    statistics: RowStatistics


def score(inputs: HeadInputs, shape: TileShape, *, entropy: bool) -> Scores:
    """Log-probability and entropy of every token; exactly 0 for ignored ones, whose hidden states are not read."""
    kept = kept_tokens(inputs.targets, inputs.vocab_size)
    count = len(inputs.targets)
    total = count if kept is None else len(kept)
    statistics = RowStatistics.empty(total, inputs, entropy=entropy)
    for block in shape.blocks(inputs):
        for part in shape.slices(total):
            rows = _among(kept, part)
            tile = inputs.tile(inputs.hidden_rows(rows), block)
            statistics[part].absorb(tile, inputs.slope(rows), *block.inside(inputs.targets[rows]))
    log_probs = statistics.log_probs(inputs.slope(_among(kept, slice(None))))
    entropies = statistics.entropy()
    return Scores(
        _spread(log_probs, kept, count),
        None if entropies is None else _spread(entropies, kept, count),
        RowStatistics(*(None if value is None else _spread(value, kept, count) for value in statistics.values())),
    )


@dataclass
class Gradients:
    """What a backward pass adds up: one entry per hidden state and weight, None where no gradient is asked for.

    Attributes:
        hiddens: `[M, D_i]`, in compute precision.
        weights: `[V, D_i]`.
        bias: `[V]`, in compute precision.
    """

    hiddens: list[Tensor | None]
    weights: list[Tensor | None]
    bias: Tensor | None

    @classmethod
    def zeros(cls, inputs: HeadInputs, needs: list[bool], weight_dtypes: list[torch.dtype]) -> Gradients:
        """Zero gradients for the inputs that `needs` marks: hidden states, then weights, then the bias."""
        count, compute = len(inputs.hiddens), inputs.compute_dtype
        hiddens = [
            torch.zeros(hidden.shape, dtype=compute, device=hidden.device) if needed else None
            for hidden, needed in zip(inputs.hiddens, needs, strict=False)
        ]
        weights = [
            torch.zeros(weight.shape, dtype=dtype, device=weight.device) if needed else None
            for weight, dtype, needed in zip(inputs.weights, weight_dtypes, needs[count:], strict=False)
        ]
        bias = inputs.bias
        wanted = bias is not None and needs[2 * count]
        return cls(hiddens, weights, torch.zeros_like(bias, dtype=compute) if bias is not None and wanted else None)

    def weight_sums(self, block: VocabBlock, dtype: torch.dtype) -> list[Tensor | None]:
        """Where to add up the weight gradients of one block in `dtype`: a view of the whole, or a buffer to store."""
        views = [None if weight is None else weight[block.columns] for weight in self.weights]
        return [view if view is None or view.dtype == dtype else torch.zeros_like(view, dtype=dtype) for view in views]

    def store(self, sums: list[Tensor | None], block: VocabBlock) -> None:
        """Round one block's finished sums to the weights' own precision."""
        for weight, total in zip(self.weights, sums, strict=True):
            if weight is not None and total is not None and weight.dtype != total.dtype:
                weight[block.columns] = total.to(weight.dtype)

    def add(
        self, gradient: Tensor, hiddens: list[Tensor], rows: Rows, block: VocabBlock, sums: list[Tensor | None]
    ) -> None:
        """Add what the gradient of one tile means for hidden states, weights and bias."""
        if self.bias is not None:
            self.bias[block.columns] += gradient.sum(0)
        factor = gradient.to(hiddens[0].dtype)
        for total, weight in zip(self.hiddens, block.weights, strict=True):
            if total is not None and isinstance(rows, slice):
                total[rows] += multiply(factor, weight)
            elif total is not None:
                total.index_add_(0, rows, multiply(factor, weight))
        for total, hidden in zip(sums, hiddens, strict=True):
            if total is not None:
                total += multiply(factor.t(), hidden)


def differentiate_scores(
    inputs: HeadInputs, shape: TileShape, statistics: RowStatistics, upstream: RowGradients, needs: list[bool]
) -> Gradients:
    """Gradients of `score`: every tile with a live row is made again and multiplied on.

    Rows whose upstream gradients are exactly zero take no part, at no cost. Each block of weight gradients is
    summed over all tokens in compute precision and rounded once.
    """
    gradients = Gradients.zeros(inputs, needs, [weight.dtype for weight in inputs.weights])
    live = upstream.live()
    total = len(inputs.targets) if live is None else len(live)
    for block in shape.blocks(inputs) if total else ():
        sums = gradients.weight_sums(block, inputs.compute_dtype)
        for part in shape.slices(total):
            rows = _among(live, part)
            hiddens = inputs.hidden_rows(rows)
            tile = inputs.tile(hiddens, block)
            target = block.inside(inputs.targets[rows])
            gradient = differentiate(tile, statistics[rows], upstream[rows], inputs, rows, target)
            gradients.add(gradient, hiddens, rows, block, sums)
        gradients.store(sums, block)
    return gradients


@dataclass(frozen=True)
class OnePass:
    """Outcome of one pass: the summed loss, the log-probabilities `[M]`, and the gradients of the sum, if asked for."""

    loss: Tensor
    log_probs: Tensor
    gradients: Gradients


def score_and_differentiate(
    inputs: HeadInputs, shape: TileShape, chunk_tokens: int, objective: Objective, needs: list[bool]
) -> OnePass:
    """Loss of a token-local objective and its gradients, a chunk of tokens at a time, each product made once.

    The logits of one chunk are kept from scoring to differentiating; that buffer is the memory this pass takes.
    """
    ...
