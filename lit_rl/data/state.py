"""Trajectories as tensors and primitives, so that a checkpoint holding them loads with `weights_only=True`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from lit_rl.trajectory import Trajectory


def trajectories_to_state(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Flattens trajectories for a checkpoint.

    Args:
        trajectories: In order.

    Returns:
        Tensors and primitives only; `trajectories_from_state` gives the trajectories back bit for bit.

    Example:
        >>> state = trajectories_to_state([Trajectory([1, 2], [0, 1], 1.0, task="a")])
        >>> trajectories_from_state(state)[0].task
        'a'
    """
    if len(trajectories) == 0:
        return {"lengths": torch.zeros(0, dtype=torch.int64)}
    log_probs = [t.log_probs for t in trajectories if t.log_probs is not None]
    return {
        "lengths": torch.tensor([len(t) for t in trajectories]),
        "token_ids": torch.cat([t.token_ids for t in trajectories]),
        "action_mask": torch.cat([t.action_mask for t in trajectories]),
        "temperature": torch.cat([t.temperature for t in trajectories]),
        "log_probs": torch.cat(log_probs) if len(log_probs) == len(trajectories) else None,
        "rewards": torch.tensor([t.reward for t in trajectories], dtype=torch.float64),
        "truncated": torch.tensor([t.truncated for t in trajectories]),
        "groups": [t.group for t in trajectories],
        "tasks": [t.task for t in trajectories],
        "info": [json.dumps(t.info) for t in trajectories],
    }


def trajectories_from_state(state: dict[str, Any]) -> list[Trajectory]:
    """The inverse of `trajectories_to_state`.

    Args:
        state: What it gave.

    Returns:
        The trajectories, in order.
    """
    lengths = state["lengths"].tolist()
    if not lengths:
        return []
    log_probs = state["log_probs"]
    pieces = zip(
        state["token_ids"].split(lengths),
        state["action_mask"].split(lengths),
        state["temperature"].split(lengths),
        [None] * len(lengths) if log_probs is None else log_probs.split(lengths),
        strict=True,
    )
    return [
        Trajectory(
            ids,
            mask,
            float(state["rewards"][number]),
            log_probs=sampled,
            group=state["groups"][number],
            task=state["tasks"][number],
            truncated=bool(state["truncated"][number]),
            temperature=temperature,
            info=json.loads(state["info"][number]),
        )
        for number, (ids, mask, temperature, sampled) in enumerate(pieces)
    ]
