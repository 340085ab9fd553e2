"""The policy and the episodes that several sections look at: the BugFix gym after its imitation warm-up."""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any

import torch
from torch import Tensor

from examples.bugfix.environment import MAX_EPISODE_TOKENS, MAX_TURN_TOKENS, MAX_TURNS, BugFixEnvironment
from examples.bugfix.model import build_model
from examples.bugfix.tasks import bugfix_tasks
from examples.bugfix.tokenizer import WordTokenizer
from examples.bugfix.train import imitate
from lit_rl import CausalLMPolicy, Rollouts, Trajectory, rollouts

DEMONSTRATIONS = 12_000
TASKS, GROUP = 8, 8


@cache
def warm_weights(seed: int = 0, demonstrations: int = DEMONSTRATIONS) -> dict[str, Tensor]:
    """Weights after the imitation warm-up, computed once per process.

    Args:
        seed: Of the initial weights and of the demonstrations.
        demonstrations: Scripted episodes that are imitated, once each.

    Returns:
        The state dict of `build_model`.
    """
    model = build_model(seed)
    imitate(model, argparse.Namespace(seed=seed, demonstrations=demonstrations, devices=1, max_tokens=2048))
    return {name: value.clone() for name, value in model.state_dict().items()}


def model_with(weights: dict[str, Tensor]) -> torch.nn.Module:
    """A fresh policy network with given weights.

    Args:
        weights: As `warm_weights` gives them.

    Returns:
        The model.
    """
    model = build_model()
    model.load_state_dict(weights)
    return model


def gym_rollouts(seed: int = 0, **changes: Any) -> Rollouts:
    """Rollouts on the training tasks, 8 attempts at each of 8 tasks.

    Args:
        seed: Of all sampling.
        changes: Arguments of `rollouts` to set otherwise.

    Returns:
        The source of trajectories.
    """
    settings: dict[str, Any] = {
        "tasks_per_iteration": TASKS,
        "group_size": GROUP,
        "end_ids": [WordTokenizer().end_id],
        "max_new_tokens": MAX_TURN_TOKENS,
        "max_turns": MAX_TURNS,
        "max_trajectory_tokens": MAX_EPISODE_TOKENS,
        "seed": seed,
    }
    return rollouts(BugFixEnvironment, bugfix_tasks()[0], **(settings | changes))


@cache
def first_episodes(demonstrations: int = DEMONSTRATIONS) -> tuple[CausalLMPolicy, list[Trajectory]]:
    """The warmed-up policy of seed 0, and 64 episodes that it played.

    Args:
        demonstrations: See `warm_weights`.

    Returns:
        The policy, with its layout resolved, and 8 groups of 8 trajectories.
    """
    policy = CausalLMPolicy(model_with(warm_weights(0, demonstrations)))
    policy.resolve_layout()
    return policy, gym_rollouts().collect(policy, iteration=0, temperature=1.0, progress=False)
