"""Shared pieces of the tests: random trajectories, a quiet Trainer, a callback that keeps gradients."""

from __future__ import annotations

import random
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lit_rl.trajectory import Trajectory


def random_trajectories(
    count: int,
    *,
    seed: int = 0,
    vocabulary: int = 32,
    lengths: tuple[int, int] = (3, 12),
    group_size: int = 4,
    **fields: Any,
) -> list[Trajectory]:
    """Groups of `group_size` trajectories with random lengths, masks, rewards and sampler log-probabilities."""
    generator = random.Random(seed)
    made = []
    for index in range(count):
        length = generator.randint(*lengths)
        prompt = generator.randint(1, max(1, length - 2))
        mask = [position >= prompt and generator.random() < 0.8 for position in range(length)]
        values = {
            "reward": float(generator.randint(0, 3)) / 3,
            "group": f"g{index // group_size}",
            "task": f"task {index // group_size}",
            "log_probs": [-abs(generator.gauss(3.4, 0.3)) for _ in range(length)],
            "temperature": generator.choice([1.0, 0.7]),
        }
        ids = [generator.randrange(3, vocabulary) for _ in range(length)]
        made.append(Trajectory(ids, mask, **(values | fields)))
    return made


def quiet_trainer(**arguments: Any) -> Trainer:
    """A Trainer on one CPU process without files and bars."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return Trainer(**(quiet | arguments))


class KeepGradients(Callback):
    """Keeps every step's gradients, as the optimizer is about to see them (before clipping)."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        named = pl_module.policy.model.named_parameters()
        self.steps.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})
