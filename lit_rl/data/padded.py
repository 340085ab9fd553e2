"""Padded microbatches of trajectories of similar length: count x longest stays within the budget.

Positions below always refer to trajectories sorted from long to short, so that a microbatch is a run of positions
and its first one is its longest.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Halvings of the cost level: enough to tell trajectories apart that differ by a token in a million.
LEVEL_HALVINGS = 24
# Above this many comparisons the boundaries are not optimised; only very wide choices get there.
BOUNDARY_COMPARISONS = 20_000_000


def most_per_microbatch(lengths: Integers, max_tokens: int) -> Integers:
    """How many trajectories fit in one microbatch whose longest is the one at each position.

    Args:
        lengths: int64 [n], sorted from long to short, at least 1.
        max_tokens: The most positions of a microbatch, padding included.

    Returns:
        int64 [n], at least 1.

    Example:
        >>> most_per_microbatch(np.array([8, 4, 3]), 8).tolist()
        [1, 2, 2]
    """
    return np.maximum(max_tokens // lengths, 1)


def fewest_padded(limits: Integers) -> int:
    """The fewest padded microbatches: each takes as many as it may, from the longest down, which is optimal.

    Args:
        limits: int64 [n], how many may go in a microbatch that starts at each position.

    Returns:
        Their number.

    Example:
        >>> fewest_padded(np.array([1, 2, 2]))
        2
    """
    return len(_greedy(limits)) - 1


def _greedy(limits: Integers) -> list[int]:
    steps, boundaries = limits.tolist(), [0]
    while boundaries[-1] < len(steps):
        boundaries.append(min(len(steps), boundaries[-1] + steps[boundaries[-1]]))
    return boundaries


def group_padded(lengths: Integers, costs: Floats, max_tokens: int, count: int, balance: bool) -> list[list[int]]:
    """Groups trajectories into exactly `count` padded microbatches with little padding.

    Args:
        lengths: int64 [n], sorted from long to short, at least 1.
        costs: float64 [n], of each trajectory alone.
        max_tokens: The most positions of a microbatch, padding included.
        count: Microbatches wanted, at least `fewest_padded`.
        balance: Whether the dearest microbatch is first made as cheap as `count` allows.

    Returns:
        `count` lists of positions; empty ones, last, only where there are too few trajectories.

    Example:
        >>> group_padded(np.array([8, 4, 4, 1]), np.array([8.0, 4, 4, 1]), 8, 3, False)
        [[0], [1, 2], [3]]
    """
    if len(lengths) <= count:
        return [[position] for position in range(len(lengths))] + [[] for _ in range(count - len(lengths))]
    limits = most_per_microbatch(lengths, max_tokens)
    if balance:
        limits = _cheapest_limits(limits, costs, count)
    boundaries = _least_padding(lengths, limits, count) or _split(_greedy(limits), lengths, count)
    return [list(range(start, end)) for start, end in pairwise(boundaries)]


def _cheapest_limits(limits: Integers, costs: Floats, count: int) -> Integers:
    # A microbatch of more than one trajectory may cost at most the level: the lowest that still needs only `count`.
    low, high = 0.0, float((limits * costs).max())
    best = limits
    for _ in range(LEVEL_HALVINGS):
        level = (low + high) / 2
        affordable = np.floor(level / np.maximum(costs, 1e-300)).clip(1, len(limits)).astype(np.int64)
        # Kept from falling behind along the positions, as `max_tokens // length` is by itself.
        tried = np.minimum(limits, np.maximum.accumulate(affordable))
        if fewest_padded(tried) <= count:
            best, high = tried, level
        else:
            low = level
    return best


def _least_padding(lengths: Integers, limits: Integers, count: int) -> list[int] | None:
    # Shortest path over boundaries. Boundary m can only lie between what m full microbatches reach from the left and
    # what the other `count` - m must still cover on the right, so few positions are compared.
    total = len(lengths)
    reach = np.arange(total) + limits
    latest, earliest = [0], [total]
    for done in range(count):
        furthest = int(reach[latest[-1]]) if latest[-1] < total else total
        latest.append(min(furthest, total - (count - 1 - done)))
        earliest.append(max(int(np.searchsorted(reach, earliest[-1])), count - 1 - done))
    earliest.reverse()
    widths = [late - early + 1 for early, late in zip(earliest, latest, strict=True)]
    if sum(left * right for left, right in pairwise(widths)) > BOUNDARY_COMPARISONS:
        return None
    positions = np.zeros(1)
    choices: list[Integers] = []
    starts = np.arange(1)
    for boundary in range(1, count + 1):
        ends = np.arange(earliest[boundary], latest[boundary] + 1)
        sizes = ends[None, :] - starts[:, None]
        allowed = (sizes > 0) & (sizes <= limits[starts][:, None])
        reached = np.where(allowed, positions[:, None] + sizes * lengths[starts][:, None], np.inf)
        chosen = reached.argmin(axis=0)
        choices.append(starts[chosen])
        positions, starts = reached[chosen, np.arange(len(ends))], ends
    path = [total]
    for boundary in range(count, 0, -1):
        path.append(int(choices[boundary - 1][path[-1] - earliest[boundary]]))
    return path[::-1]


def _split(boundaries: list[int], lengths: Integers, count: int) -> list[int]:
    # Largest microbatches (in positions) first, each in the middle.
    while len(boundaries) - 1 < count:
        sizes = np.diff(boundaries)
        areas = np.where(sizes > 1, sizes * lengths[boundaries[:-1]], 0)
        worst = np.argsort(-areas, kind="stable")[: count - len(sizes)]
        worst = worst[sizes[worst] > 1]
        middles = np.asarray(boundaries)[worst] + sizes[worst] // 2
        boundaries = sorted({*boundaries, *middles.tolist()})
    return boundaries
