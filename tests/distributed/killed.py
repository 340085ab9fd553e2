"""A small online training with a curriculum that resumes from its last checkpoint, if there is one."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl import Environment, PackedDataModule, PolicyModule, Turn, rollouts
from lit_rl.callbacks import PassRateCurriculum, ZeroAdvantageMonitor
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer


class Parity(Environment):
    def reset(self, task):
        return [5, task["number"]]

    def step(self, token_ids):
        return Turn(done=True, reward=float(sum(token_ids) % 2))


class Begun(Callback):
    """Says that training has begun, so that the killer does not spend its time on imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, *arguments) -> None:
        (self.folder / "training").touch()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    tasks = [{"id": f"task {number}", "number": number} for number in range(8, 20)]
    source = rollouts(Parity, tasks, tasks_per_iteration=4, group_size=4, end_ids=[2], max_new_tokens=6)
    data = PackedDataModule(source, max_tokens=24, steps_per_iteration=2)
    module = PolicyModule(tiny_policy_model(), learning_rate=1e-2, weight_decay=0.1)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_last=True, save_top_k=1)
    monitor, curriculum = ZeroAdvantageMonitor(), PassRateCurriculum()
    trainer = quiet_trainer(
        max_epochs=40, callbacks=[saver, monitor, curriculum, Begun(folder)], enable_checkpointing=True
    )
    last = folder / "last.ckpt"
    trainer.fit(module, data, ckpt_path=str(last) if last.exists() else None)
    (folder / "done").touch()


if __name__ == "__main__":
    main()
