from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.data.plan import StepPlan
from lit_rl.data.planner import MicrobatchesError, partition_steps, plan_partition, plan_steps
from tests.data.plans import MODEL_COST, check_invariants, draw_lengths, problems


def shape(plan, lengths):
    return [[[sorted(lengths[i] for i in m) for m in rank] for rank in step] for step in plan.microbatches]


@settings(max_examples=300, deadline=None)
@given(problems())
def test_every_plan_is_complete_within_budget_and_equal_over_ranks(problem):
    lengths, options = problem
    plan = plan_steps(lengths, **options)
    check_invariants(
        plan, lengths, options["num_steps"], options["world_size"], options["max_tokens"], options["layout"]
    )
    assert plan == plan_steps(list(lengths), **options)
    if "groups" in options:
        steps_of = {}
        for number, step in enumerate(plan.steps):
            for index in step:
                steps_of.setdefault(options["groups"][index], set()).add(number)
        assert all(len(steps) == 1 for steps in steps_of.values())


@settings(max_examples=200, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_only_the_indices(problem, random):
    lengths, options = problem
    order = list(range(len(lengths)))
    random.shuffle(order)
    changed = dict(options)
    if "groups" in options:
        changed["groups"] = [f"name {options['groups'][index]}" for index in order]
    shuffled = [lengths[index] for index in order]
    assert shape(plan_steps(shuffled, **changed), shuffled) == shape(plan_steps(lengths, **options), lengths)


def test_steps_that_need_less_spread_over_all_microbatches():
    lengths = [8] * 8 + [1] * 8
    plan = plan_partition(lengths, [range(8), range(8, 16)], max_tokens=8, world_size=2)
    assert plan.microbatches_per_step == 4
    assert plan.num_fillers == 0
    assert {len(m) for rank in plan.microbatches[1] for m in rank} == {1}


def test_ranks_with_uneven_shares_get_the_same_number():
    plan = plan_steps([8, 8, 8, 2, 2, 2], max_tokens=8, world_size=2)
    assert plan.microbatches_per_step == 2
    assert plan.num_fillers == 0


def test_fewer_trajectories_than_ranks_make_fillers():
    plan = plan_steps([3, 5, 2], max_tokens=8, world_size=4)
    assert sorted(plan.for_rank(rank) for rank in range(4)) == [[()], [(0,)], [(1,)], [(2,)]]
    nothing = plan_steps([], max_tokens=8, world_size=2, num_steps=3)
    assert nothing.microbatches == (((),), ((),)) * 0 + ((((),), ((),)),) * 3
    assert (nothing.num_microbatches, nothing.num_fillers, nothing.padding_share, nothing.fill_share) == (
        0,
        6,
        0.0,
        0.0,
    )


def test_a_fixed_number_of_microbatches_is_kept_or_refused_with_the_number_needed():
    lengths = [8, 8, 8, 8, 8]
    with pytest.raises(MicrobatchesError, match="a step needs 3 microbatches per rank") as error:
        plan_steps(lengths, max_tokens=8, world_size=2, microbatches_per_step=2)
    assert error.value.needed == 3
    plan = plan_steps(lengths, max_tokens=8, world_size=2, microbatches_per_step=4)
    assert (plan.microbatches_per_step, plan.num_fillers) == (4, 3)
    spread_out = plan_steps([2] * 8, max_tokens=8, world_size=2, microbatches_per_step=4)
    assert spread_out.num_fillers == 0


def test_too_long_trajectories_are_named_before_anything_is_planned():
    for lengths, budget, text in (
        ([21], 20, "trajectory 0 has 21 .* at most 20"),
        ([5, 1, 9], 8, "trajectory 2 has 9 .* 8"),
    ):
        with pytest.raises(ValueError, match=text):
            plan_steps(lengths, max_tokens=budget)
    assert plan_steps([20], max_tokens=20).microbatches == ((((0,),),),)
    with pytest.raises(ValueError, match="trajectory 1 has no tokens"):
        plan_steps([3, 0], max_tokens=8)


def rank_correlation(values):
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[where]
    return float(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_the_order_is_not_sorted_by_length(layout):
    lengths = list(range(1, 257))
    found = []
    for seed in range(20):
        plan = plan_steps(lengths, max_tokens=256, layout=layout, seed=seed)
        found.append(rank_correlation([np.mean([lengths[i] for i in m]) for m in plan.for_rank(0)]))
    assert np.mean(np.abs(found)) < 0.15
    assert rank_correlation([1, 1, 2, 3]) > 0.9


def test_padded_steps_are_random_parts_and_not_lengths_in_order():
    lengths = list(range(1, 257))
    plan = plan_steps(lengths, max_tokens=256, layout="padded", num_steps=4, seed=1)
    means = [np.mean([lengths[index] for index in step]) for step in plan.steps]
    assert max(means) - min(means) < 60
    assert [len(step) for step in plan.steps] == [64] * 4


def test_seeds_change_partition_and_order():
    lengths = draw_lengths("lognormal", 64, 0)
    plans = {seed: plan_steps(lengths, max_tokens=16_384, num_steps=2, seed=seed) for seed in (None, 0, 1, (0, 1))}
    assert plans[None] == plans[0]
    assert len({plan.steps for plan in plans.values()}) == 3
    assert len({plan.microbatches for plan in plans.values()}) == 3


def test_all_ranks_use_one_order_over_microbatches():
    lengths = draw_lengths("truncated", 400, 0)
    plan = plan_steps(lengths, max_tokens=16_384, world_size=8, cost=MODEL_COST, seed=3)
    costs = np.array([[MODEL_COST(lengths[list(m)]) for m in rank] for rank in plan.microbatches[0]])
    assert (np.diff(costs.mean(axis=0)) > 0).any()
    assert (np.diff(costs.mean(axis=0)) < 0).any()
    by_mean = costs[:, np.argsort(-costs.mean(axis=0))]
    assert (by_mean[:, :-1].min(axis=0) >= by_mean[:, 1:].max(axis=0)).all()


def test_partitions_are_by_groups_or_by_trajectories():
    groups = ["a"] * 6 + ["b"] * 2 + ["c", "c"] + ["d", "d"]
    lengths = [4] * 12
    whole = plan_steps(lengths, max_tokens=8, num_steps=2, groups=groups)
    assert all(len({groups[i] for i in step}) == 2 for step in whole.steps)
    single = plan_steps(lengths, max_tokens=8, num_steps=2, groups=groups, partition="trajectories")
    assert [len(step) for step in single.steps] == [6, 6]
    assert single == plan_steps(lengths, max_tokens=8, num_steps=2)
    by_tensor = plan_steps(lengths, max_tokens=8, num_steps=2, groups=torch.tensor([0] * 6 + [1, 1, 2, 2, 3, 3]))
    assert by_tensor == whole
    assert [len(step) for step in partition_steps(3, 5)] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("name", ["max_tokens", "num_steps", "world_size", "microbatches_per_step"])
def test_counts_of_another_type_or_below_one_are_refused(name):
    options = {"max_tokens": 8, "num_steps": 1, "world_size": 1, "microbatches_per_step": 1}
    for value in (7.5, "8", True) if name == "microbatches_per_step" else (7.5, "8", True, None):
        with pytest.raises(TypeError, match=f"`{name}`"):
            plan_steps([3], **{**options, name: value})
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got {value}"):
            plan_steps([3], **{**options, name: value})


def test_other_bad_arguments_are_refused():
    for name in ("layout", "partition", "objective"):
        with pytest.raises(ValueError, match=f"`{name}` must be one of"):
            plan_steps([3], max_tokens=8, groups=[1], **{name: "other"})
    with pytest.raises(ValueError, match="needs `groups`"):
        plan_steps([3], max_tokens=8, partition="groups")
    with pytest.raises(ValueError, match="`groups` has 1 entries for 2"):
        plan_steps([3, 3], max_tokens=8, groups=["a"])
    with pytest.raises(TypeError, match="`cost`"):
        plan_steps([3], max_tokens=8, cost=3)
    with pytest.raises(ValueError, match="trajectory 1 is in `steps` more than once"):
        plan_partition([3, 3], [[0, 1], [1]], max_tokens=8)
    with pytest.raises(ValueError, match="names trajectory 2"):
        plan_partition([3, 3], [[2]], max_tokens=8)
    with pytest.raises(ValueError, match="number of steps"):
        plan_partition([3], [], max_tokens=8)


def test_chosen_steps_look_only_at_their_trajectories():
    plan = plan_partition([99, 3, 0, 5], [[1], [3], []], max_tokens=8, world_size=1)
    assert plan.microbatches == ((((1,),),), (((3,),),), (((),),))
    assert plan.steps == ((1,), (3,), ())
    with pytest.raises(ValueError, match="trajectory 0 has 99"):
        plan_partition([99, 3], [[1, 0]], max_tokens=8)


def test_plans_have_equal_ranks():
    fields = {"max_tokens": 8, "layout": "packed", "num_tokens": 1, "num_positions": 1, "lockstep_ratio": 1.0}
    for microbatches in ((), (((),),), ((((0,),), ((), ())),), ((((0,),),), (((),), ((),)))):
        with pytest.raises(ValueError, match="same ranks in every step"):
            StepPlan(microbatches=microbatches, rank_total_ratio=1.0, **fields)
    with pytest.raises(ValueError, match="`rank` is 1, but the plan is for ranks 0 to 0"):
        plan_steps([1], max_tokens=8).for_rank(1)


@pytest.mark.parametrize("lengths", [[9, 3, 4], np.array([9, 3, 4]), torch.tensor([9, 3, 4])])
def test_arguments_are_not_changed(lengths):
    groups, before = ["a", "b", "a"], copy.deepcopy(lengths)
    plan = plan_steps(lengths, max_tokens=9, num_steps=2, groups=groups)
    assert plan == plan_steps(before, max_tokens=9, num_steps=2, groups=groups)
    assert groups == ["a", "b", "a"]
    assert all(int(a) == int(b) for a, b in zip(lengths, before, strict=True))


def test_a_new_process_makes_the_same_plan():
    code = (
        "from lit_rl.data.planner import plan_steps;"
        "print(hash(plan_steps(list(range(1, 90)), max_tokens=99, num_steps=3, world_size=2, seed=5,"
        "groups=[str(i % 20) for i in range(89)]).microbatches))"
    )
    prints = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120).stdout
        for _ in range(2)
    }
    assert len(prints) == 1
