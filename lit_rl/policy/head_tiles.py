"""From tiles of logits to log-probabilities, entropies and gradients, without ever holding the logits.

Forward keeps, for every token, the largest logit seen so far, the sum of exponentials relative to it, the target's
logit, and, for the entropy, the sum of exponentials times their exponents. A new tile updates these (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018), so a tile lives only while it is in cache. Backward
makes the tile again and turns it, in place, into the gradient with respect to the product. With `p` the probabilities,
`H` the entropy, `g` and `e` the upstream gradients of log-probability and entropy, the gradient of logit `j` is

    g * (1[j is the target] - p_j) - e * p_j * (log p_j + H)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_rl.policy.head_products import HeadInputs, Rows, VocabBlock, take

#: Exponents below this give exactly zero in float64 too, and times zero they still give zero: -inf would give NaN.
_LOWEST_EXPONENT = -1e4

#: Bytes of one tile where none is asked for: a CPU's tile stays in cache, and below the 32 MiB from which on glibc
#: maps fresh pages for every allocation; an accelerator's tile keeps its units busy.
_TILE_BYTES = {"cpu": 24 * 2**20}
_TILE_BYTES_ELSEWHERE = 256 * 2**20
_TILE_COLUMNS = {"cpu": 6144}
_TILE_COLUMNS_ELSEWHERE = 16384
_COLUMN_STEP = 64

#: Bytes of one chunk of logits where no chunk is asked for.
CHUNK_BYTES = 512 * 2**20
#: What two passes, and one pass besides its chunk, may hold at a time, as a share of one chunk of logits; and the
#: entries below which two passes do not bother.
_TWO_PASS_SHARE = 0.6
_ONE_PASS_SHARE = 0.2
_SMALL_ENTRIES = 2 * 2**20


def _tile_entries(inputs: HeadInputs) -> int:
    device = inputs.targets.device.type
    return _TILE_BYTES.get(device, _TILE_BYTES_ELSEWHERE) // inputs.compute_dtype.itemsize


def _tile_columns(inputs: HeadInputs) -> int:
    return _TILE_COLUMNS.get(inputs.targets.device.type, _TILE_COLUMNS_ELSEWHERE)


def _chunk_tokens(inputs: HeadInputs, chunk_tokens: int | None) -> int:
    """Tokens of one chunk of logits: what is asked for or fits the budget, and no more than there are."""
    fitting = CHUNK_BYTES // (inputs.vocab_size * inputs.compute_dtype.itemsize)
    return max(1, min(chunk_tokens or fitting, len(inputs.targets)))


@dataclass(frozen=True)
class TileShape:
    """How the logits are cut: at most `rows` tokens by `columns` vocabulary entries at a time."""

    rows: int
    columns: int

    @classmethod
    def choose(cls, inputs: HeadInputs, chunk_tokens: int | None) -> TileShape:
        """A tile for scoring and differentiating in two passes, small beside the logits of one chunk.

        >>> import torch
        >>> hidden, weight = torch.zeros(5000, 8), torch.zeros(100_000, 8)
        >>> inputs = HeadInputs([hidden], [weight], None, torch.zeros(5000), None, 1.0, 1.0, None, 100_000, None)
        >>> TileShape.choose(inputs, None), TileShape.choose(inputs, 64)
        (TileShape(rows=1024, columns=6144), TileShape(rows=64, columns=6144))
        """
        rows = chunk_tokens or max(1, _tile_entries(inputs) // min(inputs.vocab_size, _tile_columns(inputs)))
        logits = _chunk_tokens(inputs, chunk_tokens) * inputs.vocab_size
        allowed = int(_TWO_PASS_SHARE * logits) if chunk_tokens else max(int(_TWO_PASS_SHARE * logits), _SMALL_ENTRIES)
        return cls._within(inputs, rows, allowed)

    @classmethod
    def choose_chunk(cls, inputs: HeadInputs, chunk_tokens: int | None) -> TileShape:
        """A tile as high as the chunk whose logits are kept for one pass, with little besides."""
        rows = _chunk_tokens(inputs, chunk_tokens)
        return cls._within(inputs, rows, int(_ONE_PASS_SHARE * rows * inputs.vocab_size))

    @classmethod
    def _within(cls, inputs: HeadInputs, rows: int, allowed: int) -> TileShape:
        # Up to two tiles and two blocks of a weight's gradient are alive at once.
        rows = min(rows, max(1, len(inputs.targets)))
        alive_per_column = 2 * (rows + inputs.width)
        entries = _tile_entries(inputs)
        fitting = min(_tile_columns(inputs), entries // rows, entries // inputs.width, allowed // alive_per_column)
        # Multiples of 64 suit vector and matrix units.
        return cls(rows, min(inputs.vocab_size, max(_COLUMN_STEP, fitting // _COLUMN_STEP * _COLUMN_STEP)))

    def blocks(self, inputs: HeadInputs) -> Iterator[VocabBlock]:
        """The vocabulary, block after block; one is alive at a time."""
        for start in range(0, inputs.vocab_size, self.columns):
            yield inputs.block(start, min(start + self.columns, inputs.vocab_size))

    def slices(self, count: int) -> list[slice]:
        """Runs of at most `rows` out of `count`."""
        return [slice(start, min(start + self.rows, count)) for start in range(0, count, self.rows)]


@dataclass(frozen=True)
class RowStatistics:
    """What is known of each row's distribution, all `[rows]`, in units of tile entries where not said otherwise.

    Attributes:
        peak: Largest entry.
        total: Sum of `exp(slope * (entry - peak))`.
        target: The target's entry.
        weighted: Sum of `exponent * exp(exponent)` with the exponent above, for the entropy; None without.
    """

    peak: Tensor
    total: Tensor
    target: Tensor
    weighted: Tensor | None

    @classmethod
    def empty(cls, count: int, inputs: HeadInputs, *, entropy: bool) -> RowStatistics:
        """Statistics of `count` rows of which nothing has been seen."""
        zeros = torch.zeros(count, dtype=inputs.compute_dtype, device=inputs.weights[0].device)
        peak = torch.full_like(zeros, torch.finfo(zeros.dtype).min)
        return cls(peak, zeros, torch.zeros_like(zeros), torch.zeros_like(zeros) if entropy else None)

    def map(self, change: Callable[[Tensor], Tensor]) -> RowStatistics:
        """The same change made to every field."""
        weighted = None if self.weighted is None else change(self.weighted)
        return RowStatistics(change(self.peak), change(self.total), change(self.target), weighted)

    def stack(self) -> Tensor:
        """All fields as one tensor `[3 or 4, rows]`."""
        fields = (self.peak, self.total, self.target, self.weighted)
        return torch.stack([field for field in fields if field is not None])

    @classmethod
    def unstack(cls, fields: Tensor) -> RowStatistics:
        """The statistics that `stack` made one tensor of."""
        return cls(fields[0], fields[1], fields[2], fields[3] if len(fields) == 4 else None)

    def __getitem__(self, rows: Rows) -> RowStatistics:
        return self.map(lambda values: take(values, rows))

    def absorb(self, tile: Tensor, slope: Tensor | float, inside: Tensor, columns: Tensor) -> None:
        """Take a tile into account, in place; the tile is used up.

        Args:
            tile: Entries `[rows, columns]`.
            slope: Number or `[rows, 1]`, see `HeadInputs.slope`.
            inside: Bool `[rows]`, whether the target is in this tile.
            columns: Int64 `[rows]`, its column.
        """
        self.target.copy_(torch.where(inside, tile.gather(1, columns.unsqueeze(1)).squeeze(1), self.target))
        peak = torch.maximum(self.peak, tile.amax(1))
        row_slope = slope.squeeze(1) if isinstance(slope, Tensor) else slope
        shift = ((self.peak - peak) * row_slope).clamp_min_(_LOWEST_EXPONENT)
        decay = shift.exp()
        exponents = _scale(tile.sub_(peak.unsqueeze(1)), slope)
        if self.weighted is None:
            self.total.mul_(decay).add_(exponents.exp_().sum(1))
        else:
            powers = exponents.exp()
            self.weighted.addcmul_(shift, self.total).mul_(decay)
            self.total.mul_(decay).add_(powers.sum(1))
            self.weighted.add_(powers.mul_(exponents.clamp_min_(_LOWEST_EXPONENT)).sum(1))
        self.peak.copy_(peak)

    def log_probs(self, slope: Tensor | float) -> Tensor:
        """Log-probabilities of the targets, never above zero: no target tops the peak, and `total` is at least 1."""
        row_slope = slope.squeeze(1) if isinstance(slope, Tensor) else slope
        return (self.target - self.peak) * row_slope - self.total.log()

    def entropy(self) -> Tensor | None:
        """Entropies in nats, never below zero: no exponent is above it. None if they were not asked for."""
        return None if self.weighted is None else self.total.log() - self.weighted / self.total


@dataclass(frozen=True)
class RowGradients:
    """Upstream gradients of some rows, all `[rows]`: of the log-probability, and of the entropy (None without)."""

    log_probs: Tensor
    entropy: Tensor | None

    def __getitem__(self, rows: Rows) -> RowGradients:
        entropy = None if self.entropy is None else take(self.entropy, rows)
        return RowGradients(take(self.log_probs, rows), entropy)

    def live(self, scored: Tensor) -> Tensor | None:
        """Indices of the `scored` rows with any upstream gradient, or None if that is all rows."""
        alive = self.log_probs != 0
        if self.entropy is not None:
            alive |= self.entropy != 0
        indices = (alive & scored).nonzero().squeeze(1)
        return None if len(indices) == len(alive) else indices


def _scale(tile: Tensor, slope: Tensor | float) -> Tensor:
    return tile if isinstance(slope, float) and slope == 1.0 else tile.mul_(slope)


def differentiate(
    tile: Tensor,
    statistics: RowStatistics,
    upstream: RowGradients,
    inputs: HeadInputs,
    rows: Rows,
    target: tuple[Tensor, Tensor],
) -> Tensor:
    """Turn a tile into the gradient with respect to `sum_i hiddens[i] @ weights[i].T + bias`; the tile is used up.

    Args:
        tile: Entries `[rows, columns]`.
        statistics: Of these rows, complete.
        upstream: Of these rows.
        inputs: The call's inputs.
        rows: Which of its tokens the rows are.
        target: Whether each row's target is in the tile, and its column, both `[rows]`.
    """
    inner = inputs.inner_slope(rows)
    inner = inner.squeeze(1) if isinstance(inner, Tensor) else inner
    bend = None if inputs.softcap is None else tile.square().neg_().add_(1.0)
    exponents = _scale(tile.sub_(statistics.peak.unsqueeze(1)), inputs.slope(rows))
    of_log_prob = upstream.log_probs * inner
    if upstream.entropy is None or statistics.weighted is None:
        gradient = exponents.exp_().mul_((-of_log_prob / statistics.total).unsqueeze(1))
    else:
        of_entropy = upstream.entropy * inner
        gradient = exponents.exp()
        constant = of_log_prob - of_entropy * statistics.weighted / statistics.total
        exponents.clamp_min_(_LOWEST_EXPONENT).mul_(of_entropy.unsqueeze(1)).add_(constant.unsqueeze(1))
        gradient.mul_(exponents).mul_((-1.0 / statistics.total).unsqueeze(1))
    inside, columns = target
    gradient.scatter_add_(1, columns.unsqueeze(1), torch.where(inside, of_log_prob, 0.0).unsqueeze(1))
    return gradient if bend is None else gradient.mul_(bend)


def full_logits(inputs: HeadInputs, shape: TileShape) -> Tensor:
    """All logits `[M, vocab_size]`, at temperature 1."""
    slope = inputs.slope(slice(None))
    logits = torch.empty(
        len(inputs.targets), inputs.vocab_size, dtype=inputs.compute_dtype, device=inputs.targets.device
    )
    for block in shape.blocks(inputs):
        for part in shape.slices(len(inputs.targets)):
            logits[part, block.columns] = inputs.tile(inputs.hidden_rows(part), block) * slope
    return logits
