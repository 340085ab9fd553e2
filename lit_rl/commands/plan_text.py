"""The report of `lit-rl plan` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: int = 2) -> str:
    """Columns of text: the first flush left, the others flush right.

    Example:
        >>> print(table(["phase", "hours"], [["decode", "0.95"]]))
          phase   hours
          decode   0.95
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = []
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
        text.append(" " * indent + "  ".join(cells).rstrip())
    return "\n".join(text)


def render(report: dict[str, Any]) -> str:
    """All sections, one after the other.

    Args:
        report: From `build_report`.

    Returns:
        Text for a terminal.
    """
    sections = (_head, _decode, _iteration, _what_if, _memory, _waste, _changes, _assumptions, _notes)
    return "\n\n".join(text for section in sections if (text := section(report)))


def _head(report: dict[str, Any]) -> str:
    model, gpu = report["model"], report["gpu"]
    return (
        f"{model['name']}: {model['parameters'] / 1e9:.2f}B parameters, {model['active_parameters'] / 1e9:.2f}B "
        f"active, {model['layers']} layers, {model['cache_bytes_per_token']:,} bytes of KV cache per token\n"
        f"{gpu['name']}: {gpu['peak_flops'] / 1e12:g} TFLOP/s dense bf16, {gpu['bandwidth'] / 1e12:g} TB/s, "
        f"{gpu['memory'] / 1e9:g} GB\n"
        "first order: 2 bytes and 6 FLOPs per parameter and token, no attention; counted: only what is multiplied, "
        "with attention"
    )


def _decode(report: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['context']:,}",
            str(row["batch"]),
            f"{int(row['first_order']):,}",  # an upper bound is rounded down
            f"{int(row['counted']):,}",
            row["bound"],
            _fits(row["batch"], row["sequences_that_fit"]),
        ]
        for row in report["decode"]
    ]
    train = report["train_tokens_per_second"]
    return (
        "Tokens/s per GPU while decoding, at most\n"
        + table(["context", "batch", "first order", "counted", "bound by", "fits"], rows)
        + f"\nTraining: {train['first_order']:,.0f} first order, {train['counted']:,.0f} counted"
    )


def _fits(batch: int, most: int | None) -> str:
    """Without a cache there is no limit."""
    if most is None:
        return "yes, no limit"
    return "yes" if batch <= most else f"no, {most}"


def _iteration(report: dict[str, Any]) -> str:
    first, counted = report["iteration"]["first_order"], report["iteration"]["counted"]
    rows = [
        [
            phase,
            _hours(hours),
            f"{first['share'][phase]:.0%}",
            _hours(counted["gpu_hours"][phase]),
            f"{counted['share'][phase]:.0%}",
        ]
        for phase, hours in first["gpu_hours"].items()
    ]
    rows.append(["one iteration", _hours(first["total"]), "", _hours(counted["total"]), ""])
    rows.append([f"{first['iterations']} iterations", f"{first['run']:,.0f}", "", f"{counted['run']:,.0f}", ""])
    wall = [f"{part['wall_hours_of_run']:,.1f}" for part in (first, counted)]
    rows.append(["hours on all GPUs", wall[0], "", wall[1], ""])
    return "GPU-hours\n" + table(["", "first order", "share", "counted", "share"], rows)


def _what_if(report: dict[str, Any]) -> str:
    if not report["what_if"]:
        return ""
    base = report["iteration"]["first_order"]
    cases = [base, *report["what_if"]]
    phases = [phase for phase in base["gpu_hours"] if any(case["gpu_hours"][phase] for case in cases)]
    rows = [["as planned", *(_hours(base["gpu_hours"][phase]) for phase in phases), _hours(base["total"])]]
    for case in report["what_if"]:
        cells = [_times(case["gpu_hours"][phase], case["times_base"][phase]) for phase in phases]
        rows.append([case["changes"], *cells, _times(case["total"], case["total_times_base"])])
    return "What if (GPU-hours per iteration, first order)\n" + table(["", *phases, "total"], rows)


def _memory(report: dict[str, Any]) -> str:
    memory = report["memory_gb"]
    heads = list(memory["parts"])
    rows = [[part, *(f"{memory['parts'][head][part]:.1f}" for head in heads)] for part in memory["parts"][heads[0]]]
    rows.append(["total", *(f"{memory['total'][head]:.1f}" for head in heads)])
    return (
        f"Memory per GPU for a microbatch of {memory['microbatch_tokens']:,} tokens, GB, by how logits are handled\n"
        + table(["", *heads], rows)
        + "".join(f"\n  {line}" for line in memory["assumptions"][:2])
    )


def _waste(report: dict[str, Any]) -> str:
    waste, lines = report["waste"], []
    if "padding_share_of_padded_batches_of_8" in waste:
        share = waste["padding_share_of_padded_batches_of_8"]
        lines.append(f"padded batches of 8 would be {share:.0%} padding; packed rows have none")
        for budget in waste["budgets"]:
            lines.append(
                f"budget {budget['max_tokens']:,}: {budget['microbatches']} microbatches per rank, "
                f"{1 - budget['useful_share']:.1%} of the update spent waiting for the slowest rank"
            )
    if "zero_advantage_groups" in waste:
        lines.append(
            f"{waste['zero_advantage_groups']:.0%} of the groups would have no advantage: "
            f"{waste['gpu_hours_on_zero_advantage']:.2f} GPU-hours per iteration without a gradient"
        )
    return "\n  ".join(["Waste", *lines]) if lines else ""


def _changes(report: dict[str, Any]) -> str:
    rows = [[c["label"], f"{c['share']:+.0%}", f"{c['gpu_hours']:+.2f}"] for c in report["changes"]]
    return "Cheapest changes, each alone\n" + table(["", "total", "GPU-hours"], rows) if rows else ""


def _assumptions(report: dict[str, Any]) -> str:
    rows = [[item["name"], _value(item["value"]), item["origin"]] for item in report["assumptions"]]
    return "Assumptions\n" + table(["", "value", "origin"], rows)


def _times(hours: float, times: float | None) -> str:
    """Hours and how many times the planned ones they are; a phase that was not planned is no multiple."""
    return f"{_hours(hours)} ({'new' if times is None and hours else f'x{1.0 if times is None else times:.2f}'})"


def _hours(hours: float) -> str:
    """Two decimals, or one digit of a small number."""
    return f"{hours:.2f}" if hours >= 0.01 or hours == 0 else f"{hours:.1g}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _notes(report: dict[str, Any]) -> str:
    return "\n  ".join(["Notes", *report["notes"]])
