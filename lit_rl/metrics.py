"""Shares that are exact over microbatches and ranks: numerators and denominators are summed, then divided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lit_rl.curriculum.signal import group_signal
from lit_rl.data.batch import PackedBatch

Counts = dict[str, float]


class TokenMean(Metric):
    """Mean of a number over tokens, each token weighing the same wherever it was computed.

    Example:
        >>> mean = TokenMean()
        >>> mean.update(torch.full((10,), 1.0))
        >>> mean.update(torch.full((30,), 2.0))
        >>> float(mean.compute())
        1.75
    """

    full_state_update = False
    total: Tensor
    weight: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Adds tokens.

        Args:
            values: [M]; may be empty.
            weights: [M] at least 0; `None` weighs every token 1. What has weight 0 may hold anything, NaN included.
        """
        values = values.detach().double()
        weights = torch.ones_like(values) if weights is None else weights.detach().double()
        self.total += torch.where(weights > 0, values * weights, 0.0).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """The mean (float64 scalar); NaN without any token."""
        return self.total / self.weight


class CountingMetric(Metric):
    """Named counts, summed over microbatches and ranks, some of them maxima instead.

    Subclasses name the counts and turn them into figures; see `PaddingCounts`.
    """

    full_state_update = False
    summed: ClassVar[tuple[str, ...]] = ()
    greatest: ClassVar[tuple[str, ...]] = ()
    sums: Tensor
    maxima: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("sums", torch.zeros(len(self.summed), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("maxima", torch.zeros(len(self.greatest), dtype=torch.float64), dist_reduce_fx="max")

    def add(self, counts: Mapping[str, float]) -> None:
        """Adds counts by name; those not named stay as they are."""
        self.sums += self.sums.new_tensor([counts.get(name, 0.0) for name in self.summed])
        self.maxima = torch.maximum(
            self.maxima, self.maxima.new_tensor([counts.get(name, 0.0) for name in self.greatest])
        )

    def drain(self) -> Counts:
        """The counts of all ranks since the last call, which then start again from 0; every rank must call it."""
        self.sync(should_sync=self.sync_on_compute)
        counts = self._counts()
        if self._is_synced:
            self.unsync()
        self.reset()
        return counts

    @classmethod
    def merge(cls, first: Mapping[str, float], second: Mapping[str, float]) -> Counts:
        """Counts of two disjoint parts put together."""
        sums = {name: first.get(name, 0.0) + second.get(name, 0.0) for name in cls.summed}
        return sums | {name: max(first.get(name, 0.0), second.get(name, 0.0)) for name in cls.greatest}

    @staticmethod
    def figures(counts: Mapping[str, float]) -> Counts:
        """What to log."""
        raise NotImplementedError

    def compute(self) -> Counts:
        """`figures` of the counts of all ranks."""
        return self.figures(self._counts())

    def _counts(self) -> Counts:
        sums = dict(zip(self.summed, self.sums.tolist(), strict=True))
        return sums | dict(zip(self.greatest, self.maxima.tolist(), strict=True))


class ZeroAdvantageCounts(CountingMetric):
    """How much of what was collected cannot give a gradient, and why.

    Figures: shares of "groups", "trajectories", "scored_tokens" and "positions" that are not live; shares of all
    groups that are without a live trajectory because they are "all_pass", "all_fail", "equal_partial", "unscored"
    or "masked" (their rewards differ, but no token of them enters the loss); "all_pass_by_outcome" and
    "all_fail_by_outcome", the shares of all groups that are live by shaped rewards although every outcome, or none,
    passes; "truncated", the share of the trajectories that are not live which were cut by a limit. What cannot be known
    (groups of a bare microbatch, outcomes that no environment gave) is left out.

    Example:
        >>> metric = ZeroAdvantageCounts()
        >>> metric.update(live=[False] * 2 + [True] * 2, lengths=[5, 5, 3, 3], scored_counts=[2, 2, 1, 1],
        ...               groups=["a", "a", "b", "b"], rewards=[1.0, 1.0, 1.0, 0.0])
        >>> figures = metric.compute()
        >>> figures["groups"], figures["all_pass"], figures["positions"]
        (0.5, 0.5, 0.625)
    """

    reasons: ClassVar[tuple[str, ...]] = ("all_pass", "all_fail", "equal_partial", "unscored", "masked")
    measures: ClassVar[tuple[str, ...]] = ("groups", "trajectories", "scored_tokens", "positions")
    by_outcome: ClassVar[tuple[str, ...]] = ("all_pass_by_outcome", "all_fail_by_outcome")
    summed = (
        *(*measures, *(f"dead_{name}" for name in measures), *reasons, *by_outcome),
        *("groups_with_outcome", "dead_truncated", "dead_limits_known"),
    )

    def update(
        self,
        *,
        live: Sequence[bool],
        lengths: Sequence[int],
        scored_counts: Sequence[int],
        groups: Sequence[str] | None = None,
        rewards: Sequence[float] | None = None,
        outcomes: Sequence[float | None] | None = None,
        truncated: Sequence[bool] | None = None,
        threshold: float = 1.0,
    ) -> None:
        """Adds trajectories.

        Args:
            live: [n] has a scored token with an advantage other than 0.
            lengths: [n] tokens.
            scored_counts: [n] scored tokens.
            groups: [n] group ids, whole groups only; `None` leaves groups uncounted.
            rewards: [n], NaN where unscored; needed with `groups`.
            outcomes: [n] what counts as passing, `None` where there is none; see `group_signal`.
            truncated: [n] was cut by a limit.
            threshold: Reward from which an attempt counts as passed.
        """
        dead = [not flag for flag in live]
        counts: Counts = {"trajectories": len(dead), "scored_tokens": sum(scored_counts), "positions": sum(lengths)}
        counts["dead_trajectories"] = sum(dead)
        counts["dead_scored_tokens"] = sum(n for n, flag in zip(scored_counts, dead, strict=True) if flag)
        counts["dead_positions"] = sum(n for n, flag in zip(lengths, dead, strict=True) if flag)
        if truncated is not None:
            counts["dead_truncated"] = sum(a and b for a, b in zip(truncated, dead, strict=True))
            counts["dead_limits_known"] = sum(dead)
        if groups is not None:
            if rewards is None:
                raise ValueError("`groups` are counted by their rewards; give `rewards` too")
            counts |= _count_groups(groups, rewards, outcomes or [None] * len(rewards), dead, threshold)
        self.add(counts)

    def update_batch(self, batch: PackedBatch) -> None:
        """Adds the trajectories of a microbatch, fillers left out; its groups are not known."""
        if batch.is_filler:
            return
        segments = batch.segment_lengths.numel()
        scored = torch.bincount(batch.scored_segments, minlength=segments)
        advantages = torch.ones_like(batch.scored) if batch.advantages is None else batch.advantages
        live = torch.bincount(batch.scored_segments[advantages != 0], minlength=segments) > 0
        self.update(live=live.tolist(), lengths=batch.segment_lengths.tolist(), scored_counts=scored.tolist())

    @staticmethod
    def figures(counts: Mapping[str, float]) -> Counts:
        """The shares described above."""
        names = [name for name in ZeroAdvantageCounts.measures if counts.get(name)]
        shares = {name: counts[f"dead_{name}"] / counts[name] for name in names}
        if counts.get("groups"):
            shares |= {name: counts[name] / counts["groups"] for name in ZeroAdvantageCounts.reasons}
        if counts.get("groups_with_outcome"):
            shares |= {name: counts[name] / counts["groups"] for name in ZeroAdvantageCounts.by_outcome}
        if counts.get("dead_limits_known"):
            shares["truncated"] = counts["dead_truncated"] / counts["dead_limits_known"]
        return shares


class PaddingCounts(CountingMetric):
    """What the computed positions were spent on.

    Counts: "positions" = "real" + padding + "filler"; "real" = "prompt" + "scored" ("prompt" is everything read but
    not scored: prompts, observations, masked answers); "live" is a part of "scored", "truncated" the real tokens of
    trajectories that were cut by a limit. Figures add "share" (padding and fillers over positions), "fullest_share"
    (fullest microbatch over the token budget), and "padded_layout_positions" and "padded_layout_share": the same
    trajectories as one padded batch per step.

    Example:
        >>> from lit_rl.data.collate import collate
        >>> from lit_rl.trajectory import Trajectory
        >>> metric = PaddingCounts()
        >>> metric.update(collate([Trajectory([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], 1.0)], rows=[[0]], row_tokens=8))
        >>> figures = metric.compute()
        >>> figures["positions"], figures["real"], figures["scored"], figures["share"]
        (8.0, 5.0, 3.0, 0.375)
    """

    kinds: ClassVar[tuple[str, ...]] = ("positions", "real", "prompt", "scored", "live", "filler", "truncated")
    summed = (*kinds, "trajectories", "settled_padded_positions")
    greatest = ("fullest", "longest", "budget")

    def update(self, batch: PackedBatch) -> None:
        """Adds one microbatch."""
        counts: Counts = {"positions": batch.num_positions, "fullest": batch.num_positions}
        counts["budget"] = batch.max_tokens or 0
        if batch.is_filler:
            self.add(counts | {"filler": batch.num_positions})
            return
        live = batch.num_scored if batch.advantages is None else int((batch.advantages != 0).sum())
        counts |= {"real": batch.num_tokens, "prompt": batch.num_tokens - batch.num_scored, "scored": batch.num_scored}
        counts |= {"live": live, "trajectories": batch.segment_lengths.numel()}
        self.add(counts | {"longest": int(batch.segment_lengths.max())})

    @staticmethod
    def settle_step(counts: Mapping[str, float]) -> Counts:
        """Closes an optimizer step: its trajectories as one padded batch cost their number times the longest."""
        padded = counts["trajectories"] * counts["longest"]
        return dict(counts) | {"settled_padded_positions": padded, "trajectories": 0.0, "longest": 0.0}

    @staticmethod
    def figures(counts: Mapping[str, float]) -> Counts:
        """The counts and shares described above."""
        figures = {name: float(counts[name]) for name in PaddingCounts.kinds}
        padded = counts["settled_padded_positions"] + counts["trajectories"] * counts["longest"]
        if counts["positions"]:
            figures["share"] = 1.0 - counts["real"] / counts["positions"]
        if padded:
            figures |= {"padded_layout_positions": padded, "padded_layout_share": 1.0 - counts["real"] / padded}
        if counts["budget"]:
            figures["fullest_share"] = counts["fullest"] / counts["budget"]
        return figures


def _count_groups(
    groups: Sequence[str],
    rewards: Sequence[float],
    outcomes: Sequence[float | None],
    dead: Sequence[bool],
    threshold: float,
) -> Counts:
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    names = ("dead_groups", "groups_with_outcome", *ZeroAdvantageCounts.reasons, *ZeroAdvantageCounts.by_outcome)
    counts: Counts = {"groups": len(members), **dict.fromkeys(names, 0)}
    for indices in members.values():
        values, found = [rewards[index] for index in indices], [outcomes[index] for index in indices]
        given = any(outcome is not None for outcome in found)
        signal = group_signal(values, found if given else None, threshold=threshold)
        counts["groups_with_outcome"] += given
        if all(dead[index] for index in indices):
            counts["dead_groups"] += 1
            # Rewards that differ have advantages, so only a mask can take the gradient away.
            masked = group_signal(values, threshold=threshold) == "live"
            counts["masked" if masked else signal] += 1
        elif given and signal in ("all_pass", "all_fail"):
            counts[f"{signal}_by_outcome"] += 1
    return counts
