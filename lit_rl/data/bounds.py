"""How few rows can hold given lengths: a lower bound, and a bounded exact search for small cases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

# Largest case that is searched, and the placements tried before giving up: milliseconds, and the same everywhere.
SEARCHED_LENGTHS = 32
SEARCHED_PLACEMENTS = 5_000


def fewest_rows_bound(lengths: npt.NDArray[np.int64], capacity: int) -> int:
    """A number of rows that no packing can go below.

    For every threshold t of at most half the capacity, lengths above capacity - t stand alone, those above half the
    capacity need a row each, and those from t to half fill what these leave (bound L2 of Martello and Toth, 1990).

    Args:
        lengths: int64 [n], in any order, none above the capacity.
        capacity: Tokens that a row holds.

    Returns:
        The largest of the bounds over all t; 0 without lengths.

    Example:
        >>> fewest_rows_bound(np.array([6, 6, 6, 4]), 10)
        3
    """
    ascending = np.sort(lengths)
    if not ascending.size:
        return 0
    sums = np.concatenate([[0], np.cumsum(ascending)])
    above_half = int(np.searchsorted(ascending, capacity // 2, side="right"))
    thresholds = np.unique(np.concatenate([[0], ascending[:above_half]]))
    alone_from = np.searchsorted(ascending, capacity - thresholds, side="right")
    small_from = np.searchsorted(ascending, thresholds, side="left")
    shared = alone_from - above_half
    room_beside = shared * capacity - (sums[alone_from] - sums[above_half])
    small = sums[above_half] - sums[small_from]
    extra = np.maximum(0, -((room_beside - small) // capacity))
    return int((ascending.size - above_half + extra).max())


def search_rows(lengths: Sequence[int], capacity: int, rows: int) -> list[list[int]] | None:
    """Looks for a packing into at most `rows` rows, fullest fitting row first, with a limit on the work.

    A branch is left as soon as the room that can no longer be used exceeds what the rows have to spare.

    Args:
        lengths: [n], sorted from long to short; more than `SEARCHED_LENGTHS` are not searched.
        capacity: Tokens that a row holds.
        rows: The most rows allowed.

    Returns:
        Positions (into `lengths`) per row, without empty rows; `None` when none was found.

    Example:
        >>> search_rows([5, 4, 3, 3, 3, 2], 10, 2)
        [[0, 2, 5], [1, 3, 4]]
    """
    spare = rows * capacity - sum(lengths)
    if spare < 0 or len(lengths) > SEARCHED_LENGTHS:
        return None
    room = [capacity] * rows
    content: list[list[int]] = [[] for _ in range(rows)]
    tries = SEARCHED_PLACEMENTS

    def place(position: int, spare: int) -> bool:
        nonlocal tries
        if position == len(lengths):
            return True
        tried = set()
        for row in sorted(range(rows), key=room.__getitem__):
            left = room[row] - lengths[position]
            if left < 0 or left in tried:
                continue
            tried.add(left)
            tries -= 1
            wasted = left if left < lengths[-1] else 0
            if tries < 0 or wasted > spare:
                continue
            room[row] = left
            content[row].append(position)
            if place(position + 1, spare - wasted):
                return True
            content[row].pop()
            room[row] += lengths[position]
        return False

    return [row for row in content if row] if place(0, spare) else None
