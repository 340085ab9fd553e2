"""Callbacks for any `PolicyModule`; import them from `lit_rl.callbacks`."""

from lit_rl.callbacks.curriculum import PassRateCurriculum
from lit_rl.callbacks.grad_normalization import GradientNormalizationCheck
from lit_rl.callbacks.packing_check import PackingCheck
from lit_rl.callbacks.padding import PaddingMonitor
from lit_rl.callbacks.sampler_ratio import SamplerRatioMonitor
from lit_rl.callbacks.throughput import TokenThroughputMonitor
from lit_rl.callbacks.zero_advantage import ZeroAdvantageMonitor

__all__ = [
    "GradientNormalizationCheck",
    "PackingCheck",
    "PaddingMonitor",
    "PassRateCurriculum",
    "SamplerRatioMonitor",
    "TokenThroughputMonitor",
    "ZeroAdvantageMonitor",
]
