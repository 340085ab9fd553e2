"""Starts a group of processes on this machine, and ends all of them when one fails or time is up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# A process that finds these believes that its group has been launched already, and waits for the others.
PLACE_IN_A_GROUP = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class GroupFailed(AssertionError):
    """A process of the group failed or did not end in time; carries what the group printed."""


def launch(module: str, arguments: Sequence[str], *, processes: int, timeout: float = 240.0) -> str:
    """Runs `python -m module arguments` in `processes` gloo processes.

    Returns:
        What they printed.

    Raises:
        GroupFailed: One of them failed, or the time was up; nothing is left running.
    """
    group = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=0", f"--nproc-per-node={processes}"]
    return run([*group, "--module", module, *arguments], timeout=timeout)


def run(arguments: Sequence[str], *, folder: Path = ROOT, timeout: float = 240.0) -> str:
    """Runs this Python in a process group of its own.

    Args:
        arguments: What follows the interpreter.
        folder: Where it runs.
        timeout: Seconds after which everything it started is killed.

    Returns:
        What was printed.

    Raises:
        GroupFailed: It failed, or the time was up; nothing is left running.
    """
    for attempt in range(3):
        status, output = _run_once(arguments, folder, timeout)
        if status == 0:
            return output
        # Ports are chosen before they are used; beside other tests another process may be faster.
        if "EADDRINUSE" not in output or attempt == 2:
            break
    raise GroupFailed(f"exit status {status}:\n{output[-8000:]}")


def _run_once(arguments: Sequence[str], folder: Path, timeout: float) -> tuple[int, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in PLACE_IN_A_GROUP}
    environment = inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    group = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = group.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(group.pid, signal.SIGKILL)
        output, _ = group.communicate()
        raise GroupFailed(f"no end within {timeout} s:\n{output[-8000:]}") from None
    return group.returncode, output


def leave() -> None:
    """Ends a process of a group in order: one that exits with its connections open may abort the others."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
