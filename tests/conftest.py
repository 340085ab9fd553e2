"""What every test runs under."""

from __future__ import annotations

import os
import warnings

# Tiny tensors: a second thread costs more than it brings, above all when other tests run beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore", message=".*LeafSpec.*")


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A Trainer with a distributed strategy leaves its group and its place in it; the next test must find neither."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
