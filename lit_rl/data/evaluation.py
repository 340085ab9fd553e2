"""Held-out tasks as one item of a validation or prediction loader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from lit_rl.strategies import gathered_parameters
from lit_rl.trajectory import Trajectory

if TYPE_CHECKING:
    from lit_rl.policy.module import PolicyModule
    from lit_rl.rollout.collect import Rollouts


class EvaluationRequest:
    """Tasks that the current policy is to attempt.

    Args:
        rollouts: How episodes are made.
        tasks: The tasks, each with an "id".
        attempts: Trajectories per task.
        temperature: Sampling temperature; `None` is the module's own.
        rank: Which share of the tasks this process attempts.
        world_size: In how many shares the tasks are split; every process then gets all trajectories.
    """

    # Not a dataclass: Lightning's precision plugins would copy one field by field.
    def __init__(
        self,
        rollouts: Rollouts,
        tasks: Sequence[Mapping[str, Any]],
        *,
        attempts: int = 1,
        temperature: float | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.rollouts, self.tasks, self.attempts = rollouts, tasks, attempts
        self.temperature, self.rank, self.world_size = temperature, rank, world_size

    def collect(self, module: PolicyModule) -> list[Trajectory]:
        """Attempts the tasks.

        Args:
            module: The policy that acts, with its sampling temperature.

        Returns:
            One trajectory per task and attempt, in order.
        """
        assert module.policy is not None
        with gathered_parameters(module.policy):
            return self.rollouts.collect_tasks(
                module.policy,
                self.tasks,
                attempts=self.attempts,
                temperature=self.temperature or module.temperature,
                rank=self.rank,
                world_size=self.world_size,
                progress=False,
            )


def prediction_requests(
    rollouts: Rollouts, tasks: Sequence[Mapping[str, Any]], *, attempts: int, rank: int, world_size: int
) -> list[EvaluationRequest]:
    """Deals tasks out for prediction, one per request.

    Args:
        rollouts: How episodes are made.
        tasks: The tasks, each with an "id".
        attempts: Trajectories per task.
        rank: Which share this process attempts.
        world_size: Number of shares.

    Returns:
        This rank's requests, as many as every other rank's: where tasks run out, the last one has none. Under FSDP2
        each request gathers the weights, for which all ranks have to be there.

    Example:
        >>> shares = [prediction_requests(None, list("abc"), attempts=1, rank=r, world_size=2) for r in (0, 1)]
        >>> [[request.tasks for request in share] for share in shares]
        [[['a'], ['c']], [['b'], []]]
    """
    rounds = math.ceil(len(tasks) / world_size)
    dealt = [tasks[number * world_size :][:world_size] for number in range(rounds)]
    return [EvaluationRequest(rollouts, share[rank : rank + 1], attempts=attempts) for share in dealt]


def reward_statistics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Plain statistics of some trajectories, for the log.

    Args:
        trajectories: Any number of them; unscored ones count everywhere but in rewards.

    Returns:
        `reward` (mean), `pass_rate` (share of rewards of at least 1), `tokens` and `tokens_max` (lengths),
        `action_tokens` (mean scored tokens), `truncated` (share), `unscored` (count), `trajectories` (count).

    Example:
        >>> reward_statistics([Trajectory([1, 2], [0, 1], 1.0), Trajectory([1, 2, 3], [0, 1, 1], 0.0)])["pass_rate"]
        0.5
    """
    count = len(trajectories)
    if count == 0:
        return {"trajectories": 0.0}
    rewards = [t.reward for t in trajectories if t.is_rewarded]
    lengths = [len(t) for t in trajectories]
    return {
        "reward": sum(rewards) / len(rewards) if rewards else math.nan,
        "pass_rate": sum(r >= 1.0 for r in rewards) / len(rewards) if rewards else math.nan,
        "tokens": sum(lengths) / count,
        "tokens_max": float(max(lengths)),
        "action_tokens": sum(t.num_scored for t in trajectories) / count,
        "truncated": sum(t.truncated for t in trajectories) / count,
        "unscored": float(count - len(rewards)),
        "trajectories": float(count),
    }


class Items(torch.utils.data.Dataset[Any]):
    """A list as a data set."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


def every_rank_loader(requests: list[EvaluationRequest]) -> DataLoader:
    """A loader that gives every request to every rank, which attempts its own share of the tasks.

    Args:
        requests: One item each.

    Returns:
        The loader; Lightning leaves its sampler alone, because it is a `DistributedSampler` already.
    """
    items = Items(requests)
    return DataLoader(items, sampler=DistributedSampler(items, num_replicas=1, rank=0, shuffle=False), batch_size=None)
