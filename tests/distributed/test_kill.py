"""Training is killed at random moments; what is resumed ends like the run that was left alone."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from tests.distributed.killed import PATIENCE, PHASES
from tests.distributed.killing import Training, assert_same_training, final_checkpoint

KILLS = 20
# Iterations of the runs on two processes.
PAIRED = 10
# A run gets this far at most before it is killed: two iterations of two steps, each saved as two files.
MOST = {"rollout": 2, "in a step": 4, "between steps": 12, "checkpoint": 8}
# About how many seconds each phase takes.
LASTS = {"rollout": 0.05, "in a step": 0.03, "between steps": 0.003, "checkpoint": 0.006}


def left_alone(folder: Path, iterations: int, ranks: int = 1) -> None:
    """Trains to the end."""
    with Training(folder, iterations, ranks=ranks) as training:
        assert training.join() == [0] * ranks, training.output()
        assert training.finished


@pytest.mark.timeout(600)
def test_killed_twenty_times_and_resumed(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    left_alone(whole, 2 * KILLS)
    chance, hit = random.Random(0), Counter()
    for number in range(KILLS):
        phase, sent = PHASES[number % 4], (SIGKILL, SIGTERM)[number // 4 % 2]
        with Training(broken, 2 * KILLS) as training:
            training.await_phase(phase, chance.randint(1, MOST[phase]))
            time.sleep(chance.uniform(0.0, LASTS[phase]))
            hit[training.signal(sent)] += 1
            # SIGTERM lets the microbatch end; Lightning then leaves with status 0.
            assert training.join() == [-SIGKILL if sent == SIGKILL else 0], training.output()
            assert not training.finished, "killed too late: training was over"
    left_alone(broken, 2 * KILLS)
    assert set(hit) == set(PHASES)
    assert hit.total() == KILLS
    assert_same_training(final_checkpoint(whole), final_checkpoint(broken))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The last checkpoint of two processes that were left alone."""
    folder = tmp_path_factory.mktemp("pair")
    left_alone(folder, PAIRED, ranks=2)
    return final_checkpoint(folder)


@pytest.mark.timeout(300)
def test_a_group_is_killed_or_loses_a_rank(pair, tmp_path):
    for phase, count, killed in [
        ("checkpoint", 3, (0, 1)),
        ("rollout", 2, (0, 1)),
        ("in a step", 2, (0, 1)),
        ("in a step", 2, (1,)),
        ("rollout", 2, (0,)),
    ]:
        with Training(tmp_path, PAIRED, ranks=2) as training:
            training.await_phase(phase, count)
            training.signal(SIGKILL, *killed)
            # Whoever is left sees closed connections, or at worst its time-out.
            statuses = training.join(timeout=PATIENCE + 20.0)
            assert all((status == -SIGKILL) == (rank in killed) for rank, status in enumerate(statuses))
            assert 0 not in statuses
            assert not training.finished, "killed too late: training was over"
    left_alone(tmp_path, PAIRED, ranks=2)
    assert_same_training(pair, final_checkpoint(tmp_path))


@pytest.mark.timeout(300)
def test_sigterm_ends_a_group_together(pair, tmp_path):
    chance = random.Random(0)
    for phase, count, signalled in [
        ("rollout", 1, (0,)),
        ("in a step", 2, (0, 1)),
        ("checkpoint", 2, (1,)),
        ("between steps", 3, (0, 1)),
        ("in a step", 1, (1,)),
        ("checkpoint", 1, (0, 1)),
    ]:
        with Training(tmp_path, PAIRED, ranks=2) as training:
            training.await_phase(phase, count)
            for rank in signalled:
                time.sleep(chance.uniform(0.0, LASTS[phase]))
                training.signal(SIGTERM, rank)
            # Well within the time-out: nobody waits for a collective that does not come.
            assert training.join(timeout=PATIENCE / 2) == [0, 0], training.output()
            assert not training.finished, "signalled too late: training was over"
    left_alone(tmp_path, PAIRED, ranks=2)
    assert_same_training(pair, final_checkpoint(tmp_path))
