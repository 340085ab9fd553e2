"""What the demo shows at the end: one picture and one table, both from its CSV log."""

from __future__ import annotations

import csv
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
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    passed = _values(log["rollout/pass_rate"])
    left.plot(episodes, passed, color="#9db7d5", linewidth=1, label="training tasks, each iteration")
    left.plot(episodes, _smooth(passed), color="#1f5fa8", linewidth=2, label="training tasks, mean of the last 8")
    held_out = [(episodes[int(epoch)], value) for epoch, value in log["val/pass_rate"]]
    left.plot(*zip(*held_out, strict=True), "o-", color="#d98a1f", markersize=5, linewidth=1, label="held-out tasks")
    left.set(xlabel="episodes sampled", ylabel="pass rate", ylim=(0, 1), title="Pass rate")
    left.legend(frameon=False, loc="lower right")
    for values, colour, label in (
        (_smooth(_values(log["zero_advantage/groups"])), "#c0504d", "groups without signal"),
        (_padding(log, "padding/padded_layout_positions"), "#8a8a8a", "padding, if the batch were padded"),
        (_padding(log, "padding/positions"), "#2f8f5b", "padding, as packed"),
    ):
        right.plot(episodes[: len(values)], values, color=colour, linewidth=2, label=label)
    right.set(xlabel="episodes sampled", ylabel="share, last 8 iterations", ylim=(-0.02, 1), title="What is wasted")
    right.legend(frameon=False, loc="upper center")
    for axis in (left, right):
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
    rows = [
        ("held-out pass rate, before", f"{before['val/pass_rate']:.2f}"),
        ("held-out pass rate, after", f"{after['val/pass_rate']:.2f}"),
        ("episodes sampled", f"{episodes:.0f}"),
        ("groups without signal, last 20 iterations", _percent(_tail(log.get("zero_advantage/groups", [])))),
        ("padding, as packed", _percent(_padding(log, "padding/positions", 10**6)[-1])),
        ("padding, if the batches were padded", _percent(_padding(log, "padding/padded_layout_positions", 10**6)[-1])),
        ("tokens over 20% from the sampler's ratio", _percent(_mean(log.get("sampler_ratio/outside_20_percent", [])))),
        ("imitation, seconds", f"{imitation_seconds:.0f}"),
        ("reinforcement, seconds", f"{seconds:.0f}"),
    ]
    width = max(len(name) for name, _ in rows)
    print("\n" + "\n".join(f"  {name:<{width}}  {value:>8}" for name, value in rows))
    print(f"\n  log      {folder / 'metrics.csv'}\n  picture  {picture}\n")


def _values(series: Series) -> list[float]:
    return [value for _, value in series]


def _cumulative(series: Series) -> list[float]:
    total, sums = 0.0, []
    for value in _values(series):
        total += value
        sums.append(total)
    return sums


def _smooth(values: list[float], window: int = 8) -> list[float]:
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _padding(log: Mapping[str, Series], positions: str, window: int = 8) -> list[float]:
    """Padding share over a window, from sums: an iteration with nothing to compute weighs nothing."""
    computed, real = _values(log[positions]), _values(log["padding/real"])
    windows = [slice(max(0, end - window), end) for end in range(1, len(computed) + 1)]
    return [1 - sum(real[w]) / max(sum(computed[w]), 1) for w in windows]


def _mean(series: Series) -> float:
    return sum(_values(series)) / len(series) if series else float("nan")


def _tail(series: Series, count: int = 20) -> float:
    return _mean(series[-count:])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"
