"""A tiny policy learns to repair programs: imitation first, then GRPO, on two CPU cores in under three minutes.

    python -m examples.bugfix.train                      # what `make demo` runs
    python -m examples.bugfix.train --devices 2          # the same under DDP
    python -m examples.bugfix.train --curriculum off     # every task, also those that always pass

Reads from top to bottom: options, the two trainings, the report. Writes CSV logs and a picture to `--output`.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from examples.bugfix.demonstrations import demonstrations
from examples.bugfix.environment import MAX_EPISODE_TOKENS, MAX_TURN_TOKENS, MAX_TURNS, BugFixEnvironment
from examples.bugfix.model import build_model
from examples.bugfix.report import print_table, save_picture
from examples.bugfix.tasks import bugfix_tasks, practice_tasks
from examples.bugfix.tokenizer import WordTokenizer
from lit_rl import PackedDataModule, PolicyModule, rollouts
from lit_rl.callbacks import (
    GradientNormalizationCheck,
    PackingCheck,
    PaddingMonitor,
    PassRateCurriculum,
    SamplerRatioMonitor,
    ZeroAdvantageMonitor,
)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="processes on this machine")
    parser.add_argument("--iterations", type=int, default=60, help="rollouts, each followed by one optimizer step")
    parser.add_argument("--demonstrations", type=int, default=16000, help="scripted episodes to imitate first")
    parser.add_argument("--tasks-per-iteration", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8, help="attempts per task")
    parser.add_argument("--max-tokens", type=int, default=2048, help="token budget of a microbatch, in positions")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--curriculum", choices=["on", "off"], default="on", help="leave out tasks that are certain")
    parser.add_argument("--validation-attempts", type=int, default=16, help="attempts per held-out task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("examples/bugfix/output"))
    return parser.parse_args()


def trainer(arguments: argparse.Namespace, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp" if arguments.devices > 1 else "auto",
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )


def imitate(model: torch.nn.Module, arguments: argparse.Namespace) -> None:
    """Supervised warm-up: the policy learns the tools and the bad habits of the demonstrations."""
    module = PolicyModule(model, objective="supervised", learning_rate=2e-3, warmup_steps=20)
    data = PackedDataModule(
        demonstrations(practice_tasks(arguments.demonstrations), seed=arguments.seed),
        max_tokens=arguments.max_tokens,
        trajectories_per_step=16,
        baseline="none",
        scale="none",
        seed=arguments.seed,
    )
    trainer(arguments, max_epochs=1, logger=False).fit(module, data)


def reinforce(model: torch.nn.Module, arguments: argparse.Namespace) -> tuple[Trainer, Mapping[str, float], float]:
    """GRPO on the training tasks; validates on held-out tasks before and after."""
    training, held_out = bugfix_tasks()
    module = PolicyModule(model, learning_rate=arguments.learning_rate)
    source = rollouts(
        BugFixEnvironment,
        training,
        tasks_per_iteration=arguments.tasks_per_iteration,
        group_size=arguments.group_size,
        end_ids=[WordTokenizer().end_id],
        max_new_tokens=MAX_TURN_TOKENS,
        max_turns=MAX_TURNS,
        max_trajectory_tokens=MAX_EPISODE_TOKENS,
        seed=arguments.seed,
    )
    data = PackedDataModule(
        source,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        validation_tasks=held_out,
        validation_attempts=arguments.validation_attempts,
    )
    callbacks: list[Callback] = [
        ZeroAdvantageMonitor(),
        PaddingMonitor(),
        SamplerRatioMonitor(),
        PackingCheck(),
        GradientNormalizationCheck(),
    ]
    if arguments.curriculum == "on":
        callbacks.append(PassRateCurriculum(estimator="mean_of_last", revisit=2))
    running = trainer(
        arguments,
        max_epochs=arguments.iterations,
        check_val_every_n_epoch=min(10, arguments.iterations),
        num_sanity_val_steps=0,
        logger=CSVLogger(arguments.output, name="", version=""),
        callbacks=callbacks,
    )
    (before,) = running.validate(module, data, verbose=False)
    started = time.perf_counter()
    running.fit(module, data)
    return running, before, time.perf_counter() - started


def main() -> None:
    arguments = options()
    warnings.filterwarnings("ignore", message=".*(many workers|val_dataloader|LeafSpec|litlogger).*")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    seed_everything(arguments.seed, verbose=False)
    torch.set_num_threads(1)  # tensors this small gain nothing from a second thread
    model = build_model(arguments.seed)
    started = time.perf_counter()
    imitate(model, arguments)
    imitation_seconds = time.perf_counter() - started
    running, before, seconds = reinforce(model, arguments)
    if running.is_global_zero:
        after = {name: float(value) for name, value in running.callback_metrics.items()}
        picture = save_picture(arguments.output)
        print_table(before, after, arguments.output, imitation_seconds, seconds, picture)


if __name__ == "__main__":
    main()
