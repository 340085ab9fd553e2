"""Trains one microbatch of a given size in a fresh process and reports the peak of its memory.

Run as `python -m lit_rl.commands.budget_probe '{"model": ..., "tokens": ..., "longest": ...}'`; prints one JSON line.
A process of its own per measurement, because memory that an allocator has kept from a larger microbatch would hide
what a smaller one needs.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lit_rl.data.batch import PackedBatch
from lit_rl.data.collate import collate
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.throughput.presets import PRESETS
from lit_rl.throughput.reading import resolve_config
from lit_rl.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One measurement to make.

    Args:
        model: Local folder, `config.json`, or built-in name; without weights they are random.
        tokens: Positions of the microbatch.
        longest: Length of its segments.
        device: "cpu" or "cuda".
        precision: As in `Trainer(precision=...)`.
        checkpointing: Recompute layers in the backward pass.
        scored_share: Share of the tokens that go through the head.
    """

    model: str
    tokens: int
    longest: int
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["32-true", "bf16-true", "bf16-mixed"] = "32-true"
    checkpointing: bool = False
    scored_share: float = 1.0


def measure(probe: Probe) -> dict[str, Any]:
    """Trains the microbatch as a run would: the peak falls in a step that already has gradients and moments.

    Args:
        probe: What to measure.

    Returns:
        `peak_bytes`, and `limit_bytes`, the memory of the device.
    """
    device = torch.device(probe.device)
    policy = CausalLMPolicy(_load(probe))
    if probe.checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train().to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
    policy.resolve_layout()
    batch = _microbatch(probe, policy).to(device)
    _reset_peak(device)
    # The first step makes the optimizer's moments; then two microbatches of one step, the second beside gradients.
    for microbatches in (1, 2):
        for _ in range(microbatches):
            _backward(policy, batch, probe)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"peak_bytes": _peak(device), "limit_bytes": _limit(device)}


def _load(probe: Probe) -> nn.Module:
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if probe.precision == "bf16-true" else torch.float32
    folder = Path(probe.model)
    if probe.model not in PRESETS and folder.is_dir() and any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return AutoModelForCausalLM.from_config(resolve_config(probe.model)[0], dtype=dtype)


def _microbatch(probe: Probe, policy: CausalLMPolicy) -> PackedBatch:
    whole, rest = divmod(probe.tokens, probe.longest)
    lengths = [probe.longest] * whole + ([rest] if rest else [])
    weight = policy.head.output_layer.weight
    assert isinstance(weight, torch.Tensor)
    trajectories = []
    for index, length in enumerate(lengths):
        ids = torch.arange(length) * 7919 % weight.shape[0]
        scored = torch.arange(length) >= round((1 - probe.scored_share) * length)
        trajectories.append(Trajectory(ids, scored, reward=1.0, group=str(index)))
    ones = [1.0] * len(lengths)
    return collate(trajectories, layout=policy.layout, advantages=ones, weights=ones)


def _backward(policy: CausalLMPolicy, batch: PackedBatch, probe: Probe) -> None:
    mixed = probe.precision == "bf16-mixed"
    with torch.autocast(probe.device, dtype=torch.bfloat16) if mixed else nullcontext():
        log_probs = policy(batch).log_probs
    (-log_probs.mean()).backward()


def _reset_peak(device: torch.device) -> None:
    """Forgets the peak of loading the weights, which no token budget changes."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss`: a new process inherits that from the one that started it.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _limit(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    memory = Path("/proc/meminfo")
    if not memory.exists():
        return None
    line = next(line for line in memory.read_text().splitlines() if line.startswith("MemTotal"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(measure(Probe(**json.loads(sys.argv[1])))))
