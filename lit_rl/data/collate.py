"""Trajectories laid out as one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_rl.data.batch import Layout, PackedBatch
from lit_rl.trajectory import Trajectory


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
    )


def filler_batch(*, max_tokens: int | None = None) -> PackedBatch:
    """A microbatch of one token and no scored token: keeps a rank in step and gives zero gradients.

    Args:
        max_tokens: Recorded in the batch.

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
