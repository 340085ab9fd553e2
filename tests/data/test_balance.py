from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings

from lit_rl.data import padded
from lit_rl.data.balance import lockstep_ratio, rank_total_ratio, split_rows, spread
from lit_rl.data.bounds import fewest_rows_bound, search_rows
from lit_rl.data.cost import SegmentCost, microbatch_costs, segment_costs
from lit_rl.data.packing import pack_sequences
from lit_rl.data.planner import plan_steps
from tests.data.plans import MODEL_COST, check_invariants, draw_lengths, problems


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
    lengths = np.clip(np.random.default_rng(33).lognormal(np.log(8_000), 0.85, 512), 64, 65_536).astype(int)
    fixed = lengths.reshape(-1, 8)
    assert 1 - lengths.sum() / (8 * fixed.max(axis=1).sum()) == pytest.approx(0.59, abs=0.005)
    plan = plan_steps(lengths, max_tokens=131_072, layout="padded")
    assert plan.num_microbatches <= 51
    assert plan.padding_share <= 0.03
    packed = plan_steps(lengths, max_tokens=131_072)
    assert packed.num_microbatches == -(-int(lengths.sum()) // 131_072) == 45
    assert packed.padding_share == 0.0


def test_wide_padded_choices_are_split_instead_of_optimised(monkeypatch):
    lengths = np.sort(draw_lengths("lognormal", 200, 0))[::-1].tolist()
    exact = plan_steps(lengths, max_tokens=16_384, layout="padded", microbatches_per_step=150)
    monkeypatch.setattr(padded, "BOUNDARY_COMPARISONS", 0)
    plan = plan_steps(lengths, max_tokens=16_384, layout="padded", microbatches_per_step=150)
    check_invariants(plan, lengths, 1, 1, 16_384, "padded")
    assert plan.num_fillers == 0
    assert exact.padding_share < plan.padding_share < 0.05


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


def test_pieces_of_the_balance_fill_what_they_are_asked_to():
    assert split_rows([[0, 1, 2, 3]], np.ones(4), 4) == [[0], [2], [1], [3]]
    assert split_rows([[0]], np.ones(1), 3) == [[0], [], []]
    assert spread([6, 5, 5], [6.0, 5.0, 5.0], 8, [0, 1], [0.0, 0.0], 3) is None
