"""Tasks by id, and the attempts at them with their groups and seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.rollout.sampling import derive_seed


@dataclass(frozen=True)
class Attempt:
    """Which episode this is.

    Args:
        task: The task as the environment gets it.
        task_id: Its id.
        group: Id of its group.
        number: Which attempt at the task within the iteration, from 0.
        seed: Derived from everything that tells this attempt apart.
    """

    task: Mapping[str, Any]
    task_id: str
    group: str
    number: int
    seed: int


def plan_attempts(
    tasks: Sequence[Mapping[str, Any]], attempts: int, *, iteration: int, seed: int, purpose: str
) -> list[list[Attempt]]:
    """Lists the episodes of one collection, one group per entry of `tasks`.

    Args:
        tasks: Each with an id; a task that comes twice gets two groups and goes on counting its attempts.
        attempts: Per group.
        iteration: Part of group ids and seeds.
        seed: Part of the seeds.
        purpose: Part of the seeds.

    Returns:
        `attempts` attempts for every entry, in order.

    Example:
        >>> groups = plan_attempts([{"id": "a"}, {"id": "a"}], 2, iteration=3, seed=0, purpose="training")
        >>> [(attempt.group, attempt.number) for group in groups for attempt in group]
        [('3:a:0', 0), ('3:a:0', 1), ('3:a:1', 2), ('3:a:1', 3)]
    """
    seen: Counter[str] = Counter()
    groups = []
    for position, task in enumerate(tasks):
        task_id = task_id_of(task, position)
        occurrence = seen[task_id]
        seen[task_id] += 1
        numbers = range(occurrence * attempts, (occurrence + 1) * attempts)
        seeds = [derive_seed(seed, purpose, iteration, task_id, number) for number in numbers]
        group = f"{iteration}:{task_id}:{occurrence}"
        groups.append([Attempt(task, task_id, group, n, s) for n, s in zip(numbers, seeds, strict=True)])
    return groups


def index_tasks(tasks: Any, argument: str = "tasks") -> dict[str, int]:
    """Finds each task's position by its id; of a `datasets.Dataset` only the id column is read.

    Args:
        tasks: A sequence of mappings.
        argument: What the caller calls them, for the messages.

    Returns:
        Id to position.

    Raises:
        TypeError: It is no sequence of mappings, or an id is no string.
        ValueError: There is no task, an id is missing, or two tasks have the same.

    Example:
        >>> index_tasks([{"id": "a"}, {"id": "b"}])
        {'a': 0, 'b': 1}
        >>> index_tasks([{"id": "a"}, {"id": "a"}])
        Traceback (most recent call last):
        ...
        ValueError: `tasks`: tasks 0 and 1 both have the id 'a'; ids must be unique
    """
    if isinstance(tasks, Mapping) or not hasattr(tasks, "__getitem__") or not hasattr(tasks, "__len__"):
        raise TypeError(f"`{argument}` must be a sequence of mappings, got {type(tasks).__name__}")
    if len(tasks) == 0:
        raise ValueError(f"`{argument}` is empty; give at least one")
    columns = getattr(tasks, "column_names", ())
    rows = [{"id": task_id} for task_id in tasks["id"]] if "id" in columns else tasks
    index: dict[str, int] = {}
    for position in range(len(rows)):
        task_id = task_id_of(rows[position], position, argument)
        if task_id in index:
            raise ValueError(
                f"`{argument}`: tasks {index[task_id]} and {position} both have the id {task_id!r}; ids must be unique"
            )
        index[task_id] = position
    return index


def task_id_of(task: Any, position: int, argument: str = "tasks") -> str:
    """The id of a task.

    Args:
        task: A mapping with a string under "id".
        position: Where it stands, for error messages.
        argument: In what the caller calls so.

    Returns:
        The id.

    Raises:
        TypeError: It is no mapping, or its id is no string.
        ValueError: It has no id.
    """
    if not isinstance(task, Mapping):
        raise TypeError(f"`{argument}`: task {position} is a {type(task).__name__}, expected a mapping with an 'id'")
    if "id" not in task:
        raise ValueError(
            f"`{argument}`: task {position} has no 'id' (found {sorted(task)}); give each task a stable string id"
        )
    if not isinstance(task["id"], str):
        raise TypeError(f"`{argument}`: task {position} has the id {task['id']!r}, expected a string; use str(...)")
    return task["id"]
