"""A small online training with a curriculum that resumes from its last checkpoint and says what it is doing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lit_rl import Environment, PackedDataModule, PolicyModule, Turn, rollouts
from lit_rl.callbacks import PassRateCurriculum, ZeroAdvantageMonitor
from lit_rl.testing import tiny_policy_model
from tests.distributed.launch import leave
from tests.helpers import quiet_trainer

PHASES = ("rollout", "in a step", "between steps", "checkpoint")
# Of gloo: how long a rank waits for one that does not come.
PATIENCE = 20.0

Announce = Callable[[str], None]


class Parity(Environment):
    def __init__(self, announce: Announce) -> None:
        self.announce = announce

    def reset(self, task):
        self.announce("rollout")
        return [5, task["number"]]

    def step(self, token_ids):
        return Turn(done=True, reward=float(sum(token_ids) % 2))


class Phases(Callback):
    """Announces steps; stands before the callback that saves."""

    def __init__(self, announce: Announce) -> None:
        self.announce = announce

    def on_train_batch_start(self, *arguments) -> None:
        self.announce("in a step")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.announce("between steps")


class AnnouncedWrites(TorchCheckpointIO):
    """Announces when a checkpoint is being written."""

    def __init__(self, announce: Announce) -> None:
        self.announce = announce

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.announce("checkpoint")
        super().save_checkpoint(*arguments, **keywords)
        self.announce("between steps")


def train(folder: Path, iterations: int, announce: Announce, strategy: str = "auto", devices: int = 1) -> Trainer:
    """Trains to the end, from the last checkpoint in the folder if there is one."""
    tasks = [{"id": f"task {number}", "number": number} for number in range(8, 20)]
    source = rollouts(
        lambda: Parity(announce), tasks, tasks_per_iteration=4, group_size=4, end_ids=[2], max_new_tokens=6
    )
    data = PackedDataModule(source, max_tokens=24, steps_per_iteration=2)
    module = PolicyModule(tiny_policy_model(), learning_rate=1e-2, weight_decay=0.1)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True, save_top_k=1)
    trainer = quiet_trainer(
        max_epochs=iterations,
        callbacks=[Phases(announce), saver, ZeroAdvantageMonitor(), PassRateCurriculum()],
        plugins=[AnnouncedWrites(announce)],
        enable_checkpointing=True,
        strategy=strategy,
        devices=devices,
    )
    last = folder / "last.ckpt"
    trainer.fit(module, data, ckpt_path=str(last) if last.exists() else None)
    return trainer


def main(folder: Path, iterations: int, connection: Any, rank: int, ranks: int, meeting: Path) -> None:
    """What each training process does.

    Args:
        folder: Where checkpoints and this process's output go.
        iterations: How many to train.
        connection: Where each new phase is sent to.
        rank: This process's.
        ranks: Their number.
        meeting: The file through which the ranks find each other.
    """
    output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1), os.dup2(output, 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    phase = ""

    def announce(now: str) -> None:
        nonlocal phase
        if now != phase:
            connection.send(now)
        phase = now

    if ranks > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
        torch.distributed.init_process_group(
            "gloo", f"file://{meeting}", timeout=timedelta(seconds=PATIENCE), rank=rank, world_size=ranks
        )
    train(folder, iterations, announce, "ddp" if ranks > 1 else "auto", ranks)
    connection.send("done")
    leave()
