"""Throughput accounting: from a model's shape and token counts to FLOPs, rates, GPU-hours and memory."""

from lit_rl.throughput.budget import Measurement, MemoryFit, Recommendation, fit_memory, recommend_budget
from lit_rl.throughput.changes import Change, cheapest_changes, dead_group_share
from lit_rl.throughput.flops import Flops, attention_flops, attention_pairs, model_flops
from lit_rl.throughput.hardware import ACCELERATORS, Accelerator, find_accelerator, known_accelerator
from lit_rl.throughput.hours import Assumptions, StepHours, step_gpu_hours
from lit_rl.throughput.lengths import lognormal_lengths, parse_lengths
from lit_rl.throughput.measured import measured_assumptions
from lit_rl.throughput.memory import MemoryBreakdown, activation_bytes, logits_bytes, memory_breakdown
from lit_rl.throughput.presets import PRESETS
from lit_rl.throughput.roofline import (
    DecodeRate,
    bandwidth_share,
    decode_rate,
    read_seconds,
    read_weights,
    sequences_that_fit,
    train_rate,
)
from lit_rl.throughput.shape import LayerShape, ModelShape
from lit_rl.throughput.waste import BudgetWaste, budget_waste, padded_share

__all__ = [
    "ACCELERATORS",
    "PRESETS",
    "Accelerator",
    "Assumptions",
    "BudgetWaste",
    "Change",
    "DecodeRate",
    "Flops",
    "LayerShape",
    "Measurement",
    "MemoryBreakdown",
    "MemoryFit",
    "ModelShape",
    "Recommendation",
    "StepHours",
    "activation_bytes",
    "attention_flops",
    "attention_pairs",
    "bandwidth_share",
    "budget_waste",
    "cheapest_changes",
    "dead_group_share",
    "decode_rate",
    "find_accelerator",
    "fit_memory",
    "known_accelerator",
    "logits_bytes",
    "lognormal_lengths",
    "measured_assumptions",
    "memory_breakdown",
    "model_flops",
    "padded_share",
    "parse_lengths",
    "read_seconds",
    "read_weights",
    "recommend_budget",
    "sequences_that_fit",
    "step_gpu_hours",
    "train_rate",
]
