"""Prediction on two processes: each task is attempted once, whatever their number, and nobody waits."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import launch
from tests.distributed.predicting import ATTEMPTS, predict

# Fewer than processes, an odd number, and one that fits.
TASKS = (1, 5, 4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_each_task_is_attempted_once(strategy, tmp_path):
    launch("tests.distributed.predicting", [str(tmp_path), strategy, *map(str, TASKS)], processes=2, timeout=150.0)
    for tasks in TASKS:
        by_rank = [torch.load(tmp_path / f"{tasks}.{rank}.pt", weights_only=True) for rank in range(2)]
        # Sampling is a function of task and attempt: where it happens changes nothing.
        assert sorted(by_rank[0] + by_rank[1]) == sorted(predict(tasks, "auto", 1))
        assert [len(made) for made in by_rank] == [(tasks + 1) // 2 * ATTEMPTS, tasks // 2 * ATTEMPTS]
