"""Starts training processes cheaply, watches what they are doing, and kills them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tests.distributed.killed import main
from tests.distributed.launch import PLACE_IN_A_GROUP, GroupFailed

# Imports take seconds: a server does them once, and each training process is a fork of it.
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["tests.distributed.killed"])


class Training:
    """A group of training processes; on leaving the context nothing of it is left running.

    Args:
        folder: Where its checkpoints go; the last one is continued from.
        iterations: How many to train.
        ranks: Number of processes.
    """

    def __init__(self, folder: Path, iterations: int, *, ranks: int = 1) -> None:
        self.folder = folder
        self.phase = [""] * ranks
        self.finished = False
        meeting = Path(tempfile.mkdtemp(dir=folder)) / "meeting"
        self._connections, self.processes = [], []
        for name in PLACE_IN_A_GROUP:
            os.environ.pop(name, None)
        for rank in range(ranks):
            receiver, sender = _server.Pipe(duplex=False)
            arguments = (folder, iterations, sender, rank, ranks, meeting)
            process = _server.Process(target=main, args=arguments, daemon=True)
            process.start()
            sender.close()
            self._connections.append(receiver)
            self.processes.append(process)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: Any) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def await_phase(self, phase: str, count: int, *, rank: int = 0, timeout: float = 120.0) -> None:
        """Returns when a rank has begun a phase for the `count`-th time.

        Raises:
            GroupFailed: The training ended first, or the time was up.
        """
        end = time.monotonic() + timeout
        while count > 0:
            if not self._connections[rank].poll(max(0.0, end - time.monotonic())) or not self._listen(rank):
                raise GroupFailed(f"no {phase!r} in time:\n{self.output()}")
            count -= self.phase[rank] == phase

    def signal(self, number: signal.Signals, *ranks: int) -> str:
        """Sends a signal to some ranks, or to all; returns what rank 0 was doing."""
        for rank in ranks or range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)
        while self._connections[0].poll(0) and self._listen(0):
            pass
        return self.phase[0]

    def join(self, timeout: float = 120.0) -> list[int]:
        """Waits until every process has ended.

        Returns:
            Exit statuses; negative ones are signals.

        Raises:
            GroupFailed: One of them did not end in time.
        """
        end = time.monotonic() + timeout
        open_ends = list(self._connections)
        while open_ends:
            # Reading to the end of each pipe: a full one would make its process wait.
            ready: Any = wait(open_ends, max(0.0, end - time.monotonic()))
            if not ready:
                raise GroupFailed(f"no end within {timeout} s:\n{self.output()}")
            for connection in ready:
                if not self._listen(self._connections.index(connection)):
                    open_ends.remove(connection)
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        statuses = [process.exitcode for process in self.processes]
        if None in statuses:
            raise GroupFailed(f"no end within {timeout} s:\n{self.output()}")
        return statuses

    def output(self) -> str:
        """What the processes printed."""
        return "\n".join(path.read_text()[-4000:] for path in sorted(self.folder.glob("output.*")))

    def _listen(self, rank: int) -> bool:
        """Reads one announcement; false when the process has ended."""
        try:
            self.phase[rank] = self._connections[rank].recv()
        except (EOFError, OSError):
            return False
        self.finished |= self.phase[rank] == "done"
        return True


def final_checkpoint(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "last.ckpt", weights_only=True)


def assert_same_training(expected: dict[str, Any], resumed: dict[str, Any]) -> None:
    """Weights, optimizer, curriculum, rollouts and counters are the same, bit for bit."""
    for name in ("epoch", "global_step", "state_dict", "optimizer_states", "PackedDataModule"):
        _assert_same(expected[name], resumed[name], name)
    for name, state in expected["callbacks"].items():
        if "ModelCheckpoint" not in name:
            _assert_same(state, resumed["callbacks"][name], name)


def _assert_same(one: Any, other: Any, where: str) -> None:
    """Through nested containers; wall times are left out."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key, value in one.items():
            if "second" not in str(key):
                _assert_same(value, other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, value in enumerate(one):
            _assert_same(value, other[index], f"{where}/{index}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other or one != one, where
