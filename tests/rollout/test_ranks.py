"""Rollouts spread over two processes, against the same rollouts in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_rl.rollout.episode import RolloutError
from lit_rl.rollout.gather import RolloutStatistics, Share, gather_shares
from tests.rollout.rank_worker import run, source
from tests.rollout.toys import tiny_policy

ROOT = Path(__file__).parents[2]
PROCESSES = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each scenario gave on each rank; the group is killed when it hangs."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    group = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.rollout.rank_worker",
                str(rank),
                str(PROCESSES),
                str(folder / "store"),
                folder,
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=220)[0] for process in group]
    finally:
        for process in group:
            process.kill()
    for process, output in zip(group, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    names = {path.name.split(".")[0] for path in folder.glob("*.pt")}
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(PROCESSES)] for name in names}


def assert_same(first: list[dict[str, Any]], second: list[dict[str, Any]], tolerance: float) -> None:
    assert [{**one, "log_probs": None} for one in first] == [{**other, "log_probs": None} for other in second]
    for one, other in zip(first, second, strict=True):
        assert (one["log_probs"] - other["log_probs"]).abs().max().item() <= tolerance


@pytest.mark.parametrize("name", ["plain", "few", "unscored", "after"])
def test_every_rank_has_the_same_trajectories_and_they_are_those_of_one_process(
    results: dict[str, list[Any]], name: str
) -> None:
    alone, on_ranks = run(name, 0, 1), results[name]
    for iteration in range(2):
        assert_same(on_ranks[0]["found"][iteration], on_ranks[1]["found"][iteration], 0.0)
        assert_same(on_ranks[0]["found"][iteration], alone["found"][iteration], 1e-5)
    assert on_ranks[0]["counts"] == on_ranks[1]["counts"] == alone["counts"]
    assert on_ranks[0]["estimates"] == on_ranks[1]["estimates"] == alone["estimates"]


def test_an_error_on_one_rank_is_raised_on_all(results: dict[str, list[Any]]) -> None:
    first, second = results["one_fails"]
    assert first["kind"] == second["kind"] == "RolloutError"
    assert first["error"] == second["error"]
    assert "task 'task-1', attempt 0, turn 2: OSError: planted for task-1" in first["error"]
    rank = first["error"].split(":")[0]
    assert rank in ("rank 0", "rank 1")
    # Where it did not happen, the other process's traceback comes along.
    assert all(
        f"Traceback on {rank}" in result["notes"] and "rank_worker.py" in result["notes"] for result in (first, second)
    )


def test_of_several_errors_the_first_rank_counts(results: dict[str, list[Any]]) -> None:
    first, second = results["all_fail"]
    assert first["error"] == second["error"]
    assert first["error"].startswith("rank 0, and 1 more of 2 ranks: task 'task-")


def test_an_error_of_the_engine_names_its_rank(results: dict[str, list[Any]]) -> None:
    for result in results["engine"]:
        assert result["error"] == "rank 1: MemoryError: planted in the engine"


def test_fewer_groups_than_ranks_warn_and_a_missing_process_group_is_an_error() -> None:
    made = source(per_iteration=1)
    with (
        pytest.warns(UserWarning, match="1 groups are spread over 2 ranks, so 1 have nothing to do"),
        pytest.raises(ValueError, match="`world_size` is 2, but there is no process group"),
    ):
        made.collect(tiny_policy(), iteration=0, temperature=1.0, world_size=2, progress=False)


def test_ranks_that_do_not_fit_are_refused() -> None:
    share = Share.pack(1, [], RolloutStatistics())
    with pytest.raises(RolloutError, match=r"expected the ranks 0..0, the process group has \[1\]"):
        gather_shares(share, 1)
