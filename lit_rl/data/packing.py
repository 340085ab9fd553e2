"""Rows: trajectory lengths to rows of a fixed capacity, by first-fit decreasing in near-linear time."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lit_rl.options import as_integer

Lengths = Sequence[int] | npt.NDArray[np.integer[Any]] | Tensor
Overlong = Literal["raise", "drop", "truncate"]
Empty = Literal["raise", "skip"]


@dataclass(frozen=True, kw_only=True)
class PackingLosses:
    """What did not make it into the rows, counted.

    Attributes:
        dropped_trajectories: Left out because they were too long.
        dropped_tokens: All tokens of those.
        truncated_trajectories: Cut to the capacity.
        truncated_tokens: Tokens cut off their ends.
        skipped_trajectories: Left out because they have no tokens.
    """

    dropped_trajectories: int = 0
    dropped_tokens: int = 0
    truncated_trajectories: int = 0
    truncated_tokens: int = 0
    skipped_trajectories: int = 0

    def __bool__(self) -> bool:
        """True when anything was dropped, cut or skipped."""
        return self != PackingLosses()

    def __str__(self) -> str:
        parts = [
            (self.dropped_trajectories, f"dropped {self.dropped_trajectories} ({self.dropped_tokens} tokens)"),
            (self.truncated_trajectories, f"cut {self.truncated_trajectories} (by {self.truncated_tokens} tokens)"),
            (self.skipped_trajectories, f"skipped {self.skipped_trajectories} without tokens"),
        ]
        return "; ".join(text for count, text in parts if count) or "nothing lost"


class FittedLengths(NamedTuple):
    """What `fit_lengths` returns.

    Attributes:
        kept: int64 [k]; ascending indices of the trajectories that stay.
        lengths: int64 [k]; their lengths, after cutting.
        losses: What was dropped, cut or skipped.
    """

    kept: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    losses: PackingLosses


def as_lengths(lengths: Lengths, name: str = "lengths") -> npt.NDArray[np.int64]:
    """Copies lengths into an int64 array and refuses everything that is not an integer.

    Args:
        lengths: [n] list, tuple, NumPy array or tensor of integers.
        name: What error messages call the argument.

    Returns:
        int64 [n], never sharing memory with the argument.

    Raises:
        TypeError: Not a sequence, or booleans, floats or anything else that is not an integer in it.
        ValueError: More than one dimension, or a negative length.

    Example:
        >>> as_lengths((3, 5)).tolist()
        [3, 5]
    """
    if isinstance(lengths, Tensor):
        lengths = lengths.detach().cpu().numpy()
    if isinstance(lengths, np.ndarray):
        if lengths.ndim != 1:
            raise ValueError(
                f"`{name}` has shape {list(lengths.shape)}; expected one dimension, one number a trajectory"
            )
        if lengths.size and lengths.dtype.kind not in "iu":
            raise TypeError(f"`{name}` has dtype {lengths.dtype}; expected integers")
        values = lengths.astype(np.int64)
    else:
        values = np.array(_integers(lengths, name), dtype=np.int64)
    if values.size and values.min() < 0:
        index = int(np.argmax(values < 0))
        raise ValueError(f"`{name}`[{index}] is {values[index]}; expected at least 0")
    return values


def _integers(lengths: Any, name: str) -> list[int]:
    if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Sequence):
        raise TypeError(f"`{name}` must be a list, tuple, array or tensor of integers, got {type(lengths).__name__}")
    if set(map(type, lengths)) <= {int}:
        return list(lengths)
    values = []
    for index, value in enumerate(lengths):
        # A list that mixes booleans or floats with integers would become an integer array without a word.
        boolean = isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")) == "torch.bool"
        try:
            values.append(operator.index(value))
        except TypeError:
            boolean = True
        if boolean:
            raise TypeError(f"`{name}`[{index}] is {value!r} ({type(value).__name__}); expected an integer")
    return values


def as_count(value: Any, name: str) -> int:
    """An integer of at least 1, or an error that names the argument.

    Args:
        value: What the caller gave.
        name: Of the argument.

    Returns:
        The value as an `int`.

    Raises:
        TypeError: Not an integer (booleans are none).
        ValueError: Below 1.

    Example:
        >>> as_count(8, "max_tokens")
        8
    """
    count = as_integer(value)
    if count is None:
        raise TypeError(f"`{name}` must be an integer of at least 1, got {value!r} ({type(value).__name__})")
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}")
    return count


def check_choice(value: Any, name: str, allowed: tuple[str, ...]) -> None:
    """Refuses a value that is not among the documented ones.

    Args:
        value: What the caller gave.
        name: Of the argument.
        allowed: The documented values.

    Raises:
        ValueError: `value` is not one of them.

    Example:
        >>> check_choice("drop", "overlong", ("raise", "drop"))
    """
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}")


def fit_lengths(
    lengths: Lengths,
    limit: int,
    overlong: Overlong = "raise",
    empty: Empty = "raise",
    *,
    name: str = "limit",
) -> FittedLengths:
    """Decides which trajectories fit a capacity, before anything is packed; a trajectory is never split.

    Args:
        lengths: [n] tokens of each trajectory.
        limit: The most tokens that one may have.
        overlong: For longer ones: "raise"; "drop" leaves them out; "truncate" keeps their first `limit` tokens.
        empty: For those without tokens: "raise"; "skip" leaves them out.
        name: What error messages call the limit.

    Returns:
        Who stays, with which length, and the counts of everything that was lost.

    Raises:
        TypeError: A length or the limit is not an integer.
        ValueError: A length is 0 or above the limit (unless an option says what to do with it), or negative.

    Example:
        >>> kept, lengths, losses = fit_lengths([5, 1, 9], 8, "drop")
        >>> kept.tolist(), lengths.tolist(), str(losses)
        ([0, 1], [5, 1], 'dropped 1 (9 tokens)')
        >>> str(fit_lengths([5, 1, 9], 8, "truncate").losses)
        'cut 1 (by 1 tokens)'
    """
    values = as_lengths(lengths)
    limit = as_count(limit, name)
    check_choice(overlong, "overlong", ("raise", "drop", "truncate"))
    check_choice(empty, "empty", ("raise", "skip"))
    has_none, too_long = values == 0, values > limit
    if empty == "raise" and has_none.any():
        raise ValueError(
            f"trajectory {int(np.argmax(has_none))} has no tokens (length 0; {int(has_none.sum())} such in all); "
            "leave it out, or use `empty='skip'` where that is offered"
        )
    if overlong == "raise" and too_long.any():
        index = int(np.argmax(too_long))
        raise ValueError(
            f"trajectory {index} has {values[index]} tokens, but `{name}` allows at most {limit} "
            f"({int(too_long.sum())} such in all, the longest has {values.max()}); raise `{name}`, or use "
            "`overlong='drop'` or `overlong='truncate'` where that is offered (`fit_lengths` does)"
        )
    drop = overlong == "drop"
    kept = np.flatnonzero(~has_none & ~too_long if drop else ~has_none)
    excess = int((values[too_long] - limit).sum())
    losses = PackingLosses(
        dropped_trajectories=int(too_long.sum()) if drop else 0,
        dropped_tokens=int(values[too_long].sum()) if drop else 0,
        truncated_trajectories=0 if drop else int(too_long.sum()),
        truncated_tokens=0 if drop else excess,
        skipped_trajectories=int(has_none.sum()),
    )
    return FittedLengths(kept, np.minimum(values[kept], limit), losses)


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit of lengths that never grow: each goes into the first row that has room for it.

    Because lengths only shrink, a row that has no room waits until the length has come down to its room; rows that
    have room stand in a heap by their number. That makes n placements O(n log n) without a search tree.

    Args:
        lengths: [n], sorted from long to short, none above the capacity.
        capacity: Tokens that a row holds.

    Returns:
        Positions (into `lengths`) per row; no row is empty.

    Example:
        >>> first_fit([5, 4, 3, 2, 2], 8)
        [[0, 2], [1, 3, 4]]
    """
    rows: list[list[int]] = []
    room: list[int] = []
    ready: list[int] = []
    waiting: list[tuple[int, int]] = []
    for position, length in enumerate(lengths):
        while waiting and -waiting[0][0] >= length:
            heappush(ready, heappop(waiting)[1])
        if not ready:
            ready.append(len(rows))
            rows.append([])
            room.append(capacity)
        row = ready[0]
        rows[row].append(position)
        room[row] -= length
        if room[row] < length:
            heappop(ready)
            heappush(waiting, (-room[row], row))
    return rows


def pack_sequences(
    lengths: Lengths, row_tokens: int, *, overlong: Overlong = "raise", empty: Empty = "raise"
) -> list[list[int]]:
    """Packs trajectories into rows by first-fit decreasing: longest first, each into the first row with room.

    The same lengths always give the same rows; equal lengths go in the order of their indices. Uses at most
    11/9 of the fewest rows possible, plus 6/9 (Dosa, 2007).

    Args:
        lengths: [n] tokens of each trajectory.
        row_tokens: Tokens that a row holds.
        overlong: For trajectories above `row_tokens`: "raise"; "drop" leaves them out; "truncate" counts them with
            `row_tokens` tokens, and whoever builds the row cuts them. Both warn with the counts, which
            `fit_lengths` gives as numbers.
        empty: For trajectories without tokens: "raise"; "skip" leaves them out, with a warning.

    Returns:
        Indices of trajectories per row. No row is empty, and without lengths there is no row.

    Raises:
        TypeError: A length or `row_tokens` is not an integer.
        ValueError: A trajectory is too long, empty or negative, found before any row is built.

    Example:
        >>> pack_sequences([3, 5, 2, 4, 2], 8)
        [[1, 0], [3, 2, 4]]
    """
    fitted = fit_lengths(lengths, row_tokens, overlong, empty, name="row_tokens")
    if fitted.losses:
        warnings.warn(f"packing trajectories into rows of {row_tokens} tokens: {fitted.losses}", stacklevel=2)
    order = np.argsort(-fitted.lengths, kind="stable")
    rows = first_fit(fitted.lengths[order].tolist(), int(row_tokens))
    indices = fitted.kept[order].tolist()
    return [[indices[position] for position in row] for row in rows]
