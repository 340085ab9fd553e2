"""How the tests collect: a source with small numbers, and what two collections have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.rollout.collect import Rollouts, rollouts
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.trajectory import Trajectory
from tests.rollout.toys import END, Dialogue, make_tasks, tiny_policy


class OneToken(Environment):
    """A prompt of one token; one action; the task's reward, or 1."""

    def reset(self, task: Any) -> Sequence[int]:
        self.task = task
        return [4]

    def step(self, token_ids: Sequence[int]) -> Turn:
        return Turn(done=True, reward=self.task.get("reward", 1.0))


def source(environment: Any = Dialogue, tasks: Any = None, **options: Any) -> Rollouts:
    defaults = {"tasks_per_iteration": 4, "group_size": 3, "max_new_tokens": 6, "end_ids": [END]}
    if "engine" in options:
        del defaults["end_ids"]
    return rollouts(environment, make_tasks(6) if tasks is None else tasks, **(defaults | options))


def collect(rollouts_: Rollouts, policy: CausalLMPolicy | None = None, **options: Any) -> list[Trajectory]:
    arguments = {"iteration": 0, "temperature": 0.8, "progress": False} | options
    return rollouts_.collect(tiny_policy() if policy is None else policy, **arguments)


def content(trajectory: Trajectory) -> tuple[Any, ...]:
    mask = trajectory.action_mask.tolist()
    return (
        trajectory.group,
        trajectory.token_ids.tolist(),
        mask,
        trajectory.reward,
        trajectory.truncated,
        trajectory.info,
    )


def same(first: Sequence[Trajectory], second: Sequence[Trajectory]) -> bool:
    assert [content(t) for t in first] == [content(t) for t in second]
    for one, other in zip(first, second, strict=True):
        assert torch.allclose(one.log_probs, other.log_probs, atol=1e-5)
    return True
