"""A training process is killed at random moments; what is resumed ends like the run that was left alone."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import torch

from tests.distributed.launch import ROOT

RUN = [sys.executable, "-m", "tests.distributed.killed"]


def start(folder, *, wait: float | None = None) -> int:
    """Runs the training script; kills it after `wait` seconds of training if given. Returns its exit status."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*RUN, str(folder)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if wait is not None:
            while not (folder / "training").exists() and process.poll() is None:
                time.sleep(0.02)
            time.sleep(wait)
            if process.poll() is None:
                os.killpg(process.pid, random.choice([signal.SIGKILL, signal.SIGTERM]))
        return process.wait(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_killed_at_random_moments_and_resumed(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    assert start(whole) == 0
    random.seed(0)
    kills = 0
    for _ in range(4):
        (broken / "training").unlink(missing_ok=True)
        start(broken, wait=random.uniform(0.05, 0.6))
        kills += not (broken / "done").exists()
    assert kills > 0
    (broken / "training").unlink(missing_ok=True)
    assert start(broken) == 0
    expected, resumed = (torch.load(folder / "last.ckpt", weights_only=True) for folder in (whole, broken))
    for name in ("epoch", "global_step", "state_dict", "optimizer_states", "PackedDataModule"):
        assert_same(expected[name], resumed[name], name)
    for name, state in expected["callbacks"].items():
        if "ModelCheckpoint" not in name:
            assert_same(state, resumed["callbacks"][name], name)


def assert_same(one, other, where: str) -> None:
    """Bit for bit, through nested containers; wall times are left out."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            if "second" not in str(key):
                assert_same(value, other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            assert_same(value, other[index], f"{where}/{index}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other or one != one, where
