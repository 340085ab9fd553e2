"""The same trajectories on 1, 2 and 4 processes, DDP and FSDP2: one gradient, one set of weights."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.distributed.cases import CASES, run_case
from tests.distributed.launch import launch

GROUPS = [("ddp", 2), ("fsdp2", 2), ("ddp", 4), ("fsdp2", 4)]
EXACT = [name for name in CASES if name != "bf16_mixed"]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request, tmp_path_factory):
    """All cases in one launch of a group: case name to what each rank ended with."""
    strategy, processes = request.param
    folder = tmp_path_factory.mktemp(f"{strategy}{processes}")
    launch("tests.distributed.worker", [str(folder), strategy, *CASES], processes=processes)
    return {
        name: [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(processes)]
        for name in CASES
    }


@functools.cache
def alone(name):
    return run_case(name, "auto", 1)


@pytest.mark.parametrize("name", EXACT)
def test_gradients_and_weights_are_those_of_one_process(group, name):
    for rank in group[name]:
        assert rank["steps"] == alone(name)["steps"]
        assert len(rank["gradients"]) == len(alone(name)["gradients"])
        for ours, reference in zip(rank["gradients"], alone(name)["gradients"], strict=True):
            for key, gradient in reference.items():
                torch.testing.assert_close(ours[key], gradient, atol=1e-10, rtol=1e-10, msg=key)
        for key, weight in alone(name)["weights"].items():
            torch.testing.assert_close(rank["weights"][key], weight, atol=1e-10, rtol=1e-10, msg=key)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_bit_equal_on_all_ranks(group, name):
    first = group[name][0]["weights"]
    for other in group[name][1:]:
        assert all(torch.equal(first[key], other["weights"][key]) for key in first)


@pytest.mark.parametrize("name", EXACT)
def test_logged_numbers_are_global(group, name):
    for rank in group[name]:
        for ours, reference in zip(rank["metrics"], alone(name)["metrics"], strict=True):
            assert ours.keys() == reference.keys()
            for key, value in reference.items():
                assert ours[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


def test_a_step_without_signal_moves_nothing(group):
    for rank in group["nothing_scored"]:
        assert not rank["moved"]
        assert rank["optimizer_states"] == 0
        assert rank["metrics"][-1]["train/steps_without_signal"] == 2.0
    assert all(rank["moved"] for rank in group["uneven"])


def test_the_ratio_before_the_first_update_is_exactly_one(group):
    for rank in group["clipped_ratio_three_steps"]:
        assert rank["metrics"][0]["train/kl"] == 0.0
        assert rank["metrics"][2]["train/kl"] > 0.0
