from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.data import padded
from lit_rl.data.balance import lockstep_ratio, rank_total_ratio, split_rows, spread
from lit_rl.data.bounds import fewest_rows_bound, search_rows
from lit_rl.data.cost import SegmentCost, microbatch_costs, segment_costs
from lit_rl.data.packing import pack_sequences
from lit_rl.data.plan import StepPlan
from lit_rl.data.planner import MicrobatchesError, partition_steps, plan_partition, plan_steps

MODEL_COST = SegmentCost(linear=6 * 1.31e9, quadratic=6 * 28 * 1536)


def draw_lengths(name, count, seed, budget=16_384):
    random = np.random.default_rng(seed)
    if name == "lognormal":
        lengths = random.lognormal(7.3, 0.9, count)
    elif name == "bimodal":
        long = random.random(count) < 0.15
        lengths = np.where(long, random.uniform(budget / 2, budget, count), random.uniform(100, 1500, count))
    else:
        lengths = np.where(random.random(count) < 0.2, budget, random.lognormal(7.8, 0.7, count))
    return np.clip(lengths, 64, budget).astype(int)


def size(microbatch, lengths, layout):
    tokens = [lengths[index] for index in microbatch]
    return sum(tokens) if layout == "packed" else len(tokens) * max(tokens, default=0)


def shape(plan, lengths):
    return [[[sorted(lengths[i] for i in m) for m in rank] for rank in step] for step in plan.microbatches]


def check_invariants(plan, lengths, num_steps, world_size, max_tokens, layout):
    flat = [index for step in plan.microbatches for rank in step for m in rank for index in m]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(type(index) is int for index in flat)
    assert len(plan.microbatches) == plan.num_steps == num_steps
    assert {len(step) for step in plan.microbatches} == {plan.world_size} == {world_size}
    assert {len(rank) for step in plan.microbatches for rank in step} == {plan.microbatches_per_step}
    sizes = [size(m, lengths, layout) for step in plan.microbatches for rank in step for m in rank]
    assert max(sizes) <= max_tokens
    assert plan.num_positions == sum(sizes)
    assert plan.num_tokens == sum(lengths)
    per_step = world_size * plan.microbatches_per_step
    fillers = [sum(not m for rank in step for m in rank) for step in plan.microbatches]
    assert fillers == [max(0, per_step - len(step)) for step in plan.steps]
    assert plan.num_fillers == sum(fillers) == num_steps * per_step - plan.num_microbatches


@st.composite
def problems(draw):
    max_tokens = draw(st.integers(1, 80))
    lengths = draw(st.lists(st.integers(1, max_tokens), max_size=50))
    options = {
        "max_tokens": max_tokens,
        "num_steps": draw(st.integers(1, 4)),
        "world_size": draw(st.integers(1, 5)),
        "layout": draw(st.sampled_from(["packed", "padded"])),
        "objective": draw(st.sampled_from(["lockstep", "rank_total"])),
        "seed": draw(st.integers(0, 5)),
    }
    if draw(st.booleans()):
        options["groups"] = draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    return lengths, options


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


@settings(max_examples=150, deadline=None)
@given(problems())
def test_never_more_microbatches_than_first_fit_decreasing(problem):
    lengths, options = problem
    options["layout"] = "packed"
    plan = plan_steps(lengths, **options)
    rows = [len(pack_sequences([lengths[i] for i in step], options["max_tokens"])) for step in plan.steps]
    assert plan.microbatches_per_step <= max(1, *(-(-count // options["world_size"]) for count in rows))


def fewest_rows(lengths, capacity):
    """Exact, by trying every subset as the row of the first trajectory that is left."""
    everyone = (1 << len(lengths)) - 1
    weight = [sum(lengths[i] for i in range(len(lengths)) if chosen >> i & 1) for chosen in range(everyone + 1)]

    @cache
    def rows(left):
        if not left:
            return 0
        first = left & -left
        others, best, subset = left ^ first, len(lengths), left ^ first
        while True:
            if weight[subset | first] <= capacity:
                best = min(best, 1 + rows(others ^ subset))
            if not subset:
                return best
            subset = (subset - 1) & others

    return rows(everyone)


@pytest.mark.parametrize("seed", range(200))
def test_small_plans_have_the_fewest_microbatches_possible(seed):
    random = np.random.default_rng(seed)
    count, world_size, capacity = int(random.integers(1, 10)), int(random.integers(1, 4)), int(random.integers(5, 30))
    lengths = random.integers(1 + capacity // 8, capacity + 1, size=count).tolist()
    best = fewest_rows(tuple(lengths), capacity)
    assert fewest_rows_bound(np.array(lengths), capacity) <= best
    plan = plan_steps(lengths, max_tokens=capacity, world_size=world_size, seed=seed)
    assert plan.microbatches_per_step == max(1, -(-best // world_size))
    check_invariants(plan, lengths, 1, world_size, capacity, "packed")


def test_first_fit_decreasing_is_beaten_where_it_wastes_a_row():
    lengths = [5, 4, 3, 3, 3, 2]
    assert len(pack_sequences(lengths, 10)) == 3
    assert plan_steps(lengths, max_tokens=10).microbatches_per_step == 2
    hard = [8, 8, 7, 5, 4, 3, 3, 3, 2, 2, 2]
    assert len(pack_sequences(hard, 8)) == 7
    assert plan_steps(hard, max_tokens=8).microbatches_per_step == 6
    assert sorted(i for row in search_rows(hard, 8, 6) for i in row) == list(range(11))
    assert search_rows(hard, 8, 5) is None
    assert search_rows([1] * 33, 33, 1) is None


@pytest.mark.parametrize("seed", range(40))
def test_padded_plans_have_the_fewest_microbatches_and_little_padding(seed):
    random = np.random.default_rng(seed)
    lengths = sorted(random.integers(1, 41, size=12).tolist(), reverse=True)
    best = {0: (0, 0)}
    for end in range(1, 13):
        options = []
        for start in range(end):
            positions = (end - start) * lengths[start]
            if positions <= 40:
                options.append((best[start][0] + 1, best[start][1] + positions))
        best[end] = min(options)
    plan = plan_steps(lengths, max_tokens=40, layout="padded")
    assert (plan.num_microbatches, plan.num_positions) == best[12]


@pytest.mark.parametrize("objective", ["lockstep", "rank_total"])
@pytest.mark.parametrize(
    ("name", "world_size", "count", "bar"),
    [
        ("lognormal", 8, 512, 1.03),
        ("bimodal", 8, 512, 1.02),
        ("truncated", 8, 512, 1.01),
        ("lognormal", 32, 1024, 1.10),
        ("bimodal", 32, 1024, 1.04),
        ("truncated", 32, 1024, 1.02),
    ],
)
def test_balance_on_known_distributions(name, world_size, count, bar, objective):
    for seed in range(8):
        lengths = draw_lengths(name, count, seed)
        plan = plan_steps(lengths, max_tokens=16_384, world_size=world_size, cost=MODEL_COST, objective=objective)
        assert (plan.lockstep_ratio if objective == "lockstep" else plan.rank_total_ratio) <= bar
        assert plan.microbatches_per_step <= -(-len(pack_sequences(lengths, 16_384)) // world_size)
        if objective == "rank_total":
            assert plan.rank_total_ratio <= 1.01


def test_lockstep_plans_keep_totals_of_ranks_close():
    plans = [
        plan_steps(draw_lengths("bimodal", 512, s), max_tokens=16_384, world_size=8, cost=MODEL_COST) for s in range(4)
    ]
    assert np.mean([plan.rank_total_ratio for plan in plans]) < 1.005


def test_padded_microbatches_of_one_index_cost_about_the_same():
    ratios = [
        plan_steps(
            draw_lengths("lognormal", 512, seed), max_tokens=16_384, world_size=8, cost=MODEL_COST, layout="padded"
        ).lockstep_ratio
        for seed in range(4)
    ]
    assert np.mean(ratios) < 1.052


def test_a_tight_budget_is_still_balanced():
    # 72 microbatches with 4,800 tokens to spare in all: placing every trajectory by cost does not fit.
    lengths = draw_lengths("lognormal", 512, 1149)
    plan = plan_steps(lengths, max_tokens=16_384, world_size=8, cost=MODEL_COST)
    assert plan.fill_share > 0.995
    assert plan.lockstep_ratio <= 1.03


def test_sixty_five_thousand_trajectories_on_256_ranks():
    lengths = draw_lengths("lognormal", 65_536, 0)
    plan = plan_steps(lengths, max_tokens=16_384, world_size=256, num_steps=2, cost=MODEL_COST)
    check_invariants(plan, lengths.tolist(), 2, 256, 16_384, "packed")
    assert plan.lockstep_ratio <= 1.02


def test_the_ratios_are_those_of_the_microbatches():
    lengths = draw_lengths("bimodal", 64, 0)
    plan = plan_steps(lengths, max_tokens=16_384, world_size=4, num_steps=2, cost=MODEL_COST)
    costs = np.array([[[MODEL_COST(lengths[list(m)]) for m in rank] for rank in step] for step in plan.microbatches])
    ideal = costs.sum() / 4
    assert plan.lockstep_ratio == pytest.approx(sum(s[:, k].max() for s in costs for k in range(s.shape[1])) / ideal)
    assert plan.rank_total_ratio == pytest.approx(sum(s.sum(1).max() for s in costs) / ideal)
    assert lockstep_ratio(np.zeros((2, 1))) == rank_total_ratio(np.zeros((2, 1))) == 1.0


def test_the_padded_budget_on_the_long_tailed_example():
    lengths = np.clip(np.random.default_rng(3).lognormal(np.log(8192), 0.8, 512), 64, 65_536).astype(int)
    fixed = lengths.reshape(-1, 8)
    assert 0.57 < 1 - lengths.sum() / (8 * fixed.max(axis=1).sum()) < 0.61
    plan = plan_steps(lengths, max_tokens=131_072, layout="padded")
    assert plan.num_microbatches <= 51
    assert plan.padding_share <= 0.03
    packed = plan_steps(lengths, max_tokens=131_072)
    assert packed.num_microbatches == -(-int(lengths.sum()) // 131_072)
    assert packed.padding_share == 0.0


def test_wide_padded_choices_are_split_instead_of_optimised(monkeypatch):
    lengths = np.sort(draw_lengths("lognormal", 200, 0))[::-1].tolist()
    exact = plan_steps(lengths, max_tokens=16_384, layout="padded", microbatches_per_step=150)
    monkeypatch.setattr(padded, "BOUNDARY_COMPARISONS", 0)
    plan = plan_steps(lengths, max_tokens=16_384, layout="padded", microbatches_per_step=150)
    check_invariants(plan, lengths, 1, 1, 16_384, "padded")
    assert plan.num_fillers == 0
    assert exact.padding_share < plan.padding_share < 0.05


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


def test_a_cost_of_any_kind_is_used_and_kept_in_budget():
    lengths = draw_lengths("bimodal", 200, 0)
    same = plan_steps(lengths, max_tokens=16_384, world_size=8, cost=lambda tokens: MODEL_COST(tokens))
    assert same.microbatches == plan_steps(lengths, max_tokens=16_384, world_size=8, cost=MODEL_COST).microbatches
    for cost in (
        lambda tokens: 1.0,
        lambda tokens: float(sum(tokens)) ** 2,
        lambda tokens: 1 / sum(tokens),
        lambda t: 0.0,
    ):
        for layout in ("packed", "padded"):
            for objective in ("lockstep", "rank_total"):
                plan = plan_steps(
                    lengths, max_tokens=16_384, world_size=8, cost=cost, layout=layout, objective=objective
                )
                check_invariants(plan, lengths.tolist(), 1, 8, 16_384, layout)
    seen = []
    plan_steps([4, 2, 4], max_tokens=8, layout="padded", cost=lambda tokens: seen.append(tokens) or 1.0)
    assert (4, 4) in seen


def test_costs_follow_segments_and_not_totals():
    assert SegmentCost(linear=0, quadratic=1)([1024] * 16) * 16 == SegmentCost(linear=0, quadratic=1)([16 * 1024])
    flops = MODEL_COST([2000])
    assert flops == 6 * 1.31e9 * 2000 + 6 * 28 * 1536 * 2000**2
    assert microbatch_costs(MODEL_COST, [[2000, 2000], []]).tolist() == [2 * flops, 0.0]
    assert segment_costs(sum, np.array([5, 3, 5])).tolist() == [5.0, 3.0, 5.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_costs_that_are_no_costs_are_refused(value):
    with pytest.raises(ValueError, match="`cost` gave"):
        plan_steps([3, 5], max_tokens=8, cost=lambda lengths: value)
    with pytest.raises(ValueError, match="`linear`"):
        SegmentCost(linear=value)
    with pytest.raises(ValueError, match="both 0"):
        SegmentCost(linear=0, quadratic=0)


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


def test_pieces_of_the_balance_fill_what_they_are_asked_to():
    assert split_rows([[0, 1, 2, 3]], np.ones(4), 4) == [[0], [2], [1], [3]]
    assert split_rows([[0]], np.ones(1), 3) == [[0], [], []]
    assert spread([6, 5, 5], [6.0, 5.0, 5.0], 8, [0, 1], [0.0, 0.0], 3) is None


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
