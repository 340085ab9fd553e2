"""Assumptions replaced by what a pilot run logged: the CSV of a run with `TokenThroughputMonitor`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PREFIX = "throughput/"
# Assumption -> (rate logged over all GPUs, seconds it was measured in).
_RATES = {
    "rollout_rate": ("rollout_tokens_per_second", "rollout_seconds"),
    "scoring_rate": ("old_log_probs_tokens_per_second", "old_log_probs_seconds"),
    "update_rate": ("update_tokens_per_second", "update_seconds"),
}


def measured_assumptions(path: str | Path) -> dict[str, Any]:
    """Fields of `Assumptions` that a pilot run's log knows better.

    Rates are per GPU and averaged over the iterations by their seconds; they hold for the same model, device and
    kind of episodes.

    Args:
        path: `metrics.csv` of Lightning's `CSVLogger`.

    Returns:
        `tokens`, `policy_share`, `rollout_rate`, `scoring_rate` (or no scoring pass), `update_rate`,
        `weight_sync_seconds` and `gpus`, as far as they were logged.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It is a folder, or has no column of the monitor, or something else than numbers in one.
    """
    if Path(path).is_dir():
        raise ValueError(f"{str(path)!r} is a folder; give the metrics.csv in it")
    with Path(path).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(f"{PREFIX}devices")]
    if not rows:
        raise ValueError(
            f"{str(path)!r} has no `{PREFIX}...` column: it must be the metrics.csv of a run with "
            "TokenThroughputMonitor and a CSVLogger"
        )
    try:
        return _averages(rows)
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not what a CSVLogger writes: {error}") from None


def _averages(rows: list[dict[str, str]]) -> dict[str, Any]:
    devices = _numbers(rows, "devices")[-1]
    found: dict[str, Any] = {"gpus": round(devices)}
    for assumption, (rate, seconds) in _RATES.items():
        pairs = [(_number(row, rate), _number(row, seconds)) for row in rows]
        known = [(value, weight) for value, weight in pairs if value and weight]
        if known:
            time = sum(weight for _, weight in known)
            found[assumption] = sum(value * weight for value, weight in known) / time / devices
    if "update_rate" in found and "scoring_rate" not in found:
        found["scoring_passes"] = 0
    for assumption, column in (("tokens", "tokens_per_trajectory"), ("policy_share", "policy_share")):
        if values := _numbers(rows, column):
            found[assumption] = sum(values) / len(values)
    if waiting := _numbers(rows, "waiting_seconds"):
        found["weight_sync_seconds"] = sum(waiting) / len(waiting)
    return found


def _number(row: Mapping[str, str], column: str) -> float | None:
    text = row.get(PREFIX + column)
    return float(text) if text else None


def _numbers(rows: list[dict[str, str]], column: str) -> list[float]:
    return [value for row in rows if (value := _number(row, column)) is not None]
