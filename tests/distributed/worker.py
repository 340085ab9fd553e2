"""Runs some cases in this process of a launched group and writes what came out, one file per case and rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.distributed.cases import run_case
from tests.distributed.launch import leave


def main() -> None:
    folder, strategy, *names = sys.argv[1:]
    torch.set_num_threads(1)
    rank, devices = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in names:
        torch.save(run_case(name, strategy, devices), Path(folder) / f"{name}.{rank}.pt")
    leave()


if __name__ == "__main__":
    main()
