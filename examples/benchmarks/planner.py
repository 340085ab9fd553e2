"""Compares ways to divide trajectories into microbatches, by what the slowest rank makes the others wait.

    python examples/benchmarks/planner.py                      # 8, 32 and 256 ranks, under a minute on one core
    python examples/benchmarks/planner.py --ranks 8 --draws 5 --output planner.json

Columns: lock-step is the cost of the dearest rank at every microbatch index, summed, over the mean cost of a rank
(what sharded training pays; 1 is perfect). Total is the dearest rank's cost over the mean (what replicated training
pays). Overshoot is the fullest microbatch over the budget. The cost is that of a model with 1.5 billion parameters.
The planners compared with are written here after their public descriptions: first-fit decreasing with its rows dealt
in turn; the largest differencing method (Karmarkar and Karp, 1982) on lengths, first over ranks, then over as many
microbatches as the fullest rank's tokens need; chunks of the sorted lengths; and a fixed count per microbatch.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_rl.data.balance import lockstep_ratio, rank_total_ratio
from lit_rl.data.cost import SegmentCost
from lit_rl.data.packing import pack_sequences
from lit_rl.data.planner import plan_steps

BUDGET = 16_384
COST = SegmentCost(linear=6 * 1.31e9, quadratic=6 * 28 * 1_536)
TRAJECTORIES = {8: 512, 32: 1_024, 256: 65_536}
Lengths = np.ndarray[Any, np.dtype[np.int64]]
Ranks = list[list[Sequence[int]]]


def lognormal(random: np.random.Generator, count: int) -> Lengths:
    return _clipped(random.lognormal(7.3, 0.9, count))


def bimodal(random: np.random.Generator, count: int) -> Lengths:
    long = random.random(count) < 0.15
    return _clipped(np.where(long, random.uniform(BUDGET / 2, BUDGET, count), random.uniform(100, 1_500, count)))


def truncated(random: np.random.Generator, count: int) -> Lengths:
    return _clipped(np.where(random.random(count) < 0.2, BUDGET, random.lognormal(7.8, 0.7, count)))


def _clipped(lengths: Any) -> Lengths:
    return np.clip(lengths, 64, BUDGET).astype(np.int64)


def ours(lengths: Lengths, ranks: int) -> Ranks:
    plan = plan_steps(lengths, max_tokens=BUDGET, world_size=ranks, cost=COST)
    return [list(rank) for rank in plan.microbatches[0]]


def ours_rank_total(lengths: Lengths, ranks: int) -> Ranks:
    plan = plan_steps(lengths, max_tokens=BUDGET, world_size=ranks, cost=COST, objective="rank_total")
    return [list(rank) for rank in plan.microbatches[0]]


def first_fit_decreasing(lengths: Lengths, ranks: int) -> Ranks:
    return _in_turn(pack_sequences(lengths, BUDGET), ranks)


def sorted_chunks(lengths: Lengths, ranks: int) -> Ranks:
    chunks: list[list[int]] = [[]]
    room = BUDGET
    for index in np.argsort(-lengths, kind="stable").tolist():
        if lengths[index] > room:
            chunks.append([])
            room = BUDGET
        chunks[-1].append(index)
        room -= int(lengths[index])
    return _in_turn(chunks, ranks)


def fixed_count(lengths: Lengths, ranks: int) -> Ranks:
    count = max(1, int(BUDGET // lengths.mean()))
    order = np.random.default_rng(0).permutation(len(lengths)).tolist()
    return _in_turn([order[start : start + count] for start in range(0, len(order), count)], ranks)


def karmarkar_karp(lengths: Lengths, ranks: int) -> Ranks:
    shares = largest_differencing(lengths.tolist(), list(range(len(lengths))), ranks)
    per_rank = max(-(-int(lengths[share].sum()) // BUDGET) for share in shares)
    planned = []
    for share in shares:
        parts = largest_differencing(lengths[share].tolist(), share, per_rank)
        planned.append(sorted(parts, key=lambda part: -COST(lengths[part])))
    return [list(rank) for rank in planned]


def largest_differencing(values: list[int], names: list[int], parts: int) -> list[list[int]]:
    """Divides values into parts of similar sum: the two most uneven partial solutions are joined, big on small."""
    solutions: list[list[tuple[int, Any]]] = [[(value, name)] for value, name in zip(values, names, strict=True)]
    heap = [(-value, number) for number, value in enumerate(values)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = solutions[heapq.heappop(heap)[1]], solutions[heapq.heappop(heap)[1]]
        overlap = max(0, len(first) + len(second) - parts)
        kept, small = first[: len(first) - overlap], first[len(first) - overlap :]
        # Sums fall, so the smallest of one meets the largest of the other.
        pairs = zip(small, reversed(second[:overlap]), strict=True)
        joined = [(a + b, (left, right)) for (a, left), (b, right) in pairs]
        slots = sorted(kept + joined + second[overlap:], key=lambda slot: -slot[0])
        least = slots[-1][0] if len(slots) == parts else 0
        heapq.heappush(heap, (least - slots[0][0], len(solutions)))
        solutions.append(slots)
    result = [_leaves(content) for _, content in solutions[heap[0][1]]]
    return result + [[] for _ in range(parts - len(result))]


def _leaves(content: Any) -> list[int]:
    stack, found = [content], []
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        else:
            found.append(node)
    return found


def _in_turn(microbatches: Sequence[Sequence[int]], ranks: int) -> Ranks:
    filled = [*microbatches, *[[]] * (-len(microbatches) % ranks)]
    return [filled[rank::ranks] for rank in range(ranks)]


PLANNERS: dict[str, Callable[[Lengths, int], Ranks]] = {
    "lit_rl": ours,
    "lit_rl, rank_total": ours_rank_total,
    "first-fit decreasing": first_fit_decreasing,
    "Karmarkar-Karp": karmarkar_karp,
    "sorted chunks": sorted_chunks,
    "fixed count": fixed_count,
}


def measure(planner: Callable[[Lengths, int], Ranks], lengths: Lengths, ranks: int) -> dict[str, float]:
    """Balance, overshoot, microbatches, and the milliseconds of the fastest of a few runs."""
    seconds: list[float] = []
    while len(seconds) < 5 and sum(seconds) < 0.5:
        start = time.perf_counter()
        planned = planner(lengths, ranks)
        seconds.append(time.perf_counter() - start)
    assert sorted(index for rank in planned for part in rank for index in part) == list(range(len(lengths)))
    costs = np.array([[COST(lengths[list(part)]) for part in rank] for rank in planned])
    return {
        "lockstep": lockstep_ratio(costs),
        "rank_total": rank_total_ratio(costs),
        "overshoot": max(int(lengths[list(part)].sum()) for rank in planned for part in rank) / BUDGET,
        "microbatches_per_rank": len(planned[0]),
        "first_fit_decreasing_needs": -(-len(pack_sequences(lengths, BUDGET)) // ranks),
        "milliseconds": 1_000 * min(seconds),
    }


def compare(ranks: int, draws: int) -> list[dict[str, Any]]:
    """All planners on all distributions: means over the draws, of overshoot and time the worst."""
    results = []
    for draw_lengths in (lognormal, bimodal, truncated):
        drawn = [draw_lengths(np.random.default_rng(seed), TRAJECTORIES[ranks]) for seed in range(draws)]
        for name, planner in PLANNERS.items():
            figures = [measure(planner, lengths, ranks) for lengths in drawn]
            row: dict[str, Any] = {"ranks": ranks, "lengths": draw_lengths.__name__, "planner": name, "draws": draws}
            row |= {key: float(np.mean([figure[key] for figure in figures])) for key in figures[0]}
            row["overshoot"] = max(figure["overshoot"] for figure in figures)
            row["milliseconds"] = max(figure["milliseconds"] for figure in figures)
            row["worst_lockstep"] = max(figure["lockstep"] for figure in figures)
            results.append(row)
            print(
                f"{ranks:5d}  {row['lengths']:10s} {name:22s} {row['lockstep']:9.4f} {row['rank_total']:8.4f} "
                f"{row['overshoot']:9.3f} {row['microbatches_per_rank']:12.1f} {row['milliseconds']:9.1f}",
                flush=True,
            )
    return results


def long_tail() -> list[dict[str, Any]]:
    """512 trajectories with a median of 8k tokens and a cap of 64k, in microbatches of at most 131,072 positions."""
    lengths = np.clip(np.random.default_rng(33).lognormal(np.log(8_000), 0.85, 512), 64, 65_536).astype(np.int64)
    results = []
    for name, order in (("8 at random", lengths), ("8 by length", np.sort(lengths))):
        longest = order.reshape(-1, 8).max(axis=1)
        share = 1 - lengths.sum() / (8 * longest.sum())
        results.append({"scheme": name, "microbatches": 64, "padding": share, "largest": 8 * int(longest.max())})
    for layout in ("padded", "packed"):
        plan = plan_steps(lengths, max_tokens=131_072, layout=layout)
        sizes = [lengths[list(part)] for part in plan.microbatches[0][0]]
        largest = max(int(s.sum()) if layout == "packed" else len(s) * int(s.max()) for s in sizes)
        row = {"microbatches": plan.num_microbatches, "padding": plan.padding_share, "largest": largest}
        results.append({"scheme": f"budget, {layout}", **row})
    print(f"\n{'scheme':16s} microbatches  padding  largest  (fewest possible packed: {-(-lengths.sum() // 131_072)})")
    for row in results:
        print(f"{row['scheme']:16s} {row['microbatches']:12d} {row['padding']:8.1%} {row['largest']:8d}")
    return results


def packing() -> list[dict[str, float]]:
    """Seconds to pack many lengths into rows of 8,192 tokens."""
    results = []
    for count in (100_000, 200_000, 400_000):
        lengths = np.random.default_rng(0).integers(1, 2_049, size=count)
        start = time.perf_counter()
        rows = pack_sequences(lengths, 8_192)
        results.append({"lengths": count, "rows": len(rows), "seconds": time.perf_counter() - start})
        bound = -(-int(lengths.sum()) // 8_192)
        print(
            f"packed {count:,} lengths into {len(rows):,} rows (at least {bound:,}) in {results[-1]['seconds']:.2f} s"
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(TRAJECTORIES), default=sorted(TRAJECTORIES))
    parser.add_argument("--draws", type=int, default=5, help="draws of the lengths at 8 and 32 ranks; 1 at 256")
    parser.add_argument("--output", type=Path, default=Path("planner.json"), help="where the figures go")
    arguments = parser.parse_args()
    plan_steps([1], max_tokens=1)  # first call: imports inside NumPy are not planning time
    print("ranks  lengths    planner                lock-step    total overshoot microbatches   ms, worst")
    rows = [row for ranks in arguments.ranks for row in compare(ranks, arguments.draws if ranks < 256 else 1)]
    report = {"budget": BUDGET, "planners": rows, "long_tail": long_tail(), "packing": packing()}
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
