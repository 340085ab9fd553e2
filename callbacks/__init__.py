"""Callbacks for any `PolicyModule`; import them from `lit_rl.callbacks`."""

from lit_rl.callbacks.curriculum import PassRateCurriculum
from lit_rl.callbacks.padding import PaddingMonitor
from lit_rl.callbacks.sampler_ratio import SamplerRatioMonitor
from lit_rl.callbacks.zero_advantage import ZeroAdvantageMonitor

__all__ = ["PaddingMonitor", "PassRateCurriculum", "SamplerRatioMonitor", "ZeroAdvantageMonitor"]
