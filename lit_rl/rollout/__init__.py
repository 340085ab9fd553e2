"""Rollouts: who acts (environment), who generates (engine), and how episodes become trajectories (collect)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.rollout.collect import Rollouts as Rollouts
    from lit_rl.rollout.collect import rollouts as rollouts
    from lit_rl.rollout.engine import Completion as Completion
    from lit_rl.rollout.engine import Engine as Engine
    from lit_rl.rollout.engine import TransformersEngine as TransformersEngine
    from lit_rl.rollout.environment import Environment as Environment
    from lit_rl.rollout.environment import Turn as Turn
    from lit_rl.rollout.episode import RolloutError as RolloutError
    from lit_rl.rollout.rewards import SingleTurn as SingleTurn

_HOME_OF = {
    "Completion": "engine",
    "Engine": "engine",
    "Environment": "environment",
    "RolloutError": "episode",
    "Rollouts": "collect",
    "SingleTurn": "rewards",
    "TransformersEngine": "engine",
    "Turn": "environment",
    "rollouts": "collect",
}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lit_rl.rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lit_rl.rollout.{_HOME_OF[name]}"), name)
