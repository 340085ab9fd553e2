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


def check_rows(inputs: HeadInputs) -> None:
    """Refuse targets and temperatures that cannot be scored, before any work.

    Raises:
        ValueError: A target is neither a token id below the vocabulary size nor ignored, or the temperature of a
            token that is scored is not a positive number.
    """
    targets, temperature = inputs.targets, inputs.row_temperature
    kept = targets != IGNORED
    wrong = kept & ((targets < 0) | (targets >= inputs.vocab_size))
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise ValueError(
            f"`targets` has {int(targets[position])} at position {position}: expected a token id from 0 to "
            f"{inputs.vocab_size - 1}, or {IGNORED} for a token that is not scored."
        )
    if temperature is None:
        return
    wrong = kept & ~((temperature > 0) & temperature.isfinite())
    if bool(wrong.any()):
        position = int(wrong.nonzero()[0])
        raise ValueError(
            f"`temperature` has {float(temperature[position])} at position {position}: expected a positive number."
        )


def kept_tokens(targets: Tensor) -> Tensor | None:
    """Indices of the targets that are not ignored, or None if that is all of them.

    >>> kept_tokens(torch.tensor([3, -100, 1]))
    tensor([0, 2])
    """
    indices = (targets != IGNORED).nonzero().squeeze(1)
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
    check_rows(inputs)
    kept = kept_tokens(inputs.targets)
    count = len(inputs.targets)
    total = count if kept is None else len(kept)
    statistics = RowStatistics.empty(total, inputs, entropy=entropy)
    for block in shape.blocks(inputs):
        for part in shape.slices(total):
            rows = _among(kept, part)
            # The tile has no name here: it is let go before the next one is made.
            statistics[part].absorb(
                inputs.tile(inputs.hidden_rows(rows), block), inputs.slope(rows), *block.inside(inputs.targets[rows])
            )
    log_probs = statistics.log_probs(inputs.slope(_among(kept, slice(None))))
    entropies = statistics.entropy()
    return Scores(
        _spread(log_probs, kept, count),
        None if entropies is None else _spread(entropies, kept, count),
        statistics.map(lambda values: _spread(values, kept, count)),
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

    def add(self, gradient: Tensor, hiddens: list[Tensor], rows: Rows, block: VocabBlock) -> list[Tensor | None]:
        """Add what the gradient of one tile means for hidden states and bias; return what it means for weights."""
        if self.bias is not None:
            self.bias[block.columns] += gradient.sum(0)
        for total, weight in zip(self.hiddens, block.weights, strict=True):
            if total is None:
                continue
            product = multiply(gradient.to(weight.dtype), weight)
            if isinstance(rows, slice):
                total[rows] += product
            else:
                total.index_add_(0, rows, product)
        return [
            None if weight is None else multiply(gradient.to(hidden.dtype).t(), hidden)
            for weight, hidden in zip(self.weights, hiddens, strict=True)
        ]

    def open_block(self, block: VocabBlock, dtype: torch.dtype) -> list[Tensor | None]:
        """Where the weight gradients of one block are added up in `dtype`: in place, or beside what is less precise."""
        views = [None if weight is None else weight[block.columns] for weight in self.weights]
        return [view if view is None or view.dtype == dtype else torch.zeros_like(view, dtype=dtype) for view in views]

    def close_block(self, block: VocabBlock, sums: list[Tensor | None]) -> None:
        """Round the sums of one block to the precision of the weights, where that is another."""
        for weight, total in zip(self.weights, sums, strict=True):
            if weight is not None and total is not None and weight.dtype != total.dtype:
                weight[block.columns] = total.to(weight.dtype)


def _add_up(totals: list[Tensor | None], parts: list[Tensor | None]) -> None:
    for total, part in zip(totals, parts, strict=True):
        if total is not None and part is not None:
            total += part


def differentiate_scores(
    inputs: HeadInputs, shape: TileShape, statistics: RowStatistics, upstream: RowGradients, needs: list[bool]
) -> Gradients:
    """Gradients of `score`: every tile with a live row is made again and multiplied on.

    Rows whose upstream gradients are exactly zero take no part, at no cost. Each block of weight gradients is
    summed over all tokens in compute precision and rounded once.
    """
    gradients = Gradients.zeros(inputs, needs, [weight.dtype for weight in inputs.weights])
    live = upstream.live(inputs.targets != IGNORED)
    total = len(inputs.targets) if live is None else len(live)

    def tile_parts(rows: Rows, block: VocabBlock) -> list[Tensor | None]:
        hiddens = inputs.hidden_rows(rows)
        target = block.inside(inputs.targets[rows])
        tile = inputs.tile(hiddens, block)
        tile = differentiate(tile, statistics[rows], upstream[rows], inputs, rows, target)
        return gradients.add(tile, hiddens, rows, block)

    for block in shape.blocks(inputs) if total else ():
        sums = gradients.open_block(block, inputs.compute_dtype)
        for part in shape.slices(total):
            _add_up(sums, tile_parts(_among(live, part), block))
        gradients.close_block(block, sums)
    return gradients


@dataclass(frozen=True)
class OnePass:
    """Outcome of one pass: the summed loss, the log-probabilities `[M]`, and the gradients of the sum, if asked for."""

    loss: Tensor
    log_probs: Tensor
    gradients: Gradients


@dataclass(frozen=True)
class _Chunk:
    """Tokens whose logits are kept: which of the call's tokens, their hidden states, and their distributions."""

    rows: Rows
    hiddens: list[Tensor]
    statistics: RowStatistics

    def only(self, live: Tensor) -> _Chunk:
        """The chunk without the rows that are not in `live`."""
        rows = live + self.rows.start if isinstance(self.rows, slice) else self.rows[live]
        return _Chunk(rows, [hidden[live] for hidden in self.hiddens], self.statistics[live])


def score_and_differentiate(inputs: HeadInputs, shape: TileShape, objective: Objective, needs: list[bool]) -> OnePass:
    """Loss of a token-local objective and its gradients, a chunk of tokens at a time, each product made once.

    The logits of one chunk (`shape.rows` tokens) stay from scoring to differentiating; that buffer is the memory
    this pass takes.
    """
    check_rows(inputs)
    gradients = Gradients.zeros(inputs, needs, [inputs.compute_dtype] * len(inputs.weights))
    count = len(inputs.targets)
    log_probs = torch.zeros(count, dtype=inputs.compute_dtype, device=inputs.targets.device)
    logits = log_probs.new_empty(min(shape.rows, count), inputs.vocab_size)
    losses = []
    for part in shape.slices(count):
        kept = kept_tokens(inputs.targets[part])
        chunk = _fill(logits, inputs, shape, part if kept is None else kept + part.start)
        log_probs[chunk.rows] = chunk.statistics.log_probs(inputs.slope(chunk.rows))
        loss, upstream = _evaluate(objective, log_probs[part], part, needs=any(needs))
        losses.append(loss)
        if upstream is not None:
            upstream = upstream if kept is None else upstream[kept]
            _drain(logits, inputs, shape, chunk, RowGradients(upstream, None), gradients)
    loss = torch.stack(losses).sum() if losses else log_probs.sum()
    return OnePass(loss, log_probs, gradients)


def _fill(logits: Tensor, inputs: HeadInputs, shape: TileShape, rows: Rows) -> _Chunk:
    """Put the tiles of `rows` side by side into `logits` and gather their statistics."""
    targets, hiddens = inputs.targets[rows], inputs.hidden_rows(rows)
    statistics = RowStatistics.empty(len(targets), inputs, entropy=False)

    def take_in(block: VocabBlock) -> None:
        tile = inputs.tile(hiddens, block)
        logits[: len(targets), block.columns] = tile
        statistics.absorb(tile, inputs.slope(rows), *block.inside(targets))

    for block in shape.blocks(inputs):
        take_in(block)
    return _Chunk(rows, hiddens, statistics)


def _drain(
    logits: Tensor,
    inputs: HeadInputs,
    shape: TileShape,
    chunk: _Chunk,
    upstream: RowGradients,
    gradients: Gradients,
) -> None:
    """Turn the kept logits of a chunk into gradients, block by block; rows without upstream gradient are left out."""
    live = upstream.live(torch.ones_like(upstream.log_probs, dtype=torch.bool))
    if live is not None:
        chunk, upstream = chunk.only(live), upstream[live]
    targets = inputs.targets[chunk.rows]

    def tile_parts(block: VocabBlock) -> list[Tensor | None]:
        tile = logits[: len(targets), block.columns].clone() if live is None else logits[live, block.columns]
        tile = differentiate(tile, chunk.statistics, upstream, inputs, chunk.rows, block.inside(targets))
        return gradients.add(tile, chunk.hiddens, chunk.rows, block)

    for block in shape.blocks(inputs) if len(targets) else ():
        _add_up(gradients.open_block(block, inputs.compute_dtype), tile_parts(block))


def _evaluate(objective: Objective, log_probs: Tensor, part: slice, *, needs: bool) -> tuple[Tensor, Tensor | None]:
    """The objective's summed loss over one chunk and its derivative by each log-probability, by autograd."""
    leaf = log_probs.clone().requires_grad_(needs)
    with torch.set_grad_enabled(needs):
        per_token = objective(leaf, part)
        if not isinstance(per_token, Tensor) or per_token.shape != leaf.shape:
            got = f"shape {tuple(per_token.shape)}" if isinstance(per_token, Tensor) else type(per_token).__name__
            raise ValueError(
                f"`objective` returned {got} for tokens {part.start} to {part.stop}: expected one weighted loss per "
                f"token, shape {tuple(leaf.shape)}. An objective that looks beyond a token needs `token_log_probs`."
            )
        loss = per_token.sum()
    if not needs:
        return loss, None
    if not loss.requires_grad:
        return loss, torch.zeros_like(log_probs)
    (upstream,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    return loss.detach(), torch.zeros_like(log_probs) if upstream is None else upstream
