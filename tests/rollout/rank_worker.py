"""One process of a group: collects in several ways and writes what came out; started by `test_ranks.py`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lit_rl.rollout.collect import Rollouts, rollouts
from lit_rl.rollout.environment import Turn
from lit_rl.trajectory import Trajectory
from tests.rollout.toys import Dialogue, ScriptedEngine, make_tasks, tiny_policy


class FailsFor(Dialogue):
    """Raises in the second turn for the tasks in `names`."""

    names: tuple[str, ...] = ()

    def step(self, token_ids: Any) -> Turn:
        turn = super().step(token_ids)
        if self.task["id"] in self.names and len(self.actions) == 2:
            raise OSError(f"planted for {self.task['id']}")
        return turn


class FailsForOne(FailsFor):
    names = ("task-1",)


class FailsForAll(FailsFor):
    names = tuple(f"task-{i}" for i in range(6))


class FailsOnRank(ScriptedEngine):
    """An engine that runs out of memory on rank 1."""

    def generate(self, *args: Any, **options: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise MemoryError("planted in the engine")
        return super().generate(*args, **options)


def source(environment: Any = Dialogue, tasks: int = 6, per_iteration: int = 5, **options: Any) -> Rollouts:
    defaults = {} if "engine" in options else {"end_ids": [2]}
    return rollouts(
        environment, make_tasks(tasks), tasks_per_iteration=per_iteration, group_size=2, **(defaults | options)
    )


def scenarios() -> dict[str, Callable[[], Rollouts]]:
    return {
        "plain": source,
        "few": lambda: source(tasks=3, per_iteration=1),
        "unscored": lambda: source(FailsForOne, errors="unscored", per_iteration=6),
        "one_fails": lambda: source(FailsForOne, per_iteration=6),
        "all_fail": lambda: source(FailsForAll, per_iteration=6),
        "engine": lambda: source(engine=FailsOnRank([5, 2])),
        "after": source,
    }


def content(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "ids": trajectory.token_ids.tolist(),
        "mask": trajectory.action_mask.tolist(),
        "log_probs": trajectory.log_probs,
        "reward": repr(trajectory.reward),
        "group": trajectory.group,
        "info": trajectory.info,
    }


def run(name: str, rank: int, world_size: int) -> dict[str, Any]:
    """Two iterations of one scenario: the trajectories, or the error."""
    made, policy = scenarios()[name](), tiny_policy()
    try:
        found = [
            made.collect(policy, iteration=i, temperature=0.9, rank=rank, world_size=world_size, progress=False)
            for i in range(2)
        ]
    except Exception as error:
        notes = "".join(getattr(error, "__notes__", []))
        return {"error": str(error), "kind": type(error).__name__, "notes": notes, "trace": traceback.format_exc()}
    counts = {key: value for key, value in made.last_statistics.items() if "second" not in key}
    estimates = made.task_sampler.estimates()
    return {"found": [[content(t) for t in one] for one in found], "counts": counts, "estimates": estimates}


def main() -> None:
    rank, world_size, store, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
    )
    for name in scenarios():
        torch.save(run(name, rank, world_size), folder / f"{name}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
