"""One iteration's trajectories with everything that is decided on the whole of them before they are split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_rl.advantages import Baseline, Scale, group_advantages
from lit_rl.data.batch import Layout, PackedBatch
from lit_rl.data.collate import collate, filler_batch
from lit_rl.data.packing import fit_lengths
from lit_rl.data.partition import Partition, partition_steps
from lit_rl.data.plan import StepPlan
from lit_rl.data.planner import plan_partition
from lit_rl.data.summary import Summary, cut, summarize, unscored
from lit_rl.normalization import Denominator, Normalization, loss_weights
from lit_rl.options import check_at_least, check_choices, check_real
from lit_rl.trajectory import Trajectory

Overlong = Literal["raise", "drop", "truncate"]
MissingRewards = Literal["raise", "ignore"]
Truncated = Literal["keep", "mask"]


@dataclass(frozen=True, kw_only=True)
class IterationOptions:
    """How trajectories become microbatches; see `PackedDataModule` and `PolicyModule` for the meaning of each.

    Raises:
        ValueError: `max_tokens` or `num_steps` cannot work.
        TypeError: `max_tokens` is not an integer.
    """

    max_tokens: int
    num_steps: int = 1
    layout: Layout = "packed"
    overlong: Overlong = "raise"
    baseline: Baseline = "mean"
    scale: Scale = "std"
    eps: float = 1e-6
    missing_rewards: MissingRewards = "raise"
    truncated: Truncated = "keep"
    normalization: Normalization = "token_mean"
    constant: float | None = None
    denominator: Denominator = "all"
    loss_on: Literal["live", "scored"] = "live"
    partition: Partition = "groups"
    objective: Literal["lockstep", "rank_total"] = "lockstep"
    cost: Callable[[Any], Any] | None = field(default=None, compare=False)
    microbatches_per_step: int | None = None
    world_size: int = 1
    seed: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        if self.max_tokens is None:
            raise TypeError("`max_tokens` must be an integer of at least 1, got None")
        check_at_least(1, max_tokens=self.max_tokens, steps_per_iteration=self.num_steps)
        check_choices(
            overlong=(self.overlong, Overlong),
            baseline=(self.baseline, Baseline),
            scale=(self.scale, Scale),
            missing_rewards=(self.missing_rewards, MissingRewards),
            truncated=(self.truncated, Truncated),
            partition=(self.partition, Partition),
        )
        check_real(0, eps=self.eps)
        if self.cost is not None and not callable(self.cost):
            raise TypeError(f"`cost` must map the lengths of a microbatch to a number, got {self.cost!r}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Iteration:
    """One rollout (or one pass over a data set) and the plan of the updates made with it; equal on every rank.

    Attributes:
        index: Number of the iteration, from 0: the Trainer's epoch.
        trajectories: All of them, also those that are not trained.
        lengths: Tokens of each.
        scored_counts: Scored tokens of each; 0 where masked by an option.
        rewards: float64 [n]; NaN where unscored.
        groups: Group id of each.
        tasks: Task id of each.
        truncated: bool [n]: by the rollout, or to the token budget.
        advantages: float64 [n].
        live: bool [n]: has scored tokens and an advantage other than 0.
        kept: Indices of the trajectories in the plan.
        cut: Number of trajectories that were shortened to the token budget.
        dropped: Reason ("overlong", "unscored", "no_scored_token", "zero_advantage") to number of trajectories.
        weights: float64 [n]: what each scored token's loss is worth in its step.
        plan: Which rank computes which trajectories in which microbatch.
        layout: Of its microbatches.
    """

    index: int
    trajectories: Sequence[Trajectory]
    lengths: list[int]
    scored_counts: list[int]
    rewards: Tensor
    groups: list[str]
    tasks: list[str | None]
    truncated: Tensor
    advantages: Tensor
    live: Tensor
    kept: list[int]
    dropped: dict[str, int]
    cut: int
    weights: Tensor
    plan: StepPlan
    layout: Layout

    def __len__(self) -> int:
        return len(self.lengths)

    def microbatch(self, indices: Sequence[int], old_log_probs: Sequence[Tensor] | None = None) -> PackedBatch:
        """Builds one microbatch of the plan.

        Args:
            indices: Trajectories in it; none makes a filler.
            old_log_probs: [L] per trajectory of the iteration, or `None`.

        Returns:
            The microbatch, with advantages and weights.
        """
        if len(indices) == 0:
            return filler_batch(max_tokens=self.plan.max_tokens)
        chosen = torch.tensor(list(indices))
        return collate(
            [self._trained(index) for index in indices],
            layout=self.layout,
            indices=indices,
            advantages=self.advantages[chosen],
            weights=self.weights[chosen],
            old_log_probs=None if old_log_probs is None else [old_log_probs[index] for index in indices],
            max_tokens=self.plan.max_tokens,
        )

    def _trained(self, index: int) -> Trajectory:
        trajectory = self.trajectories[index]
        if len(trajectory) > self.lengths[index]:
            trajectory = cut(trajectory, self.lengths[index])
        return trajectory if self.scored_counts[index] else unscored(trajectory)


class Microbatches:
    """An iteration as a data set: index lists of the plan are looked up in it.

    Args:
        iteration: The iteration.
        old_log_probs: [L] per trajectory, or `None`.
    """

    def __init__(self, iteration: Iteration, old_log_probs: list[Tensor] | None) -> None:
        self.iteration = iteration
        self.old_log_probs = old_log_probs

    def __getitem__(self, indices: Sequence[int]) -> PackedBatch:
        return self.iteration.microbatch(indices, self.old_log_probs)

    def __len__(self) -> int:
        return len(self.iteration)


def iteration_of(trainer: Any) -> Iteration | None:
    """The iteration a Trainer is in, where its data module is a `PackedDataModule`.

    Args:
        trainer: A Lightning Trainer.

    Returns:
        The iteration, or `None` with a loader of the user's own.
    """
    iteration = getattr(getattr(trainer, "datamodule", None), "iteration", None)
    return iteration if isinstance(iteration, Iteration) else None


def build_iteration(
    trajectories: Sequence[Trajectory], index: int, options: IterationOptions, summary: Summary | None = None
) -> Iteration:
    """Decides everything that belongs to the whole iteration: advantages, what is dropped, weights, the plan.

    Advantages come first, over complete groups, so that nothing dropped later changes a baseline. The partition
    into steps and the divisors come before trajectories without a gradient leave, so leaving them out is exact.

    Args:
        trajectories: In the same order on every rank.
        index: Number of the iteration.
        options: See `IterationOptions`.
        summary: Of the trajectories when it is known already; `None` computes it.

    Returns:
        The iteration.

    Raises:
        ValueError: A trajectory does not fit the budget, a reward is missing, or a plan is impossible.

    Example:
        >>> pair = [Trajectory([1, 2, 3], [0, 1, 1], 1.0, task="a"), Trajectory([1, 4], [0, 1], 0.0, task="a")]
        >>> iteration = build_iteration(pair, 0, IterationOptions(max_tokens=8))
        >>> iteration.plan.num_microbatches, (iteration.weights * torch.tensor(iteration.scored_counts)).sum().item()
        (1, 1.0)
    """
    summary = summarize(trajectories) if summary is None else summary
    _check_trajectories(summary, options)
    advantages = group_advantages(
        summary.rewards,
        summary.groups,
        baseline=options.baseline,
        scale=options.scale,
        eps=options.eps,
        missing=options.missing_rewards,
    ).advantages
    fitted = fit_lengths(summary.lengths, options.max_tokens, overlong=options.overlong)
    fitting, lengths = fitted.kept.tolist(), fitted.lengths.tolist()
    shortened = [number for number, length in zip(fitting, lengths, strict=True) if length < summary.lengths[number]]
    truncated = summary.truncated.clone()
    truncated[shortened] = True
    summary = replace(summary, truncated=truncated)
    counts = _scored_counts(trajectories, summary, fitting, lengths, options)
    has_scores = torch.tensor(counts, dtype=torch.int64) > 0
    live = has_scores & (advantages != 0)
    by_group = summary.groups if options.partition == "groups" else None
    steps = partition_steps(len(counts), options.num_steps, groups=by_group, seed=options.seed)
    weights = torch.zeros(len(counts), dtype=torch.float64)
    for members in steps:
        weights[members] = _step_weights(members, counts, summary.groups, live, options)
    trained = live if options.loss_on == "live" else has_scores
    cut_lengths = dict(zip(fitting, lengths, strict=True))
    kept = [number for number in fitting if bool(trained[number])]
    plan = plan_partition(
        [cut_lengths.get(number, length) for number, length in enumerate(summary.lengths)],
        [[number for number in members if bool(trained[number]) and number in cut_lengths] for members in steps],
        max_tokens=options.max_tokens,
        world_size=options.world_size,
        layout=options.layout,
        cost=options.cost,
        seed=options.seed,
        objective=options.objective,
        microbatches_per_step=options.microbatches_per_step,
    )
    return Iteration(
        index=index,
        trajectories=trajectories,
        lengths=[cut_lengths.get(number, length) for number, length in enumerate(summary.lengths)],
        scored_counts=counts,
        rewards=summary.rewards,
        groups=summary.groups,
        tasks=summary.tasks,
        truncated=summary.truncated,
        advantages=advantages,
        live=live,
        kept=kept,
        cut=fitted.losses.truncated_trajectories,
        dropped=_reasons(summary, set(fitting), has_scores, trained),
        weights=weights,
        plan=plan,
        layout=options.layout,
    )


def _check_trajectories(summary: Summary, options: IterationOptions) -> None:
    """Says what is wrong in the words of the data module, before anything is computed."""
    for number, (length, task) in enumerate(zip(summary.lengths, summary.tasks, strict=True)):
        if length > options.max_tokens and options.overlong == "raise":
            raise ValueError(
                f"trajectory {number} (task {task!r}) has {length} tokens, but `max_tokens` allows at most "
                f"{options.max_tokens}; raise it, or choose `overlong='drop'` or 'truncate'"
            )
    missing = summary.rewards.isnan()
    if options.missing_rewards == "raise" and bool(missing.any()):
        number = int(missing.nonzero()[0])
        raise ValueError(
            f"trajectory {number} (task {summary.tasks[number]!r}, group {summary.groups[number]!r}) has no reward; "
            "score it, or choose `missing_rewards='ignore'` to leave it out of baseline and loss"
        )


def _scored_counts(
    trajectories: Sequence[Trajectory],
    summary: Summary,
    fitting: list[int],
    lengths: list[int],
    options: IterationOptions,
) -> list[int]:
    counts = [0] * len(summary.lengths)
    for number, length in zip(fitting, lengths, strict=True):
        masked = options.truncated == "mask" and bool(summary.truncated[number])
        if masked or bool(summary.rewards[number].isnan()):
            continue
        is_cut = length < summary.lengths[number]
        counts[number] = cut(trajectories[number], length).num_scored if is_cut else summary.scored_counts[number]
    return counts


def _step_weights(
    members: list[int], counts: list[int], groups: list[str], live: Tensor, options: IterationOptions
) -> Tensor:
    return loss_weights(
        [counts[number] for number in members],
        [groups[number] for number in members],
        mode=options.normalization,
        constant=options.constant,
        live=live[members],
        denominator=options.denominator,
    )


def _reasons(summary: Summary, fitting: set[int], has_scores: Tensor, trained: Tensor) -> dict[str, int]:
    reasons = {"overlong": 0, "unscored": 0, "no_scored_token": 0, "zero_advantage": 0}
    for number in range(len(summary.lengths)):
        if bool(trained[number]):
            continue
        if number not in fitting:
            reasons["overlong"] += 1
        elif bool(summary.rewards[number].isnan()):
            reasons["unscored"] += 1
        elif not bool(has_scores[number]):
            reasons["no_scored_token"] += 1
        else:
            reasons["zero_advantage"] += 1
    return reasons
