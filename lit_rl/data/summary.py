"""What planning needs to know about each trajectory, without its tokens; and views of one that train less of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from lit_rl.data.files import read_dataset
from lit_rl.rollout.decoding import model_context
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
    largest_ids: list[int]


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
        lengths=[],
        scored_counts=[],
        rewards=torch.zeros(0),
        groups=[],
        tasks=[],
        truncated=torch.zeros(0),
        largest_ids=[],
    )
    rewards: list[float] = []
    truncated: list[bool] = []
    sampled: list[bool] = []
    for number, trajectory in enumerate(trajectories):
        summary.lengths.append(len(trajectory))
        summary.scored_counts.append(trajectory.num_scored)
        summary.groups.append(trajectory.group or trajectory.task or f"trajectory {number}")
        summary.tasks.append(trajectory.task)
        summary.largest_ids.append(int(trajectory.token_ids.max()))
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
        largest_ids=summary.largest_ids,
    )


def check_readable(summary: Summary, model: nn.Module) -> None:
    """Refuses trajectories that a transformers model cannot look up, and warns of ones it was not made for.

    Args:
        summary: Of the trajectories.
        model: Its `config` says how many ids and, with a table of learned positions, how many positions it has.

    Raises:
        ValueError: An id or a length is beyond the model's tables; the message names the trajectory.
    """
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    ids = getattr(embeddings, "num_embeddings", None)
    declared = model_context(model)
    positions = declared if _has_position_table(model) else None
    for number, (largest, length) in enumerate(zip(summary.largest_ids, summary.lengths, strict=True)):
        if ids is not None and largest >= ids:
            raise ValueError(
                f"trajectory {number} (task {summary.tasks[number]!r}) has the token id {largest}, but the model has "
                f"ids up to {ids - 1}; were the ids made with another tokenizer?"
            )
        if positions is not None and length > positions:
            raise ValueError(
                f"trajectory {number} (task {summary.tasks[number]!r}) has {length} tokens, but the model has "
                f"{positions} positions; cut it, or lower `max_tokens` with `overlong='truncate'`"
            )
    longest = max(summary.lengths, default=0)
    if isinstance(declared, int) and longest > declared:
        warnings.warn(
            f"the longest trajectory has {longest} tokens, but the model's configuration says "
            f"`max_position_embeddings`={declared}: it computes them, and was not trained for them",
            stacklevel=2,
        )


def without_rewards(summary: Summary) -> Summary:
    """The same for a loss that needs no rewards: a missing one is no reason to leave a trajectory out.

    Args:
        summary: Of any trajectories.

    Returns:
        A summary with 0 in place of missing rewards.
    """
    return replace(summary, rewards=summary.rewards.nan_to_num(0.0))


def as_trajectories(source: Any) -> Sequence[Trajectory]:
    """What a data module was given, as a sequence.

    Args:
        source: A `datasets.Dataset` as `to_dataset` writes it, the path of a file of its rows, or a list of
            `Trajectory`.

    Returns:
        At least one trajectory; those of a data set are read when they are asked for.

    Raises:
        ValueError: There are none.
        TypeError: The source is something else.
    """
    from datasets import Dataset, DatasetDict

    if isinstance(source, str | Path):
        source = read_dataset(source)
    if isinstance(source, DatasetDict):
        raise TypeError(f"the source is a DatasetDict of the splits {[*source]}; pass one, for example `ds['train']`")
    if hasattr(source, "__len__") and len(source) == 0:
        raise ValueError("there are no trajectories; give at least one")
    if isinstance(source, Dataset):
        return DatasetTrajectories(source)
    if isinstance(source, Sequence) and all(isinstance(item, Trajectory) for item in source):
        return source
    raise TypeError(
        f"the source is a {type(source).__name__}; expected `rollouts(...)`, a datasets.Dataset of trajectories, or a "
        "list of Trajectory"
    )


def _has_position_table(model: nn.Module) -> bool:
    names = ("wpe", "embed_positions", "position_embeddings", "wpe_embeddings")
    return any(
        isinstance(module, nn.Embedding) and name.split(".")[-1] in names for name, module in model.named_modules()
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
