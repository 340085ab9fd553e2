"""Checks of arguments: what was got, what was expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lit_rl.options import as_integer


def integer(name: str, value: Any, least: int) -> int:
    """An integer argument of at least `least`, or a clear error."""
    number = as_integer(value)
    if number is None:
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    if number < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    return number


def distinct_ids(task_ids: Iterable[str | int]) -> list[str]:
    """Task ids as distinct strings, at least one, or a clear error."""
    if isinstance(task_ids, (str, bytes)):
        raise TypeError(f"`task_ids` must be a sequence of ids, got the text {task_ids!r}")
    ids = []
    for index, task_id in enumerate(task_ids):
        name = task_id if isinstance(task_id, str) else as_integer(task_id)
        if name is None:
            raise TypeError(f"`task_ids`[{index}] must be a string (or an integer), got {task_id!r}")
        ids.append(str(name))
    if not ids:
        raise ValueError("`task_ids` is empty; a curriculum needs at least one task")
    if len(set(ids)) < len(ids):
        twice = next(task_id for task_id in ids if ids.count(task_id) > 1)
        raise ValueError(f"task id {twice!r} comes {ids.count(twice)} times; ids must be distinct")
    return ids


def in_range(
    name: str, value: Any, low: float, high: float, *, open_below: bool = False, open_above: bool = False
) -> None:
    """Refuses a number outside an interval."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    above = value > low if open_below else value >= low
    below = value < high if open_above else value <= high
    if not (above and below):
        interval = f"{'(' if open_below else '['}{low:g}, {high:g}{')' if open_above else ']'}"
        raise ValueError(f"`{name}` must lie in {interval}, got {value!r}")
