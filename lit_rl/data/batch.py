"""One microbatch: segments laid out in rows, and everything the loss needs about each scored token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from lit_rl.trajectory import Trajectory

Layout = Literal["packed", "padded"]
_PER_SCORED_TOKEN = (
    "scored",
    "predictors",
    "scored_segments",
    "temperature",
    "advantages",
    "weights",
    "sampler_log_probs",
    "old_log_probs",
)


class PackedBatch:
    """One microbatch: R rows of L positions holding S segments with M scored tokens. Immutable.

    A *flat index* is `row * L + column`. What an objective reads has one entry per scored token, so that masked
    and padded positions are not there to leak; `grid` lays such values out over the positions.

    Args:
        input_ids: int64 [R, L] token ids; 0 where padded.
        position_ids: int64 [R, L] positions, restarting at 0 in every segment.
        segment_ids: int64 [R, L] index of the segment within its row, -1 where padded.
        segment_starts: int64 [S] flat index of each segment's first token, increasing.
        segment_lengths: int64 [S] tokens of each segment, at least 1.
        trajectory_index: int64 [S] the caller's index of each trajectory; -1 in a filler.
        scored: int64 [M] flat index of each scored token.
        predictors: int64 [M] flat index of the hidden state that predicts it.
        scored_segments: int64 [M] the segment, in [0, S), of each scored token.
        temperature: float32 [M] sampling temperature.
        advantages: float64 [M] or `None`.
        weights: float64 [M] what each token's loss is worth in its step (see `lit_rl.loss_weights`), or `None`.
        sampler_log_probs: float32 [M] log-probabilities of the sampler in nats, or `None`.
        old_log_probs: float32 [M] log-probabilities before the iteration's first update in nats, or `None`.
        layout: "packed", or "padded" with one segment per row and padding on the right.
        max_tokens: The token budget this microbatch was planned for, in positions.
        step_live_tokens: Live tokens of the whole optimizer step over all ranks and microbatches.

    Example:
        >>> batch = collate([Trajectory([10, 11, 12], [0, 1, 1], 1.0), Trajectory([20, 21], [0, 1], 0.0)])
        >>> batch.position_ids.tolist(), batch.targets.tolist(), batch.predictors.tolist()
        ([[0, 1, 2, 0, 1]], [11, 12, 21], [0, 1, 3])
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    segment_starts: Tensor
    segment_lengths: Tensor
    trajectory_index: Tensor
    scored: Tensor
    predictors: Tensor
    scored_segments: Tensor
    temperature: Tensor
    advantages: Tensor | None
    weights: Tensor | None
    sampler_log_probs: Tensor | None
    old_log_probs: Tensor | None
    layout: Layout
    max_tokens: int | None
    step_live_tokens: int | None

    # Not a dataclass: Lightning's precision plugins would rebuild one with advantages and weights in half precision.
    def __init__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        segment_starts: Tensor,
        segment_lengths: Tensor,
        trajectory_index: Tensor,
        scored: Tensor,
        predictors: Tensor,
        scored_segments: Tensor,
        temperature: Tensor,
        advantages: Tensor | None = None,
        weights: Tensor | None = None,
        sampler_log_probs: Tensor | None = None,
        old_log_probs: Tensor | None = None,
        layout: Layout = "packed",
        max_tokens: int | None = None,
        step_live_tokens: int | None = None,
    ) -> None:
        fields = self.__dict__
        fields.update(input_ids=input_ids, position_ids=position_ids, segment_ids=segment_ids)
        fields.update(segment_starts=segment_starts, segment_lengths=segment_lengths)
        fields.update(trajectory_index=trajectory_index, scored=scored, predictors=predictors)
        fields.update(scored_segments=scored_segments, temperature=temperature, advantages=advantages)
        fields.update(weights=weights, sampler_log_probs=sampler_log_probs, old_log_probs=old_log_probs)
        fields.update(layout=layout, max_tokens=max_tokens, step_live_tokens=step_live_tokens)
        _check_shapes(self, ("position_ids", "segment_ids"), input_ids.shape, "[rows, width] like `input_ids`")
        segments = segment_starts.shape
        _check_shapes(self, ("segment_lengths", "trajectory_index"), segments, "[segments] like `segment_starts`")
        _check_shapes(self, _PER_SCORED_TOKEN[1:], scored.shape, "[scored tokens] like `scored`")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a microbatch is immutable; use `batch.replace({name}=...)` for a changed copy")

    def __repr__(self) -> str:
        return (
            f"PackedBatch(layout={self.layout!r}, positions={list(self.input_ids.shape)}, "
            f"segments={self.segment_starts.numel()}, scored={self.num_scored})"
        )

    @property
    def targets(self) -> Tensor:
        """int64 [M] the ids that the scored tokens have."""
        return self.input_ids.flatten()[self.scored]

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [S+1] cumulative lengths of the segments, padding left out."""
        ends = self.segment_lengths.cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)

    @property
    def num_positions(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding excluded."""
        return int(self.segment_lengths.sum())

    @property
    def num_scored(self) -> int:
        """Scored tokens."""
        return self.scored.numel()

    @property
    def is_filler(self) -> bool:
        """True when the microbatch only keeps this rank in step with the others."""
        return bool((self.trajectory_index < 0).all())

    def grid(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Lays one value per scored token out over the positions.

        Args:
            values: [M] any dtype.
            fill: What stands at positions that are not scored.

        Returns:
            [R, L] of the dtype of `values`.

        Example:
            >>> batch = collate([Trajectory([5, 6, 7], [0, 0, 1], 1.0)])
            >>> batch.grid(torch.tensor([2.5])).tolist()
            [[0.0, 0.0, 2.5]]
        """
        grid = values.new_full((self.num_positions,), fill)
        return grid.index_put((self.scored,), values).view_as(self.input_ids)

    def scored_slice(self, tokens: slice) -> PackedBatch:
        """The same microbatch seen through some of its scored tokens only.

        Args:
            tokens: Which of the M scored tokens to keep.

        Returns:
            A batch whose per-scored-token fields are views of the slice; everything else is shared.
        """
        kept = {name: value[tokens] for name in _PER_SCORED_TOKEN if (value := getattr(self, name)) is not None}
        return self.replace(**kept)

    def replace(self, **changes: Any) -> PackedBatch:
        """A copy with some fields changed; tensors that are not named are shared."""
        return PackedBatch(**{**self.__dict__, **changes})

    def like(self, log_probs: Tensor) -> PackedBatch:
        """The same microbatch with its floating-point fields in the dtype of `log_probs`, as objectives see it."""
        return self._map(lambda tensor: tensor.to(log_probs.dtype) if tensor.is_floating_point() else tensor)

    def to(self, device: torch.device | str, non_blocking: bool = False, **_: Any) -> PackedBatch:
        """Moves every tensor; what Lightning calls on each batch."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """Pins every tensor; what a `DataLoader` with `pin_memory=True` calls."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Any) -> PackedBatch:
        return self.replace(**{k: function(v) for k, v in self.__dict__.items() if isinstance(v, Tensor)})


def _check_shapes(batch: PackedBatch, names: Sequence[str], shape: torch.Size, expected: str) -> None:
    for name in names:
        value = getattr(batch, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"`{name}` has shape {list(value.shape)}, expected {list(shape)}: {expected}")


def collate(
    trajectories: Sequence[Trajectory],
    *,
    layout: Layout = "packed",
    rows: Sequence[Sequence[int]] | None = None,
    row_tokens: int | None = None,
    indices: Sequence[int] | None = None,
    advantages: Sequence[float] | Tensor | None = None,
    weights: Sequence[float] | Tensor | None = None,
    old_log_probs: Sequence[Tensor] | None = None,
    max_tokens: int | None = None,
    step_live_tokens: int | None = None,
) -> PackedBatch:
    """Lays trajectories out as one microbatch.

    Args:
        trajectories: At least one.
        layout: "packed" puts several segments into a row; "padded" one, with padding on the right.
        rows: For "packed": which trajectories (by position in `trajectories`) stand in each row, as
            `pack_sequences` gives them; `None` makes one flat row without any padding.
        row_tokens: Width of the rows in tokens; `None` is the fullest row's.
        indices: The caller's index of each trajectory; `None` counts from 0.
        advantages: One per trajectory, carried by each of its scored tokens.
        weights: One per trajectory: what each of its scored tokens is worth in the step.
        old_log_probs: One [L] tensor per trajectory, aligned with its `token_ids`.
        max_tokens: Recorded in the batch: the token budget in positions.
        step_live_tokens: Recorded in the batch: live tokens of the whole step.

    Returns:
        The microbatch, on the CPU.

    Raises:
        ValueError: No trajectory was given, a per-trajectory argument has another length, a row does not fit
            `row_tokens`, or only some trajectories carry sampler log-probabilities.

    Example:
        >>> pair = [Trajectory([1, 2, 3], [0, 1, 1], 1.0), Trajectory([4, 5], [0, 1], 0.0)]
        >>> collate(pair, layout="padded").input_ids.tolist()
        [[1, 2, 3], [4, 5, 0]]
        >>> collate(pair, rows=[[0, 1]], row_tokens=8).segment_ids.tolist()
        [[0, 0, 0, 1, 1, -1, -1, -1]]
    """
    if not trajectories:
        raise ValueError("`trajectories` is empty; a microbatch holds at least one (see `filler_batch`)")
    row_lists = _rows(len(trajectories), layout, rows)
    order = [index for row in row_lists for index in row]
    lengths = torch.tensor([len(trajectories[index]) for index in order])
    starts, width = _starts(row_lists, lengths, row_tokens)
    ordered = [trajectories[index] for index in order]
    # Flat index of every real token: where its segment starts plus where it stands in it.
    segment_of = torch.repeat_interleave(torch.arange(len(order)), lengths)
    position = torch.arange(int(lengths.sum())) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    flat = starts[segment_of] + position
    within_row = torch.tensor([i for row in row_lists for i in range(len(row))])
    scored = torch.cat([t.scored for t in ordered])
    shape = (len(row_lists), width)
    return PackedBatch(
        input_ids=_scatter(torch.cat([t.token_ids for t in ordered]), flat, shape, 0),
        position_ids=_scatter(position, flat, shape, 0),
        segment_ids=_scatter(within_row[segment_of], flat, shape, -1),
        segment_starts=starts,
        segment_lengths=lengths,
        trajectory_index=torch.tensor(order if indices is None else [int(indices[index]) for index in order]),
        scored=flat[scored],
        predictors=flat[scored] - 1,
        scored_segments=segment_of[scored],
        temperature=torch.cat([t.temperature for t in ordered])[scored],
        advantages=_spread(advantages, "advantages", order, segment_of[scored]),
        weights=_spread(weights, "weights", order, segment_of[scored]),
        sampler_log_probs=_sampler_log_probs(ordered, scored),
        old_log_probs=None if old_log_probs is None else torch.cat([old_log_probs[i] for i in order])[scored],
        layout=layout,
        max_tokens=max_tokens,
        step_live_tokens=step_live_tokens,
    )


def filler_batch(*, max_tokens: int | None = None, step_live_tokens: int | None = None) -> PackedBatch:
    """A microbatch of one token and no scored token: keeps a rank in step and gives zero gradients.

    Args:
        max_tokens: Recorded in the batch.
        step_live_tokens: Recorded in the batch.

    Returns:
        The filler; `is_filler` is true.

    Example:
        >>> filler_batch().num_scored
        0
    """
    batch = collate(
        [Trajectory([0], [False], 0.0)],
        indices=[-1],
        advantages=[0.0],
        weights=[0.0],
        max_tokens=max_tokens,
        step_live_tokens=step_live_tokens,
    )
    empty = torch.zeros(0)
    return batch.replace(sampler_log_probs=empty, old_log_probs=empty)


def _rows(count: int, layout: Layout, rows: Sequence[Sequence[int]] | None) -> list[list[int]]:
    if layout == "padded":
        if rows is not None:
            raise ValueError('`rows` belongs to layout="packed"; in the padded layout every trajectory is a row')
        return [[index] for index in range(count)]
    if layout != "packed":
        raise ValueError(f'`layout` must be "packed" or "padded", got {layout!r}')
    if rows is None:
        return [list(range(count))]
    row_lists = [list(row) for row in rows]
    if sorted(index for row in row_lists for index in row) != list(range(count)) or not all(row_lists):
        raise ValueError(f"`rows` must name each of the {count} trajectories once and hold no empty row, got {rows}")
    return row_lists


def _starts(rows: list[list[int]], lengths: Tensor, row_tokens: int | None) -> tuple[Tensor, int]:
    counts = torch.tensor([len(row) for row in rows])
    row_of = torch.repeat_interleave(torch.arange(len(rows)), counts)
    filled = torch.zeros(len(rows), dtype=torch.int64).index_add(0, row_of, lengths)
    width = int(filled.max()) if row_tokens is None else row_tokens
    if int(filled.max()) > width:
        row = int(filled.argmax())
        raise ValueError(f"row {row} holds {int(filled[row])} tokens, but `row_tokens` allows at most {width}")
    before_in_row = lengths.cumsum(0) - lengths - (filled.cumsum(0) - filled)[row_of]
    return row_of * width + before_in_row, width


def _scatter(values: Tensor, flat: Tensor, shape: tuple[int, int], fill: int) -> Tensor:
    return torch.full((shape[0] * shape[1],), fill, dtype=torch.int64).index_put((flat,), values).view(shape)


def _spread(values: Any, name: str, order: list[int], segment_of_scored: Tensor) -> Tensor | None:
    if values is None:
        return None
    if len(values) != len(order):
        raise ValueError(f"`{name}` has {len(values)} entries for {len(order)} trajectories; give one per trajectory")
    per_segment = torch.as_tensor(values, dtype=torch.float64)[torch.tensor(order)]
    return per_segment[segment_of_scored]


def _sampler_log_probs(trajectories: Sequence[Trajectory], scored: Tensor) -> Tensor | None:
    with_them = [t for t in trajectories if t.log_probs is not None]
    if not with_them:
        return None
    if len(with_them) < len(trajectories):
        missing = next(index for index, t in enumerate(trajectories) if t.log_probs is None)
        raise ValueError(
            f"segment {missing} (task {trajectories[missing].task!r}) has no `log_probs` while others have; "
            "give the sampler's log-probabilities for all trajectories or for none"
        )
    return torch.cat([t.log_probs for t in with_them if t.log_probs is not None])[scored]
