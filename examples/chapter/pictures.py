"""The chapter's three figures, drawn from the results file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

BLUE, AQUA, GREY, ORANGE, RED, DARK = "#2f6db3", "#7cc8bf", "#dcdcdc", "#d9822b", "#b5403a", "#333333"
COLOURS = {"unfiltered": ORANGE, "last group": BLUE, "mean of three": "#3a9d6e", "p(1-p)": "#8a63b0"}
COLOURS |= {"Beta posterior": RED}
METHOD_COLOURS = (RED, ORANGE, "#c9a227", "#3a9d6e", BLUE)


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws the figures whose sections are in the results.

    Args:
        results: Section number to its entry in the results file.
        folder: Where the pictures go.

    Returns:
        Their paths.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"font.size": 10, "axes.titlesize": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    drawn = []
    for number, function in (("14.1", draw_layouts), ("14.3", draw_memory), ("14.5", draw_filtering)):
        if number in results:
            path = folder / f"figure_{FIGURES[number]}.png"
            figure = function(results[number]["data"])
            figure.savefig(path, dpi=130)
            pyplot.close(figure)
            drawn.append(path)
    return drawn


FIGURES = {"14.1": "14_1", "14.3": "14_2", "14.5": "14_3"}


def draw_layouts(data: Mapping[str, Any]) -> Any:
    """Figure 14.1: the padded and the packed batch at one scale, so that area is compute."""
    import numpy as np
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grids = {name: np.array([list(map(int, row)) for row in data[name]["kind"]]) for name in ("padded", "packed")}
    widths = [grid.shape[1] for grid in grids.values()]
    height = max(grid.shape[0] for grid in grids.values())
    figure, axes = pyplot.subplots(
        1, 2, figsize=(11, 4.9), gridspec_kw={"width_ratios": widths, "wspace": 0.1}, layout="constrained"
    )
    titles = {"padded": "padded", "packed": f"packed into rows of {widths[1]}"}
    colours = ListedColormap([GREY, AQUA, BLUE])
    for axis, (name, grid) in zip(axes, grids.items(), strict=True):
        edges = (-0.5, grid.shape[1] - 0.5, grid.shape[0] - 0.5, -0.5)
        axis.imshow(grid, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="nearest", extent=edges)
        axis.hlines(np.arange(grid.shape[0] + 1) - 0.5, -0.5, grid.shape[1] - 0.5, color="white", linewidth=0.7)
        axis.set(ylim=(height - 0.5, -0.5), xlabel="position in the row", ylabel="row")
        axis.set_title(f"{titles[name]}: {grid.size:,} positions, {np.mean(grid == 0):.0%} padding", loc="left")
        axis.spines[["left", "bottom"]].set_visible(False)
    width = widths[1]
    for start in data["packed"]["starts"]:
        row, column = divmod(start, width)
        axes[1].vlines(column - 0.5, row - 0.5, row + 0.5, color=DARK, linewidth=1.1)
    entries = [("sampled by the policy", BLUE), ("prompt and tool output", AQUA), ("padding", GREY)]
    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in entries]
    tick: dict[str, Any] = {"color": DARK, "marker": "|", "linestyle": "", "markersize": 11, "markeredgewidth": 1.5}
    handles.append(Line2D([], [], label="start of a segment", **tick))
    axes[1].set_yticks([0, grids["packed"].shape[0] - 1])
    axes[1].legend(handles=handles, loc="lower right", frameon=False, fontsize=10)
    return figure


def draw_memory(data: Mapping[str, Any]) -> Any:
    """Figure 14.2: logits next to everything else on one GPU; and the heads as measured."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), layout="constrained")
    names = {"gathered": "gathered layers", "optimizer": "Adam moments", "parameters": "weights"}
    parts = {names.get(name, name): value / 1e9 for name, value in data["by_part"].items()}
    logits = [name.startswith("logits") for name in parts]
    bars = left.barh(list(parts), list(parts.values()), color=[RED if is_logits else BLUE for is_logits in logits])
    left.bar_label(bars, labels=[f"{value:.1f}" for value in parts.values()], padding=4)
    left.invert_yaxis()
    left.margins(x=0.12)
    left.set(xlabel="GB on one GPU", title="8B model sharded over 8 GPUs, 32k tokens (arithmetic)")
    problem = data["problem"]
    for colour, (name, by_tokens) in zip(METHOD_COLOURS, data["measured"].items(), strict=True):
        tokens, values = [int(n) for n in by_tokens], [value / 1e9 for value in by_tokens.values()]
        right.plot(tokens, values, "o-", color=colour, linewidth=2, markersize=5)
        right.annotate(
            name, (tokens[-1], values[-1]), xytext=(9, 0), textcoords="offset points", color=colour, va="center"
        )
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GB beyond inputs and gradients")
    right.set_xticks(tokens, [f"{n:,}" for n in tokens])
    right.set_yticks([0.01, 0.1, 1.0], ["0.01", "0.1", "1"])
    right.minorticks_off()
    right.set_xlim(tokens[0] * 0.85, tokens[-1] * 2.6)
    right.set_title(
        f"output layer, measured on {problem['device'].upper()} (vocabulary 151,936, width {problem['width']})"
    )
    right.grid(alpha=0.25)
    return figure


def draw_filtering(data: Mapping[str, Any]) -> Any:
    """Figure 14.3: held-out pass rate against episodes, episodes per iteration, and every run as a point."""
    from matplotlib import pyplot
    from matplotlib.ticker import MultipleLocator

    figure, axes = pyplot.subplots(1, 3, figsize=(14.5, 4.4), layout="constrained")
    for arm in ("unfiltered", "last group"):
        chosen = [run for run in data["runs"] if run["arm"] == arm and run["normalization"] == "constant"]
        _draw_curves(axes[0], chosen, COLOURS[arm])
        _draw_rate(axes[1], chosen, COLOURS[arm])
    _draw_ends(axes[2], data["runs"])
    axes[0].set(
        xlabel="episodes sampled", ylabel="held-out pass rate", title="Held-out pass rate (thin: one seed, thick: mean)"
    )
    axes[1].set(xlabel="iteration", ylabel="episodes", title="Episodes per iteration (mean of 5)", ylim=(0, 70))
    axes[2].set(xlabel="episodes sampled", ylabel="held-out pass rate at the end", title="Each run a point")
    axes[2].margins(0.12)
    axes[0].xaxis.set_major_locator(MultipleLocator(1000))
    axes[2].xaxis.set_major_locator(MultipleLocator(1000))
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    for axis in axes:
        axis.grid(alpha=0.25)
    return figure


def _draw_curves(axis: Any, runs: Sequence[Mapping[str, Any]], colour: str) -> None:
    curves = []
    for run in runs:
        total = [0.0, *accumulate(run["episodes"])]
        step = (len(total) - 1) // (len(run["held_out"]) - 1)
        curves.append((total[::step], run["held_out"]))
        axis.plot(*curves[-1], color=colour, linewidth=0.8, alpha=0.5)
    xs, ys = ([mean(column) for column in zip(*values, strict=True)] for values in zip(*curves, strict=True))
    axis.plot(xs, ys, "o-", color=colour, linewidth=2.2, markersize=4)


def _draw_rate(axis: Any, runs: Sequence[Mapping[str, Any]], colour: str) -> None:
    smooth = [_running_mean(run["episodes"]) for run in runs]
    for values in smooth:
        axis.plot(range(1, len(values) + 1), values, color=colour, linewidth=0.8, alpha=0.5)
    middle = [mean(column) for column in zip(*smooth, strict=True)]
    axis.plot(range(1, len(middle) + 1), middle, color=colour, linewidth=2.2)


def _draw_ends(axis: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Full points with a constant divisor, hollow ones with a mean over tokens."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for run in runs:
        points.setdefault((run["arm"], run["normalization"]), []).append((sum(run["episodes"]), run["held_out"][-1]))
    for (arm, normalization), ends in points.items():
        colour, full = COLOURS[arm], normalization == "constant"
        label, face = (arm, colour) if full else (f"{arm}, {normalization}", "none")
        axis.scatter(*zip(*ends, strict=True), facecolors=face, edgecolors=colour, s=40, alpha=0.85, label=label)


def _running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
