"""What `examples/fit.yaml` starts from: a policy of the BugFix gym that has imitated a few demonstrations."""

from __future__ import annotations

from lightning.pytorch import Trainer
from transformers import Qwen3ForCausalLM

from examples.bugfix.demonstrations import demonstrations
from examples.bugfix.model import build_model
from examples.bugfix.tasks import practice_tasks
from lit_rl import PackedDataModule, PolicyModule


def imitated_policy(number: int = 6000, seed: int = 0) -> Qwen3ForCausalLM:
    """Builds the tiny policy and trains it on scripted episodes, so that some of its attempts pass.

    Args:
        number: Demonstrations, each read once; at least 16.
        seed: Of the weights and the demonstrations.

    Returns:
        The model; an untrained one would never submit a program, and a reward that is always 0 teaches nothing.
    """
    model = build_model(seed)
    data = PackedDataModule(
        demonstrations(practice_tasks(number), seed=seed),
        max_tokens=2048,
        trajectories_per_step=16,
        baseline="none",
        scale="none",
        seed=seed,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(PolicyModule(model, objective="supervised", learning_rate=2e-3, warmup_steps=20), data)
    return model
