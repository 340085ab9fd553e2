"""14.2: a fixed count, sorted or not, against a token budget, on lengths with a long tail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from examples.chapter.table import Row, Section, percent
from lit_rl import plan_steps
from lit_rl.throughput import padded_share

# The chapter gives median, cap and count. A spread of 0.85 is the one that leads to its padding shares.
MEDIAN, SPREAD, CAP, COUNT, SEED = 8_000, 0.85, 65_536, 512, 33
BUDGET = 131_072
PER_MICROBATCH = 8


class Scheme(NamedTuple):
    """What one way to make microbatches comes to: their number, the share of padding, and the largest in positions."""

    microbatches: int
    padding: float
    largest: int


def long_tail(seed: int = SEED) -> list[int]:
    """512 log-normal lengths with a median of 8k tokens, capped at 64k.

    Args:
        seed: Of the draw.

    Returns:
        Lengths in tokens, in random order.
    """
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SPREAD, COUNT)
    return np.clip(drawn, 64, CAP).astype(np.int64).tolist()


def schemes(lengths: Sequence[int]) -> dict[str, Scheme]:
    """The chapter's three schemes, and packing under the same budget (exercise 2).

    Args:
        lengths: Tokens of each trajectory.

    Returns:
        Name to what it comes to.
    """
    ordered = sorted(lengths)
    found = {
        "random": Scheme(-(-len(lengths) // PER_MICROBATCH), padded_share(lengths, PER_MICROBATCH), largest(lengths)),
        "sorted": Scheme(-(-len(lengths) // PER_MICROBATCH), padded_share(ordered, PER_MICROBATCH), largest(ordered)),
    }
    padded = plan_steps(lengths, max_tokens=BUDGET, layout="padded")
    packed = plan_steps(lengths, max_tokens=BUDGET, layout="packed")
    widest = max(len(part) * max(lengths[i] for i in part) for part in padded.for_rank(0))
    fullest = max(sum(lengths[i] for i in part) for part in packed.for_rank(0))
    found["budget"] = Scheme(padded.num_microbatches, padded.padding_share, widest)
    found["packed"] = Scheme(packed.num_microbatches, packed.padding_share, fullest)
    return found


def largest(lengths: Sequence[int]) -> int:
    """Padded positions of the largest microbatch of 8 in a row."""
    starts = range(0, len(lengths), PER_MICROBATCH)
    return max(PER_MICROBATCH * max(lengths[start : start + PER_MICROBATCH]) for start in starts)


def reproduce(draws: int = 50) -> Section:
    """Computes the section.

    Args:
        draws: Further draws of the lengths, which show how much one draw says.

    Returns:
        Rows and the figures behind them.
    """
    lengths = long_tail()
    found = schemes(lengths)
    others = [schemes(long_tail(seed)) for seed in range(draws)]
    fewest = -(-sum(lengths) // BUDGET)
    section = Section("14.2", "Token budgets (512 log-normal lengths, median 8k, cap 64k)")
    section.rows = [
        Row("spread of the log-normal (standard deviation of ln length)", "not stated", f"{SPREAD}", "found by search"),
        _padding("padding, 8 at random", "59%", found, others, "random"),
        _padding("padding, 8 by length", "3.6%", found, others, "sorted"),
        _padding("padding, token budget", "3.0%", found, others, "budget", "the planner looks for less"),
        Row("microbatches: random, sorted, budget", "64, 64, 51", _three(found, "microbatches")),
        Row("largest microbatch, positions", "524k, 524k, 131k", _thousands(found)),
        Row(
            "packed under the budget (exercise 2), microbatches",
            "-",
            f"{found['packed'].microbatches}, at {percent(found['packed'].padding)} padding",
            f"{fewest} is the fewest that can hold {sum(lengths):,} tokens",
        ),
    ]
    section.data = {
        "schemes": {name: scheme._asdict() for name, scheme in found.items()},
        "fewest_packed": fewest,
        "draws": {name: [other[name].padding for other in others] for name in found},
    }
    return section


def _padding(
    figure: str, source: str, found: dict[str, Scheme], others: Sequence[dict[str, Scheme]], name: str, why: str = ""
) -> Row:
    shares = [other[name].padding for other in others]
    spread = f"another draw: {percent(min(shares))} to {percent(max(shares))} over {len(shares)}"
    return Row(figure, source, percent(found[name].padding), f"{why}; {spread}" if why else spread)


def _three(found: dict[str, Scheme], field: str) -> str:
    values: list[Any] = [getattr(found[name], field) for name in ("random", "sorted", "budget")]
    return ", ".join(map(str, values))


def _thousands(found: dict[str, Scheme]) -> str:
    return ", ".join(f"{found[name].largest // 1000}k" for name in ("random", "sorted", "budget"))
