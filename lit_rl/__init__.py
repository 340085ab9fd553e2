"""Reinforcement learning of language models on PyTorch Lightning: packed, exact, self-checking.

The public names. Each is imported when it is first used, so that the pure parts need neither Lightning nor
transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.advantages import group_advantages as group_advantages
    from lit_rl.checks.head import check_head as check_head
    from lit_rl.checks.normalization import check_normalization as check_normalization
    from lit_rl.checks.packing import check_packing as check_packing
    from lit_rl.checks.sampler_ratio import check_sampler_ratio as check_sampler_ratio
    from lit_rl.checks.verdict import Verdict as Verdict
    from lit_rl.curriculum import PassRate as PassRate
    from lit_rl.curriculum import TaskSampler as TaskSampler
    from lit_rl.data.batch import PackedBatch as PackedBatch
    from lit_rl.data.collate import collate as collate
    from lit_rl.data.datamodule import PackedDataModule as PackedDataModule
    from lit_rl.data.packing import pack_sequences as pack_sequences
    from lit_rl.data.plan import StepPlan as StepPlan
    from lit_rl.data.planner import plan_steps as plan_steps
    from lit_rl.data.sampler import TokenBudgetSampler as TokenBudgetSampler
    from lit_rl.normalization import loss_weights as loss_weights
    from lit_rl.policy.causal_lm import CausalLMPolicy as CausalLMPolicy
    from lit_rl.policy.head import LogProbHead as LogProbHead
    from lit_rl.policy.head import TokenLogProbs as TokenLogProbs
    from lit_rl.policy.head import token_log_probs as token_log_probs
    from lit_rl.policy.module import PolicyModule as PolicyModule
    from lit_rl.rollout.collect import Rollouts as Rollouts
    from lit_rl.rollout.collect import rollouts as rollouts
    from lit_rl.rollout.engine import Engine as Engine
    from lit_rl.rollout.engine import TransformersEngine as TransformersEngine
    from lit_rl.rollout.environment import Environment as Environment
    from lit_rl.rollout.environment import Turn as Turn
    from lit_rl.rollout.rewards import SingleTurn as SingleTurn
    from lit_rl.trajectory import Trajectory as Trajectory
    from lit_rl.trajectory import from_dataset as from_dataset
    from lit_rl.trajectory import to_dataset as to_dataset

_HOMES = {
    "advantages": ["group_advantages"],
    "checks.head": ["check_head"],
    "checks.normalization": ["check_normalization"],
    "checks.packing": ["check_packing"],
    "checks.sampler_ratio": ["check_sampler_ratio"],
    "checks.verdict": ["Verdict"],
    "curriculum": ["PassRate", "TaskSampler"],
    "data.batch": ["PackedBatch"],
    "data.collate": ["collate"],
    "data.datamodule": ["PackedDataModule"],
    "data.packing": ["pack_sequences"],
    "data.plan": ["StepPlan"],
    "data.planner": ["plan_steps"],
    "data.sampler": ["TokenBudgetSampler"],
    "normalization": ["loss_weights"],
    "policy.causal_lm": ["CausalLMPolicy"],
    "policy.head": ["LogProbHead", "TokenLogProbs", "token_log_probs"],
    "policy.module": ["PolicyModule"],
    "rollout.collect": ["Rollouts", "rollouts"],
    "rollout.engine": ["Engine", "TransformersEngine"],
    "rollout.environment": ["Environment", "Turn"],
    "rollout.rewards": ["SingleTurn"],
    "trajectory": ["Trajectory", "from_dataset", "to_dataset"],
}
_HOME_OF = {name: f"lit_rl.{home}" for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lit_rl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
