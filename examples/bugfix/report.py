"""What the demo shows at the end: one picture and one table, both from its CSV log."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

Series = list[tuple[float, float]]


def read_log(folder: Path) -> dict[str, Series]:
    """Reads the CSV log of a run.

    Args:
        folder: Where `metrics.csv` is.

    Returns:
        Metric name to (iteration, value) pairs, in order.
    """
    series: dict[str, Series] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value not in ("", None) and name not in ("epoch", "step") and row["epoch"]:
                    series.setdefault(name, []).append((float(row["epoch"]), float(value)))
    return series


def save_picture(folder: Path) -> Path:
    """Draws pass rate, zero-advantage share and padding share against the episodes sampled so far.

    Args:
        folder: Where `metrics.csv` is, and where `progress.png` goes.

    Returns:
        The picture's path.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log = read_log(folder)
    episodes = _cumulative(log["rollout/trajectories"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    passed = log["rollout/pass_rate"]
    left.plot(*_curve(passed, episodes), color="#9db7d5", linewidth=1, label="training, each iteration")
    left.plot(*_curve(_smooth(passed), episodes), color="#1f5fa8", linewidth=2, label="training, mean of the last 8")
    left.plot(
        *_curve(log["val/pass_rate"], episodes), "o-", color="#d98a1f", markersize=5, linewidth=1, label="held-out"
    )
    left.set(xlabel="episodes sampled", ylabel="pass rate", ylim=(0, 1.02))
    for series, colour, label in (
        (_smooth(log.get("zero_advantage/groups", [])), "#c0504d", "groups without signal"),
        (_padding(log, "padding/padded_layout_positions"), "#8a8a8a", "padding, if padded"),
        (_padding(log, "padding/positions"), "#2f8f5b", "padding, as packed"),
    ):
        right.plot(*_curve(series, episodes), color=colour, linewidth=2, label=label)
    right.set(xlabel="episodes sampled", ylabel="share, last 8 iterations", ylim=(-0.02, 1.02))
    for axis in (left, right):
        axis.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8, columnspacing=1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    path = folder / "progress.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def print_table(
    before: Mapping[str, float],
    after: Mapping[str, float],
    folder: Path,
    imitation_seconds: float,
    seconds: float,
    picture: Path,
) -> None:
    """Prints what a person wants to know after the run.

    Args:
        before: Validation metrics before reinforcement.
        after: Metrics at the end of the run.
        folder: Where the log is.
        imitation_seconds: Wall time of the warm-up.
        seconds: Wall time of the reinforcement.
        picture: The picture's path.
    """
    log = read_log(folder)
    episodes = _cumulative(log["rollout/trajectories"])[-1]
    late = log.get("zero_advantage/groups", [])[-20:]
    rows = [
        ("held-out pass rate, before", f"{before['val/pass_rate']:.2f}"),
        ("held-out pass rate, after", f"{after['val/pass_rate']:.2f}"),
        ("episodes sampled", f"{episodes:.0f}"),
        (f"groups without signal, last {len(late)} iterations", _percent(_mean(late))),
        ("padding, as packed", _percent(_mean(_padding(log, "padding/positions", 10**6)[-1:]))),
        (
            "padding, if the batches were padded",
            _percent(_mean(_padding(log, "padding/padded_layout_positions", 10**6)[-1:])),
        ),
        ("tokens over 20% from the sampler's ratio", _percent(_mean(log.get("sampler_ratio/outside_20_percent", [])))),
        ("imitation, seconds", f"{imitation_seconds:.0f}"),
        ("reinforcement, seconds", f"{seconds:.0f}"),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"  {name:<{width}}  {value:>8}" for name, value in rows))
    if late and min(_values(late)) == 1.0:
        print("\n  No group had a signal: every attempt at a task ended alike. Try more --demonstrations.")
    print(f"\n  log      {folder / 'metrics.csv'}\n  picture  {picture}\n")


def _values(series: Series) -> list[float]:
    return [value for _, value in series]


def _cumulative(series: Series) -> list[float]:
    total, sums = 0.0, []
    for value in _values(series):
        total += value
        sums.append(total)
    return sums


def _curve(series: Series, episodes: list[float]) -> tuple[list[float], list[float]]:
    """Values against the episodes sampled by the end of their iteration; some are not logged in every one."""
    return [episodes[int(iteration)] for iteration, _ in series], _values(series)


def _smooth(series: Series, window: int = 8) -> Series:
    parts = [series[max(0, end - window) : end] for end in range(1, len(series) + 1)]
    return [(part[-1][0], _mean(part)) for part in parts]


def _padding(log: Mapping[str, Series], positions: str, window: int = 8) -> Series:
    """Padding share over a window, from sums: an iteration with nothing to compute weighs nothing."""
    real = dict(log.get("padding/real", []))
    computed = log.get(positions, [])
    pairs = [(iteration, number, real[iteration]) for iteration, number in computed if real.get(iteration, 0)]
    parts = [pairs[max(0, end - window) : end] for end in range(1, len(pairs) + 1)]
    return [(part[-1][0], 1 - sum(r for *_, r in part) / max(sum(c for _, c, _ in part), 1)) for part in parts]


def _mean(series: Series) -> float:
    return sum(_values(series)) / len(series) if series else float("nan")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}%"
