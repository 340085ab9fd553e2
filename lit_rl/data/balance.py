"""Packed microbatches of equal cost under a hard budget, and who computes which of them when.

Positions below always refer to trajectories sorted from long to short.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Literal

import numpy as np
import numpy.typing as npt

from lit_rl.data.bounds import search_rows
from lit_rl.data.packing import first_fit

Objective = Literal["lockstep", "rank_total"]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Share of the tokens placed by cost before the rest goes wherever it fits first; 1.0 balances best, less fits more.
BALANCED_SHARES = (1.0, 0.9, 0.8, 0.5)


def pack_balanced(
    lengths: Integers, costs: Floats, capacity: int, ranks: int, per_rank: int, objective: Objective
) -> tuple[list[list[int]], Integers | None] | None:
    """Packs trajectories into exactly `ranks` x `per_rank` microbatches, none above the capacity.

    Tried in this order, the first that fits is taken: placement by cost (see `spread`), with less and less of it;
    first-fit decreasing; a bounded search. No microbatch stays empty unless there are too few trajectories.

    Args:
        lengths: int64 [n], sorted from long to short.
        costs: float64 [n], of each trajectory alone.
        capacity: The most tokens of a microbatch.
        ranks: Number of ranks W.
        per_rank: Microbatches of each rank K.
        objective: What is balanced.

    Returns:
        W x K lists of positions, and the rank of each where the packing has already chosen it; `None` when the
        trajectories were not made to fit.

    Example:
        >>> pack_balanced(np.array([6, 4, 3, 3]), np.array([6.0, 4.0, 3.0, 3.0]), 9, 2, 1, "lockstep")
        ([[0, 3], [1, 2]], None)
    """
    count, tokens, items = ranks * per_rank, int(lengths.sum()), lengths.tolist()
    if len(items) <= count:
        return [[position] for position in range(len(items))] + [[] for _ in range(count - len(items))], None
    if tokens > count * capacity:
        return None
    reached = np.cumsum(lengths)
    switches = dict.fromkeys(int(np.searchsorted(reached, share * tokens)) + 1 for share in BALANCED_SHARES)
    plans = [(np.arange(count), water_levels(costs, ranks, per_rank).repeat(ranks))]
    if objective == "rank_total":
        owners = np.empty(count, dtype=np.int64)
        owners[deal(costs[:count], ranks, "rank_total")] = np.arange(ranks)[:, None]
        plans.insert(0, (owners, np.zeros(ranks)))
    for owners, targets in plans:
        for switch in switches:
            bins = spread(items, costs.tolist(), capacity, owners.tolist(), targets.tolist(), switch)
            if bins is not None:
                return bins, owners if len(targets) != count else None
    rows = first_fit(items, capacity)
    if len(rows) > count:
        rows = search_rows(items, capacity, count) or rows
    return (split_rows(rows, costs, count), None) if len(rows) <= count else None


def water_levels(costs: Floats, ranks: int, per_rank: int) -> Floats:
    """The cost that each microbatch index should reach, so that their sum over the index is as low as it can be.

    In lock-step an index costs what its dearest rank costs, and that is never less than the dearest trajectory in
    it. With the dearest trajectories gathered in as few indices as possible, index k cannot be below trajectory
    k x W; what remains is spread evenly over the indices that are not held up by one.

    Args:
        costs: float64 [n], of each trajectory alone, from dear to cheap, n at least `ranks` x `per_rank`.
        ranks: Number of ranks W.
        per_rank: Microbatches of each rank K.

    Returns:
        float64 [K], falling.

    Example:
        >>> water_levels(np.array([10.0, 2, 2, 2, 2, 2]), 2, 2).tolist()
        [10.0, 2.0]
        >>> water_levels(np.array([3.0, 2, 2, 2, 2, 1]), 2, 2).tolist()
        [3.0, 3.0]
    """
    floors, total = costs[: ranks * per_rank : ranks], float(costs.sum()) / ranks
    for held in range(per_rank):
        level = (total - floors[:held].sum()) / (per_rank - held)
        if level >= floors[held]:
            break
    return np.maximum(floors, level)


def spread(
    lengths: list[int], costs: list[float], capacity: int, owners: list[int], targets: list[float], switch: int
) -> list[list[int]] | None:
    """Places trajectories from long to short, each with the owner that is furthest below its target.

    An owner is a microbatch, or a rank with all of its microbatches. One trajectory is put into every microbatch
    first. After that it is largest-first list scheduling (Graham, 1969) with targets and a capacity: an owner
    without room for the current length waits until the lengths have come down to its room, as in `first_fit`.

    Args:
        lengths: [n], sorted from long to short.
        costs: [n], of each trajectory alone.
        capacity: The most tokens of a microbatch.
        owners: [m] number of the owner of each microbatch, m at most n.
        targets: [owners] cost that each should reach.
        switch: From this position on the first owner with room is taken, in the order of the shortfall at that
            moment: that wastes less room than balancing to the end.

    Returns:
        Positions per microbatch; `None` when one did not fit anywhere.

    Example:
        >>> spread([6, 4, 3, 3], [6.0, 4.0, 3.0, 3.0], 10, [0, 1], [0.0, 0.0], 4)
        [[0, 3], [1, 2]]
    """
    bins = [[position] for position in range(len(owners))]
    rooms: list[list[tuple[int, int]]] = [[] for _ in targets]
    loads = [-target for target in targets]
    for number, owner in enumerate(owners):
        rooms[owner].append((lengths[number] - capacity, number))
        loads[owner] += costs[number]
    for room in rooms:
        heapify(room)
    waiting = [(room[0][0], owner) for owner, room in enumerate(rooms)]
    heapify(waiting)
    ready: list[tuple[float, int]] = []
    balancing = True
    for position in range(len(owners), len(lengths)):
        length = lengths[position]
        if balancing and position >= switch:
            balancing = False
            for place, owner in enumerate(sorted(range(len(loads)), key=loads.__getitem__)):
                loads[owner] = float(place)
            ready = sorted((loads[owner], owner) for _, owner in ready)
        while waiting and -waiting[0][0] >= length:
            owner = heappop(waiting)[1]
            heappush(ready, (loads[owner], owner))
        if not ready:
            return None
        owner = ready[0][1]
        room = rooms[owner]
        used, number = room[0]
        bins[number].append(position)
        heapreplace(room, (used + length, number))
        if balancing:
            loads[owner] += costs[position]
        if -room[0][0] < length:
            heappop(ready)
            heappush(waiting, (room[0][0], owner))
        else:
            heapreplace(ready, (loads[owner], owner))
    return bins


def split_rows(rows: Sequence[list[int]], costs: Floats, count: int) -> list[list[int]]:
    """Splits the dearest rows of several trajectories in two until there are `count`, or none is left to split.

    Args:
        rows: Positions per row, at most `count` rows.
        costs: float64 [n], of each trajectory alone.
        count: Rows wanted.

    Returns:
        `count` rows, empty ones last.

    Example:
        >>> split_rows([[0, 1, 2]], np.array([3.0, 2.0, 1.0]), 2)
        [[0, 2], [1]]
    """
    whole = [row for row in rows if len(row) < 2]
    heap = [(-float(costs[row].sum()), row) for row in rows if len(row) > 1]
    heapify(heap)
    while heap and len(heap) + len(whole) < count:
        row = heappop(heap)[1]
        for half in (row[::2], row[1::2]):
            if len(half) > 1:
                heappush(heap, (-float(costs[half].sum()), half))
            else:
                whole.append(half)
    result = [row for _, row in sorted(heap)] + whole
    return result + [[] for _ in range(count - len(result))]


def deal(costs: Floats, ranks: int, objective: Objective) -> Integers:
    """Deals microbatches to ranks, the same number to each.

    "lockstep" takes them in order of cost, W at a time, so that those computed at the same index are alike; inside
    an index the dearest goes to the rank with the least so far, which keeps the ranks' totals close too.
    "rank_total" gives each to the rank with the least so far that still has an index free.

    Args:
        costs: float64 [W x K], of each microbatch.
        ranks: Number of ranks W.
        objective: What is balanced.

    Returns:
        int64 [W, K]: numbers of microbatches, dear indices first.

    Example:
        >>> deal(np.array([4.0, 1.0, 3.0, 2.0]), 2, "lockstep").tolist()
        [[0, 1], [2, 3]]
    """
    order = np.argsort(-costs, kind="stable")
    per_rank = len(order) // ranks
    dealt = np.empty((ranks, per_rank), dtype=np.int64)
    if objective == "lockstep":
        totals = np.zeros(ranks)
        for index, chunk in enumerate(order.reshape(per_rank, ranks)):
            receivers = np.argsort(totals, kind="stable")
            dealt[receivers, index] = chunk
            totals[receivers] += costs[chunk]
        return dealt
    heap = [(0.0, rank, 0) for rank in range(ranks)]
    for number in order.tolist():
        total, rank, index = heappop(heap)
        dealt[rank, index] = number
        if index + 1 < per_rank:
            heappush(heap, (total + float(costs[number]), rank, index + 1))
    return dealt


def lockstep_ratio(costs: npt.NDArray[np.floating]) -> float:
    """How much longer a step takes than with perfect balance when ranks wait for each other at every microbatch.

    Args:
        costs: float [..., W, K]: steps (if any), ranks, microbatches.

    Returns:
        The dearest rank of each microbatch index, summed over the indices, over the mean total of a rank; 1 without
        any cost.

    Example:
        >>> lockstep_ratio(np.array([[4.0, 1.0], [2.0, 3.0]]))
        1.4
    """
    ideal = float(costs.sum()) / costs.shape[-2]
    return float(costs.max(axis=-2).sum()) / ideal if ideal > 0 else 1.0


def rank_total_ratio(costs: npt.NDArray[np.floating]) -> float:
    """How much longer a step takes than with perfect balance when ranks wait for each other once, at its end.

    Args:
        costs: float [..., W, K]: steps (if any), ranks, microbatches.

    Returns:
        The dearest rank's total, summed over the steps, over the mean total of a rank; 1 without any cost.

    Example:
        >>> rank_total_ratio(np.array([[4.0, 1.0], [2.0, 3.0]]))
        1.0
    """
    ideal = float(costs.sum()) / costs.shape[-2]
    return float(costs.sum(axis=-1).max(axis=-1).sum()) / ideal if ideal > 0 else 1.0
