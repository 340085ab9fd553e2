from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from lit_rl.data.cost import SegmentCost
from lit_rl.data.planner import MicrobatchesError, plan_steps
from lit_rl.data.sampler import TokenBudgetSampler


class Indices(Dataset):
    def __getitem__(self, indices):
        return list(indices)

    def __len__(self):
        return 100


def random_lengths(seed, limit=20):
    random = np.random.default_rng(seed)
    return random.integers(1, limit + 1, size=random.integers(1, 60)).tolist()


@pytest.mark.parametrize("seed", range(100))
def test_ranks_are_disjoint_complete_and_as_long_as_they_say(seed):
    lengths, world_size = random_lengths(seed), seed % 4 + 1
    samplers = [
        TokenBudgetSampler(
            lengths,
            20,
            num_replicas=world_size,
            rank=rank,
            seed=seed,
            num_steps=seed % 3 + 1,
            layout=("packed", "padded")[seed % 2],
        )
        for rank in range(world_size)
    ]
    for epoch in range(3):
        seen = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            batches = list(DataLoader(Indices(), sampler=sampler, batch_size=None))
            assert len(batches) == len(sampler) == len(samplers[0])
            assert all(sum(lengths[index] for index in batch) <= 20 for batch in batches)
            seen += [index for batch in batches for index in batch]
        assert sorted(seen) == list(range(len(lengths)))
        assert len({sampler.plan for sampler in samplers}) == 1


def test_nine_trajectories_on_two_ranks_get_one_filler():
    batches = [list(TokenBudgetSampler([8] * 9, 8, num_replicas=2, rank=rank)) for rank in (0, 1)]
    assert [len(batch) for batch in batches] == [5, 5]
    assert sorted(map(len, batches[0] + batches[1])) == [0] + [1] * 9


def test_epochs_differ_and_repeat_with_their_number():
    lengths = random_lengths(1)
    sampler = TokenBudgetSampler(lengths, 20, num_steps=2)
    assert isinstance(sampler, DistributedSampler)
    orders = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        assert orders[-1] == list(TokenBudgetSampler(lengths, 20, num_steps=2, epoch=epoch))
    assert len({str(order) for order in orders}) == 4
    sampler.set_epoch(0)
    assert list(sampler) == orders[0]
    assert list(TokenBudgetSampler(lengths, 20, num_steps=2, seed=1)) != orders[0]


def test_without_shuffling_every_epoch_is_the_same():
    sampler = TokenBudgetSampler(random_lengths(1), 20, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(3)
    assert list(sampler) == first


def test_every_epoch_is_as_long_as_the_first():
    # Three long ones in one step need three microbatches, otherwise two are enough: both kinds must be met.
    lengths = [8, 8, 8, 1, 1, 1]
    needed = {plan_steps(lengths, max_tokens=9, num_steps=2, seed=seed).microbatches_per_step for seed in range(20)}
    assert len(needed) == 2
    for seed in range(10):
        sampler = TokenBudgetSampler(lengths, 9, num_steps=2, seed=seed)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            assert len(list(sampler)) == len(sampler)
            assert list(sampler) == list(TokenBudgetSampler(lengths, 9, num_steps=2, seed=seed, epoch=epoch))


def test_a_partition_that_nothing_else_can_replace_is_used_again(monkeypatch):
    monkeypatch.setattr("lit_rl.data.sampler.PARTITIONS_TRIED", 0)
    sampler = TokenBudgetSampler([8, 8, 8, 1, 1, 1], 9, num_steps=2)
    first = sampler.plan
    sampler.set_epoch(1)
    assert sampler.plan.steps == first.steps
    assert sampler.plan.microbatches_per_step == first.microbatches_per_step


def test_options_reach_the_plan():
    lengths, groups = random_lengths(3), [index // 4 for index in range(len(random_lengths(3)))]
    options = {
        "layout": "padded",
        "num_steps": 2,
        "groups": groups,
        "partition": "trajectories",
        "cost": SegmentCost(linear=0.0, quadratic=1.0),
        "objective": "rank_total",
        "microbatches_per_step": 30,
    }
    sampler = TokenBudgetSampler(lengths, 20, num_replicas=2, rank=1, seed=5, epoch=2, **options)
    assert sampler.plan == plan_steps(lengths, max_tokens=20, world_size=2, seed=(5, 2, 0), **options)
    assert list(sampler) == [list(microbatch) for microbatch in sampler.plan.for_rank(1)]
    groups[:] = [0] * len(groups)
    lengths[:] = [1] * len(lengths)
    sampler.set_epoch(3)
    assert sampler.plan.num_tokens != len(lengths)


def test_a_finished_plan_is_kept_over_epochs():
    plan = plan_steps(random_lengths(2), max_tokens=20, world_size=2, num_steps=2)
    for rank in (0, 1):
        sampler = TokenBudgetSampler.from_plan(plan, rank)
        sampler.set_epoch(7)
        assert sampler.plan is plan
        assert list(sampler) == [list(microbatch) for microbatch in plan.for_rank(rank)]
        assert len(sampler) == 2 * plan.microbatches_per_step
        assert (sampler.rank, sampler.num_replicas) == (rank, 2)
    with pytest.raises(ValueError, match="`rank` is 2"):
        TokenBudgetSampler.from_plan(plan, 2)


def test_skipping_leaves_out_the_beginning_until_it_is_set_back():
    sampler = TokenBudgetSampler([8] * 5, 8)
    everything = list(sampler)
    sampler.skip = 2
    assert len(sampler) == 5
    # Worker processes make the loader ask for an iterator twice.
    assert list(sampler) == list(sampler) == everything[2:]
    sampler.skip = 0
    assert list(sampler) == everything


@pytest.mark.parametrize("max_tokens", [7.5, None, "8", True])
def test_budgets_of_another_type_are_refused(max_tokens):
    with pytest.raises(TypeError, match=f"`max_tokens` must be an integer of at least 1, got {max_tokens!r}"):
        TokenBudgetSampler([1], max_tokens)


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_budgets_below_one_are_refused(max_tokens):
    with pytest.raises(ValueError, match=f"`max_tokens` must be at least 1, got {max_tokens}"):
        TokenBudgetSampler([1], max_tokens)


def test_what_cannot_work_is_refused_at_construction():
    with pytest.raises(ValueError, match="trajectory 0 has 21 tokens, but `max_tokens` allows at most 20"):
        TokenBudgetSampler([21], 20)
    with pytest.raises(ValueError, match="`rank` is 2, expected 0 to 1 for 2 ranks"):
        TokenBudgetSampler([1], 8, num_replicas=2, rank=2)
    with pytest.raises(TypeError, match="`rank` must be an integer"):
        TokenBudgetSampler([1], 8, num_replicas=2, rank=0.0)
    with pytest.raises(TypeError, match="`num_replicas`"):
        TokenBudgetSampler([1], 8, num_replicas="2")
    with pytest.raises(MicrobatchesError, match="needs 3 microbatches"):
        TokenBudgetSampler([8, 8, 8], 8, microbatches_per_step=2)


def test_ranks_come_from_the_process_group(monkeypatch):
    assert (TokenBudgetSampler([1], 8).num_replicas, TokenBudgetSampler([1], 8).rank) == (1, 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 3)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 2)
    sampler = TokenBudgetSampler(torch.tensor([1, 2]), 8)
    assert (sampler.num_replicas, sampler.rank, sampler.plan.world_size) == (3, 2, 3)


def test_a_default_trainer_on_two_processes_sees_everything_once(tmp_path):
    worker = Path(__file__).with_name("sampler_worker.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, str(worker), str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    # 60 tokens in microbatches of 8 on two ranks: four each at the least, two ranks do them at the same time.
    assert {report["length"] for report in reports} == {4}
    assert {report["steps"] for report in reports} == {8}
    epochs = [[batch for report in reports for epoch, batch in report["seen"] if epoch == number] for number in (0, 1)]
    for batches in epochs:
        assert len(batches) == 8
        assert sorted(index for batch in batches for index in batch if index >= 0) == list(range(11))
    assert epochs[0] != epochs[1]
