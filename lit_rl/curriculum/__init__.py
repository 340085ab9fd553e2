"""Spending rollouts where there is signal: pass-rate estimators, rules, and the task sampler, without Lightning."""

from lit_rl.curriculum.dynamic import DynamicSampling
from lit_rl.curriculum.pass_rate import (
    Beliefs,
    BetaPosterior,
    ExponentialAverage,
    LastGroup,
    MeanOfLast,
    PassRate,
    live_probability,
)
from lit_rl.curriculum.rules import Interval, LiveProbability, Rule, Thompson, Uniform, Variance
from lit_rl.curriculum.sampler import TaskSampler
from lit_rl.curriculum.signal import count_passes, group_signal

__all__ = [
    "Beliefs",
    "BetaPosterior",
    "DynamicSampling",
    "ExponentialAverage",
    "Interval",
    "LastGroup",
    "LiveProbability",
    "MeanOfLast",
    "PassRate",
    "Rule",
    "TaskSampler",
    "Thompson",
    "Uniform",
    "Variance",
    "count_passes",
    "group_signal",
    "live_probability",
]
