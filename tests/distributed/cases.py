"""Training runs whose outcome must not depend on how many processes share them.

Each case trains on fixed trajectories and returns the gradients of every step and the final weights, whole, in
float64. `worker.py` runs them under a launcher; the tests run them in one process for comparison.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_rl import Environment, PackedDataModule, PolicyModule, Rollouts, Trajectory, Turn, rollouts
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().double().clone()


class Keep(Callback):
    """Keeps each step's gradients as the optimizer sees them, gathered where they are sharded."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        named = pl_module.policy.model.named_parameters()
        self.gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.metrics.append(logged)


def few() -> list[Trajectory]:
    """One group of three trajectories, of which one has no scored token at all."""
    made = random_trajectories(3, seed=8, group_size=3, lengths=(6, 9))
    return [made[0], made[1], Trajectory([4, 5, 6, 7], [0, 0, 0, 0], 1.0, group="g0", log_probs=[0.0] * 4)]


def nothing_scored() -> list[Trajectory]:
    return [Trajectory([4, 5, 6], [0, 0, 0], float(i), group="g", log_probs=[0.0] * 3) for i in range(4)]


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """LoRA that is not the identity from the start."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LoraConfig(target_modules=["q_proj", "down_proj", "lm_head"], r=2, init_lora_weights=False)
        return get_peft_model(model, config, autocast_adapter_dtype=False)


class Parity(Environment):
    """Two turns; rewards the parity of what was said, so that groups are mixed."""

    def reset(self, task):
        self.turns = 0
        return [5] * (1 + task["number"] % 3) + [task["number"]]

    def step(self, token_ids):
        self.turns += 1
        return Turn([7] * len(token_ids), done=self.turns == 2, reward=float(sum(token_ids) % 2))


def online() -> Rollouts:
    """Rollouts by the policy itself, of different lengths on each rank."""
    tasks = [{"id": f"task {number}", "number": number} for number in range(8, 14)]
    return rollouts(Parity, tasks, tasks_per_iteration=5, group_size=3, end_ids=[2], max_new_tokens=5, max_turns=2)


CASES: dict[str, dict[str, Any]] = {
    "online": {
        "trajectories": online,
        "max_tokens": 40,
        "module": {"objective": "clipped_ratio", "learning_rate": 1e-2},
        "data": {"validation_tasks": [{"id": f"new {number}", "number": number} for number in (20, 21, 22)]},
        "trainer": {"max_epochs": 3},
    },
    "uneven": {"trajectories": lambda: random_trajectories(22, seed=2, lengths=(3, 16)), "max_tokens": 18},
    "clipped_ratio_three_steps": {
        "trajectories": lambda: random_trajectories(24, seed=4),
        "max_tokens": 24,
        "module": {"objective": "clipped_ratio", "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 4},
        "data": {"steps_per_iteration": 3},
        "trainer": {"max_epochs": 3, "gradient_clip_val": 0.5},
    },
    "fewer_than_ranks": {"trajectories": few, "max_tokens": 64},
    "padded_sequence_mean": {
        "trajectories": lambda: random_trajectories(13, seed=6),
        "max_tokens": 24,
        "module": {"normalization": "sequence_mean", "layout": "padded"},
    },
    "keeps_dead_tokens": {
        "trajectories": lambda: random_trajectories(12, seed=7),
        "max_tokens": 20,
        "module": {"loss_on": "scored", "denominator": "live"},
    },
    "kl_reference": {
        "trajectories": lambda: random_trajectories(14, seed=10),
        "max_tokens": 20,
        "module": {"kl_coefficient": 0.2, "sampler_correction": "mask"},
        "data": {"steps_per_iteration": 2},
        "trainer": {"max_epochs": 2},
    },
    "kl_adapters": {
        "trajectories": lambda: random_trajectories(14, seed=11),
        "max_tokens": 20,
        "model": with_adapters,
        "module": {"kl_coefficient": 0.2},
        "trainer": {"max_epochs": 3},
    },
    "gspo": {
        "trajectories": lambda: random_trajectories(14, seed=12),
        "max_tokens": 20,
        "module": {"objective": "gspo", "sampler_correction": "truncate", "correction_level": "sequence"},
        "data": {"steps_per_iteration": 2},
    },
    "nothing_scored": {
        "trajectories": nothing_scored,
        "max_tokens": 16,
        "module": {"learning_rate": 1e-2, "weight_decay": 0.1, "loss_on": "scored"},
        "trainer": {"max_epochs": 2},
    },
    "bf16_mixed": {
        "trajectories": lambda: random_trajectories(12, seed=9),
        "max_tokens": 20,
        "module": {"learning_rate": 1e-2},
        "trainer": {"max_epochs": 2, "precision": "bf16-mixed"},
    },
}


def strategy_for(name: str, devices: int) -> Any:
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    return "ddp" if name == "ddp" else "auto"


def run_case(name: str, strategy: str, devices: int) -> dict[str, Any]:
    """Trains one case.

    Returns:
        `gradients` of every step, `weights` at the end, `metrics` of every step, and whether weights and optimizer
        state moved.
    """
    case = CASES[name]
    keep = Keep()
    # FSDP2 has no float64 setting of its own: the model is float64 before it is sharded.
    half = "precision" in case.get("trainer", {})
    model = tiny_policy_model(dtype=torch.float32 if half else torch.float64)
    model = case.get("model", lambda model: model)(model)
    start = {key: whole(value) for key, value in model.state_dict().items()}
    module = PolicyModule(model, **({"objective": "reinforce", "learning_rate": 1e-2} | case.get("module", {})))
    arguments = {"callbacks": [keep], "devices": devices, "strategy": strategy_for(strategy, devices)}
    trainer: Trainer = quiet_trainer(**(arguments | case.get("trainer", {})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            module, PackedDataModule(case["trajectories"](), max_tokens=case["max_tokens"], **case.get("data", {}))
        )
    weights = {key: whole(value) for key, value in module.policy.model.state_dict().items()}
    return {
        "gradients": keep.gradients,
        "weights": weights,
        "metrics": keep.metrics,
        "moved": any(not torch.equal(weights[key], start[key]) for key in start),
        "optimizer_states": len(trainer.optimizers[0].state),
        "steps": trainer.global_step,
    }
