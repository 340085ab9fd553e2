"""Group baselines: how much better an attempt was than the other attempts at the same task."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_rl.options import check_real

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "none"]


class GroupAdvantages(NamedTuple):
    """What `group_advantages` returns.

    Attributes:
        advantages: float64 [n]; exactly 0 where a group's rewards are all equal and where a reward is missing. With
            baseline "none" the reward itself, and 0 where it is missing.
        live: bool [n]; true where the advantage is not 0.
    """

    advantages: Tensor
    live: Tensor


def group_advantages(
    rewards: Sequence[float] | Tensor,
    groups: Sequence[Hashable] | Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "std",
    eps: float = 1e-6,
    missing: Literal["raise", "ignore"] = "raise",
    group_size: int | None = None,
) -> GroupAdvantages:
    r"""Advantage of every trajectory over its group, in float64.

    With group mean \(\bar r\), size G and sample standard deviation s (divisor G - 1):

    - baseline "mean": r - \(\bar r\) (GRPO); "leave_one_out": r minus the mean of the others (RLOO); "none": the
      reward itself, whatever the scale.
    - scale "std": divided by s + eps (GRPO); "none": as it is (Dr. GRPO).

    Membership is by id, never by position, so trajectories may come in any order. A group of one has nothing to
    compare with: its advantage is 0 (except with baseline "none"), and one warning says so.

    Args:
        rewards: [n] numbers; NaN where nobody could score.
        groups: [n] hashable ids.
        baseline: What is subtracted; "none" leaves the reward as it is, and divides by nothing.
        scale: What the difference to the baseline is divided by.
        eps: Added to the standard deviation, in units of reward; finite, at least 0.
        missing: "raise" refuses NaN rewards; "ignore" leaves them out of their group and gives them 0.
        group_size: When given, every group must have exactly this many members.

    Returns:
        The advantages, and which of them are not 0.

    Raises:
        TypeError: `eps` is not a number.
        ValueError: Lengths differ, a reward is missing or infinite, a group has another size than `group_size`, or
            `eps` is negative or infinite.

    Source: Shao et al. 2024 (GRPO), eq. 3; Ahmadian et al. 2024 (RLOO); Liu et al. 2025 (Dr. GRPO).

    Example:
        >>> group_advantages([1.0, 0.0, 0.0, 0.0], [0, 1, 0, 1]).advantages.round(decimals=4).tolist()
        [0.7071, 0.0, -0.7071, 0.0]
        >>> group_advantages([1.0, 1.0, 0.5], [0, 0, 0], baseline="none").advantages.tolist()
        [1.0, 1.0, 0.5]
    """
    values = torch.as_tensor(rewards, dtype=torch.float64)
    ids = groups.tolist() if isinstance(groups, Tensor) else list(groups)
    _check(values, ids, baseline, scale, missing)
    check_real(0, eps=eps)
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(ids):
        members.setdefault(group, []).append(index)
    _check_sizes(members, group_size, baseline)
    advantages = torch.zeros_like(values)
    for indices in members.values():
        present = torch.tensor([i for i in indices if not bool(values[i].isnan())], dtype=torch.int64)
        advantages[present] = _one_group(values[present], baseline, scale, eps)
    return GroupAdvantages(advantages, advantages != 0)


def _one_group(rewards: Tensor, baseline: Baseline, scale: Scale, eps: float) -> Tensor:
    size = rewards.numel()
    if baseline == "none":
        # Not scaled either: without a mean to differ from, equal rewards would be divided by `eps` alone.
        return rewards
    if size < 2 or bool((rewards == rewards[0]).all()):
        # Decided by comparison: a mean of equal numbers may differ from them by a rounding error.
        return torch.zeros_like(rewards)
    if baseline == "mean":
        centred = rewards - rewards.mean()
    else:
        centred = rewards - (rewards.sum() - rewards) / (size - 1)
    return centred if scale == "none" else centred / (rewards.std(correction=1) + eps)


def _check(values: Tensor, ids: list[Hashable], baseline: str, scale: str, missing: str) -> None:
    if values.dim() != 1 or values.numel() != len(ids):
        raise ValueError(f"`rewards` has shape {list(values.shape)} and `groups` {len(ids)} entries; give one of each")
    for name, value, allowed in (
        ("baseline", baseline, ("mean", "leave_one_out", "none")),
        ("scale", scale, ("std", "none")),
        ("missing", missing, ("raise", "ignore")),
    ):
        if value not in allowed:
            raise ValueError(f"`{name}` must be one of {allowed}, got {value!r}")
    if bool(values.isinf().any()):
        index = int(values.isinf().nonzero()[0])
        raise ValueError(
            f"`rewards`[{index}] (group {ids[index]!r}) is {float(values[index])}; expected a finite number"
        )
    if missing == "raise" and bool(values.isnan().any()):
        index = int(values.isnan().nonzero()[0])
        raise ValueError(
            f"`rewards`[{index}] (group {ids[index]!r}) is missing (NaN); score it, or use `missing='ignore'` to "
            "leave it out of its group and out of the loss"
        )


def _check_sizes(members: dict[Hashable, list[int]], group_size: int | None, baseline: str) -> None:
    if group_size is not None:
        for group, indices in members.items():
            if len(indices) != group_size:
                raise ValueError(f"group {group!r} has {len(indices)} trajectories, expected {group_size}")
    if baseline != "none":
        alone = [group for group, indices in members.items() if len(indices) == 1]
        if alone:
            warnings.warn(
                f"{len(alone)} of {len(members)} groups have a single trajectory (first: {alone[0]!r}); without "
                "others to compare with, its advantage is 0",
                stacklevel=3,
            )
