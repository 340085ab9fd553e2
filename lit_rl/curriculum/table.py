"""Numbers about tasks that follow each task's id: through new tasks, vanished tasks and checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# What stands for a task that was never drawn or observed; iterations count from 0.
_NEVER = -1
_INTEGER_COLUMNS = {"groups": 0, "attempts": 0, "observed_at": _NEVER, "drawn_at": _NEVER, "in_pass": 0, "active": 0}


class TaskTable:
    """One row per task ever known, sorted by id, so that the rows do not depend on the order tasks are given in.

    A task that vanished keeps its row, marked inactive, and takes it up again when it comes back.

    Args:
        width: Numbers that the estimator keeps per task.

    Attributes:
        ids: The ids, sorted.
        columns: "states" float64 [n, width] (the estimator's), and int64 [n]: "groups" and "attempts" observed,
            iteration "observed_at" and "drawn_at" (-1: never), "in_pass" (1: drawn in the current pass), "active".

    Example:
        >>> table = TaskTable(width=1)
        >>> table.activate(["b", "a"])
        >>> table.ids, table.row("b"), table.columns["drawn_at"].tolist()
        (['a', 'b'], 1, [-1, -1])
    """

    def __init__(self, width: int) -> None:
        self.ids: list[str] = []
        self.columns: dict[str, NDArray[Any]] = {"states": np.zeros((0, width))}
        self.columns |= {name: np.zeros(0, dtype=np.int64) for name in _INTEGER_COLUMNS}
        self._rows: dict[str, int] = {}

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self.columns[column]

    def row(self, task_id: str) -> int:
        """The row of a task.

        Raises:
            ValueError: The task was never known.
        """
        try:
            return self._rows[task_id]
        except KeyError:
            raise ValueError(
                f"unknown task {task_id!r}; the sampler knows {len(self.ids)} tasks (first: {self.ids[:3]}). "
                "Add new tasks with `set_tasks`"
            ) from None

    def rows(self, task_ids: Iterable[str]) -> NDArray[np.int64]:
        """The rows of several tasks."""
        return np.array([self.row(task_id) for task_id in task_ids], dtype=np.int64)

    def active_rows(self) -> NDArray[np.int64]:
        """The rows of the tasks that can be drawn, in the order of their ids."""
        return np.flatnonzero(self["active"])

    def activate(self, task_ids: Sequence[str]) -> None:
        """Makes exactly these tasks drawable; unknown ones get a fresh row, all others keep theirs.

        Args:
            task_ids: Distinct ids.
        """
        new = [task_id for task_id in task_ids if task_id not in self._rows]
        if new:
            self._append(new)
        self["active"][:] = 0
        self["active"][self.rows(task_ids)] = 1

    def _append(self, new: list[str]) -> None:
        ids = self.ids + new
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__))
        for name, values in self.columns.items():
            fresh = np.full((len(new), *values.shape[1:]), _INTEGER_COLUMNS.get(name, 0), dtype=values.dtype)
            self.columns[name] = np.concatenate([values, fresh])[order]
        self._set_ids([ids[index] for index in order])

    def _set_ids(self, ids: list[str]) -> None:
        self.ids = ids
        self._rows = {task_id: row for row, task_id in enumerate(ids)}

    def state_dict(self) -> dict[str, Any]:
        """The ids as a list, every column as a tensor."""
        return {"ids": list(self.ids)} | {name: torch.from_numpy(v.copy()) for name, v in self.columns.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over every stored row; the tasks that are active now stay the active ones.

        Args:
            state: From `state_dict`.
        """
        active = [self.ids[row] for row in self.active_rows()]
        self.columns = {name: state[name].numpy().copy() for name in self.columns}
        self._set_ids(list(state["ids"]))
        self.activate(active)

    def forget_observations(self, width: int) -> None:
        """Makes every task unobserved; when tasks were drawn stays known."""
        self.columns["states"] = np.zeros((len(self.ids), width))
        for name in ("groups", "attempts", "observed_at"):
            self.columns[name][:] = _INTEGER_COLUMNS[name]
