"""The comparison of 14.5, from the runs: means over seeds with standard errors, and what they cannot resolve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from examples.chapter.filtering import ARMS, ATTEMPTS, Divisor, run_all
from examples.chapter.table import Row, Section, percent
from lit_rl.throughput import dead_group_share

Runs = Sequence[dict[str, Any]]
TAIL = 20
SEEDS = 8
PAIR = ("unfiltered", "last group")
# Student's t for 95% intervals, by number of seeds.
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
GYM = "another gym"


def reproduce(quick: bool, processes: int = 2) -> Section:
    """Computes the section.

    Args:
        quick: One seed, two arms and 12 iterations instead of four seeds, five arms (two of them also with a mean
            over tokens) and 60.
        processes: Runs at a time.

    Returns:
        Rows, and the runs for the picture.
    """
    arms: list[tuple[str, Divisor]] = [(arm, "constant") for arm in ARMS]
    means: list[tuple[str, Divisor]] = [(arm, "token_mean") for arm in PAIR]
    chosen, seeds = (arms[:2], range(1)) if quick else (arms + means, range(SEEDS))
    runs = run_all(chosen, seeds, 12 if quick else 60, 16 if quick else ATTEMPTS, processes)
    section = Section("14.5", f"Filtering tasks by pass rate ({len(seeds)} seeds, {runs[0]['iterations']} iterations)")
    section.rows = rows_of(runs)
    section.data = {"runs": runs}
    return section


def rows_of(runs: Runs) -> list[Row]:
    """All rows of the section.

    Args:
        runs: As `run_all` returns them; at least the arms "unfiltered" and "last group".

    Returns:
        Rows.
    """
    full, hard = of_arm(runs, "unfiltered"), of_arm(runs, "last group")
    rows = [
        Row("episodes, unfiltered", "3,840", _many(map(episodes, full))),
        Row("episodes, last group in (0, 1)", "2,088 and 2,184 (2,100 to 2,600 over four)", _many(map(episodes, hard))),
        Row("episodes saved", "43% to 46%", percent(saved(runs), 0), GYM),
        Row(f"zero-advantage groups, last {TAIL}, unfiltered", "0.61 to 0.68", _shares(full), GYM),
        Row(f"zero-advantage groups, last {TAIL}, filtered", "0.38 to 0.47", _shares(hard), GYM),
        Row("held-out pass rate before reinforcement", "-", mean_and_error([run["held_out"][0] for run in full])),
        Row("held-out pass rate, unfiltered", "0.76 and 0.82 (to 0.85 over four)", _held_out(full), GYM),
        Row("held-out pass rate, filtered", "0.73 and 0.77 (0.72 to 0.81 over four)", _held_out(hard), GYM),
        Row("difference, filtered less unfiltered, by seed", "about -0.04", *difference(runs, "last group")),
        Row("a group is all-pass at pass rate 0.9", "43%", percent(dead_group_share(0.9, 8), 0)),
    ]
    if len(full[0]["held_out"]) > 2:
        rows.insert(-1, _at_half(full, hard))
    others = [arm for arm in ARMS if arm not in PAIR and of_arm(runs, arm)]
    rows += [row for arm in others for row in _other(runs, arm)]
    return rows + (_with_means(runs) if of_arm(runs, PAIR[0], "token_mean") else [])


def waste_rows(runs: Runs) -> list[Row]:
    """Episodes in groups without advantage, for the design problem of 14.7.

    Args:
        runs: As in `rows_of`.

    Returns:
        Rows.
    """
    rows = []
    for arm, source in (("unfiltered", "43% of 7,680"), ("last group", "27% of 4,272")):
        chosen = of_arm(runs, arm)
        sampled, wasted = sum(map(episodes, chosen)), sum(run["wasted"] for run in chosen)
        found = f"{percent(wasted / sampled, 0)} of {sampled:,}"
        rows.append(Row(f"zero-variance prompts: episodes without gradient, {arm}", source, found, GYM))
    return rows


def _other(runs: Runs, arm: str) -> list[Row]:
    exercise = {"mean of three": "exercise 4: ", "p(1-p)": "exercise 5: "}.get(arm, "")
    chosen, hard = of_arm(runs, arm), of_arm(runs, "last group")
    more = sum(map(episodes, chosen)) / sum(map(episodes, hard)) - 1
    value, error = difference(runs, arm)
    return [
        Row(f"{exercise}episodes, {arm}", "-", _many(map(episodes, chosen)), f"{more:+.0%} against the last group"),
        Row(f"{exercise}zero-advantage groups, last {TAIL}, {arm}", "-", _shares(chosen)),
        Row(f"{exercise}held-out pass rate, {arm}", "-", _held_out(chosen), f"against unfiltered: {value} {error}"),
    ]


def _with_means(runs: Runs) -> list[Row]:
    full, hard = (of_arm(runs, arm, "token_mean") for arm in PAIR)
    label = "`token_mean` instead of a constant divisor"
    late = f"{_shares(full)} and {_shares(hard)}"
    return [
        Row(f"{label}: episodes, last group", "-", _many(map(episodes, hard))),
        Row(f"{label}: episodes saved", "-", percent(saved(runs, "token_mean"), 0)),
        Row(f"{label}: zero-advantage groups, last {TAIL}, unfiltered and filtered", "-", late),
        Row(f"{label}: held-out pass rate, unfiltered", "-", _held_out(full)),
        Row(f"{label}: held-out pass rate, filtered", "-", _held_out(hard)),
        Row(f"{label}: difference by seed", "-", *difference(runs, PAIR[1], "token_mean")),
        Row("filtered with the constant less unfiltered with `token_mean`", "-", *paired(of_arm(runs, PAIR[1]), full)),
    ]


def of_arm(runs: Runs, arm: str, normalization: Divisor = "constant") -> list[dict[str, Any]]:
    """The runs of one arm with one normalization, by seed."""
    return [run for run in runs if run["arm"] == arm and run["normalization"] == normalization]


def saved(runs: Runs, normalization: Divisor = "constant") -> float:
    """Share of the unfiltered arm's episodes that the hard filter did not sample."""
    full, hard = (sum(map(episodes, of_arm(runs, arm, normalization))) for arm in PAIR)
    return 1 - hard / full


def episodes(run: dict[str, Any]) -> int:
    """Episodes sampled for training."""
    return round(sum(run["episodes"]))


def late_dead_share(run: dict[str, Any]) -> float:
    """Share of the groups of the last 20 iterations without any advantage."""
    groups, shares = run["groups"][-TAIL:], run["dead_share"][-TAIL:]
    return sum(n * share for n, share in zip(groups, shares, strict=True)) / sum(groups)


def difference(runs: Runs, arm: str, normalization: Divisor = "constant") -> tuple[str, str]:
    """Held-out pass rate of an arm less that of the unfiltered one, paired by seed, and how to read it.

    Args:
        runs: As in `rows_of`.
        arm: The arm.
        normalization: Of both.

    Returns:
        Mean and standard error, and a sentence.
    """
    return paired(of_arm(runs, arm, normalization), of_arm(runs, "unfiltered", normalization))


def paired(runs: Runs, others: Runs) -> tuple[str, str]:
    """Held-out pass rate of some runs less that of others on the same seeds.

    Args:
        runs: One per seed.
        others: One per seed.

    Returns:
        As `difference`.
    """
    theirs = {run["seed"]: run["held_out"][-1] for run in others}
    pairs = [run["held_out"][-1] - theirs[run["seed"]] for run in runs]
    if len(pairs) < 2:
        return f"{pairs[0]:+.3f}", "one seed resolves nothing"
    error = stdev(pairs) / math.sqrt(len(pairs))
    low, high = mean(pairs) - T_95[len(pairs)] * error, mean(pairs) + T_95[len(pairs)] * error
    reading = "noise" if low < 0 < high else "not noise"
    return (
        f"{mean(pairs):+.3f} ± {error:.3f}",
        f"95% interval {low:+.2f} to {high:+.2f}: {reading} at {len(pairs)} seeds",
    )


def mean_and_error(values: Sequence[float]) -> str:
    """Mean and standard error over seeds.

    Example:
        >>> mean_and_error([0.7, 0.8])
        '0.750 ± 0.050'
    """
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{mean(values):.3f} ± {stdev(values) / math.sqrt(len(values)):.3f}"


def _at_half(full: Runs, hard: Runs) -> Row:
    """What the unfiltered arm had reached at about as many episodes as the filtered one sampled in all."""
    middle, iterations = len(full[0]["held_out"]) // 2, int(full[0]["iterations"]) // 2
    spent, sampled = sum(full[0]["episodes"][:iterations]), mean(map(episodes, hard))
    why = f"{spent:,.0f} episodes; the filtered arm sampled {sampled:,.0f} in all"
    return Row(f"held-out pass rate, unfiltered, after {iterations} iterations", "-", _held_out(full, middle), why)


def _held_out(runs: Runs, evaluation: int = -1) -> str:
    values = [run["held_out"][evaluation] for run in runs]
    return f"{mean_and_error(values)} ({min(values):.2f} to {max(values):.2f})"


def _shares(runs: Runs) -> str:
    values = [late_dead_share(run) for run in runs]
    return f"{min(values):.2f} to {max(values):.2f}"


def _many(values: Any) -> str:
    listed = sorted(values)
    return f"{listed[0]:,}" if listed[0] == listed[-1] else f"{listed[0]:,} to {listed[-1]:,}"
