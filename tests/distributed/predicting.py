"""Prediction with held-out tasks, in this process or in each of a launched group."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from lit_rl import PackedDataModule, PolicyModule
from lit_rl.testing import tiny_policy_model
from tests.distributed.cases import online, strategy_for
from tests.distributed.launch import leave
from tests.helpers import quiet_trainer

ATTEMPTS = 2


def predict(tasks: int, strategy: str, devices: int) -> list[tuple[str, list[int]]]:
    """Attempts some new tasks.

    Returns:
        Task and ids of each trajectory that this process made.
    """
    held_out: list[dict[str, Any]] = [{"id": f"new {number}", "number": number} for number in range(20, 20 + tasks)]
    data = PackedDataModule(online(), max_tokens=40, validation_tasks=held_out, validation_attempts=ATTEMPTS)
    trainer = quiet_trainer(devices=devices, strategy=strategy_for(strategy, devices))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = trainer.predict(PolicyModule(tiny_policy_model(dtype=torch.float64)), data)
    return [(attempt.task, attempt.token_ids.tolist()) for batch in batches for attempt in batch]


def main() -> None:
    folder, strategy, *counts = sys.argv[1:]
    torch.set_num_threads(1)
    rank, devices = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for tasks in map(int, counts):
        torch.save(predict(tasks, strategy, devices), Path(folder) / f"{tasks}.{rank}.pt")
    leave()


if __name__ == "__main__":
    main()
