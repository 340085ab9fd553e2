"""What a curriculum warns of, in words that say what to do."""

from __future__ import annotations

from typing import Any

from lit_rl.curriculum.report import CurriculumReport
from lit_rl.curriculum.rules import Rule


def starved(report: CurriculumReport, pool_size: int, tasks: int, floor: int, *, rule: Rule, threshold: float) -> str:
    """The pool has fewer tasks than an iteration must have."""
    return (
        f"{pool_size} of {tasks} tasks are in the pool of {rule!r}, fewer than floor={floor} "
        f"({report.excluded_easy} excluded as easy, {report.excluded_hard} as hard; an attempt passes from "
        f"threshold={threshold:g}). Excluded tasks stand in. Widen the rule, lower or raise `threshold` to what your "
        "rewards reach, or add tasks"
    )


def unreached(report: CurriculumReport, *, iteration: int, threshold: float) -> str | None:
    """No attempt passed although rewards differ; `None` when that is not so."""
    if report.passes or not report.live:
        return None
    return (
        f"no attempt of iteration {iteration} reached threshold={threshold:g}, although the rewards differ in "
        f"{report.live} of {report.groups} groups, so pass rates say little. Set `threshold` to a reward that good "
        'attempts reach, or let the environment give `info["outcome"]`. A group whose rewards differ counts half a '
        "pass meanwhile, so that it is not taken for hopeless"
    )


def unusable_outcome(task_id: str, outcome: Any) -> str:
    """An environment gave an outcome that is no number."""
    return f'`info["outcome"]` of task {task_id!r} is {outcome!r}, which is no finite number; it counts as missing'


def other_estimator(stored: tuple[str, int], own: tuple[str, int]) -> str:
    """Estimates were stored by another estimator: (identity, width) of both."""
    return (
        f"the stored estimates were made by {stored[0]} of width {stored[1]}, this sampler uses {own[0]} of width "
        f"{own[1]}: every task starts unobserved again"
    )
