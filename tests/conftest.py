"""What every test runs under."""

from __future__ import annotations

import os
import warnings

# Tiny tensors: a second thread costs more than it brings, above all when other tests run beside.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
warnings.filterwarnings("ignore", message=".*LeafSpec.*")
