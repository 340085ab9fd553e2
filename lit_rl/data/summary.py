"""What planning needs to know about each trajectory, without its tokens; and views of one that train less of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from lit_rl.trajectory import Trajectory, trajectory_from_row

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True, kw_only=True, eq=False)
class Summary:
    """One entry per trajectory; see `lit_rl.data.iteration.Iteration` for the fields."""

    lengths: list[int]
    scored_counts: list[int]
    rewards: Tensor
    groups: list[str]
    tasks: list[str | None]
    truncated: Tensor


class DatasetTrajectories(Sequence[Trajectory]):
    """The rows of a data set as trajectories, each read and validated when it is asked for.

    Args:
        dataset: As `lit_rl.to_dataset` writes it; only `token_ids`, `action_mask` and `reward` are required.

    Raises:
        ValueError: A required column is missing.
    """

    def __init__(self, dataset: Dataset) -> None:
        missing = [name for name in ("token_ids", "action_mask", "reward") if name not in dataset.column_names]
        if missing:
            raise ValueError(f"the data set has no column {missing}; found {dataset.column_names}")
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return trajectory_from_row(self.dataset[index], index)

    def __iter__(self) -> Iterator[Trajectory]:
        return (trajectory_from_row(row, index) for index, row in enumerate(self.dataset))


def summarize(trajectories: Sequence[Trajectory]) -> Summary:
    """Reads every trajectory once.

    Args:
        trajectories: In order.

    Returns:
        Their summary. A trajectory without a group is in the group of its task; without a task, alone in its own.

    Raises:
        ValueError: Only some of the trajectories carry sampler log-probabilities.

    Example:
        >>> summarize([Trajectory([1, 2, 3], [0, 1, 1], 1.0, task="a")]).groups
        ['a']
    """
    summary = Summary(
        lengths=[], scored_counts=[], rewards=torch.zeros(0), groups=[], tasks=[], truncated=torch.zeros(0)
    )
    rewards: list[float] = []
    truncated: list[bool] = []
    sampled: list[bool] = []
    for number, trajectory in enumerate(trajectories):
        summary.lengths.append(len(trajectory))
        summary.scored_counts.append(trajectory.num_scored)
        summary.groups.append(trajectory.group or trajectory.task or f"trajectory {number}")
        summary.tasks.append(trajectory.task)
        rewards.append(trajectory.reward)
        truncated.append(trajectory.truncated)
        sampled.append(trajectory.log_probs is not None)
    if len(set(sampled)) > 1:
        with_them, without = sampled.index(True), sampled.index(False)
        raise ValueError(
            f"trajectory {with_them} has `log_probs` but trajectory {without} has none; give the sampler's "
            "log-probabilities for all trajectories or for none"
        )
    return Summary(
        lengths=summary.lengths,
        scored_counts=summary.scored_counts,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        groups=summary.groups,
        tasks=summary.tasks,
        truncated=torch.tensor(truncated, dtype=torch.bool),
    )


def cut(trajectory: Trajectory, length: int) -> Trajectory:
    """The first tokens of a trajectory, flagged as truncated.

    Args:
        trajectory: At least `length` tokens long.
        length: Tokens to keep.

    Returns:
        The shorter trajectory.

    Example:
        >>> len(cut(Trajectory([1, 2, 3], [0, 1, 1], 1.0), 2))
        2
    """
    return Trajectory(
        trajectory.token_ids[:length],
        trajectory.action_mask[:length],
        trajectory.reward,
        log_probs=None if trajectory.log_probs is None else trajectory.log_probs[:length],
        group=trajectory.group,
        task=trajectory.task,
        truncated=True,
        temperature=trajectory.temperature[:length],
        info=trajectory.info,
    )


def unscored(trajectory: Trajectory) -> Trajectory:
    """The same tokens, none of which enters the loss.

    Args:
        trajectory: Any.

    Returns:
        The trajectory with an empty action mask.

    Example:
        >>> unscored(Trajectory([1, 2, 3], [0, 1, 1], 1.0)).num_scored
        0
    """
    return Trajectory(
        trajectory.token_ids,
        torch.zeros_like(trajectory.action_mask),
        trajectory.reward,
        log_probs=trajectory.log_probs,
        group=trajectory.group,
        task=trajectory.task,
        truncated=trajectory.truncated,
        temperature=trajectory.temperature,
        info=trajectory.info,
    )
