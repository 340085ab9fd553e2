"""The picture of `lit-rl plan`: decode rates, GPU-hours by phase, memory by part."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], file: Path) -> None:
    """Draws three panels.

    Args:
        report: From `build_report`.
        file: Where to; the ending says the format.

    Raises:
        ModuleNotFoundError: matplotlib is missing; the message says how to get it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("`--plot` needs matplotlib: pip install 'lit-rl[examples]'") from error
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    rates, hours, memory = figure.subplots(1, 3)
    _draw_rates(rates, report)
    _draw_hours(hours, report)
    _draw_memory(memory, report)
    figure.suptitle(f"{report['model']['name']} on {report['gpu']['name']}: arithmetic under the stated assumptions")
    figure.savefig(file, dpi=150)


def _draw_rates(axes: Any, report: dict[str, Any]) -> None:
    for context in sorted({row["context"] for row in report["decode"]}):
        rows = [row for row in report["decode"] if row["context"] == context]
        axes.plot([r["batch"] for r in rows], [r["first_order"] for r in rows], marker="o", label=f"{context:,}")
    axes.axhline(report["train_tokens_per_second"]["first_order"], color="grey", linestyle="--", label="training")
    axes.set(xscale="log", yscale="log", xlabel="decode batch", ylabel="tokens/s per GPU", title="Rates by context")
    batches = sorted({row["batch"] for row in report["decode"]})
    axes.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axes.minorticks_off()
    axes.legend()


def _draw_hours(axes: Any, report: dict[str, Any]) -> None:
    cases = {"first order": report["iteration"]["first_order"], "counted": report["iteration"]["counted"]}
    cases |= {case["changes"].replace(",", "\n"): case for case in report["what_if"]}
    _stacked(axes, {name: case["gpu_hours"] for name, case in cases.items()})
    axes.tick_params(axis="x", labelsize="small")
    axes.set(ylabel="GPU-hours per iteration", title="Where the GPU-hours go")


def _draw_memory(axes: Any, report: dict[str, Any]) -> None:
    memory = report["memory_gb"]
    _stacked(axes, memory["parts"])
    axes.axhline(report["gpu"]["memory"] / 1e9, color="grey", linestyle="--")
    axes.set(
        ylabel="GB per GPU",
        xlabel="how logits are handled",
        title=f"Memory of a {memory['microbatch_tokens']:,}-token microbatch",
    )


def _stacked(axes: Any, columns: dict[str, dict[str, float]]) -> None:
    """One bar per column, one colour per part; parts that are nothing everywhere are left out."""
    bottoms = dict.fromkeys(columns, 0.0)
    for part in next(iter(columns.values())):
        sizes = [column[part] for column in columns.values()]
        if any(sizes):
            axes.bar(list(columns), sizes, bottom=list(bottoms.values()), label=part.replace("_", " "))
            bottoms = {name: bottoms[name] + column[part] for name, column in columns.items()}
    axes.legend()
