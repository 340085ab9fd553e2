"""Shares against hand counts, over microbatches and over ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.data.collate import collate, filler_batch
from lit_rl.log_ratio import LogRatioCounts
from lit_rl.metrics import PaddingCounts, TokenMean, ZeroAdvantageCounts
from lit_rl.trajectory import Trajectory
from tests.helpers import random_trajectories


def test_a_token_mean_weighs_tokens_not_microbatches() -> None:
    mean = TokenMean()
    mean.update(torch.full((10,), 1.0))
    mean.update(torch.full((30,), 2.0))
    mean.update(torch.zeros(0))
    assert mean.compute().item() == 1.75


def test_a_token_mean_ignores_what_is_masked() -> None:
    mean = TokenMean()
    mean.update(torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, 0.0, 3.0]))
    assert mean.compute().item() == 2.5


# --- zero advantage -----------------------------------------------------------------------------------------------


def zero_advantage(**arguments: object) -> dict[str, float]:
    metric = ZeroAdvantageCounts()
    metric.update(**arguments)  # type: ignore[arg-type]
    return metric.compute()


def test_reasons_are_told_apart() -> None:
    nan = math.nan
    figures = zero_advantage(
        live=[False] * 10 + [True, True],
        lengths=[4] * 12,
        scored_counts=[2] * 12,
        groups=[group for group in "abcdef" for _ in range(2)],
        rewards=[1.0, 1.0, 0.0, 0.0, 0.5, 0.5, nan, nan, 1.0, 0.0, 1.0, 0.0],
        truncated=[True] * 4 + [False] * 8,
    )
    expected = {"all_pass": 1, "all_fail": 1, "equal_partial": 1, "unscored": 1, "masked": 1}
    assert {name: figures[name] * 6 for name in expected} == pytest.approx(expected)
    assert figures["groups"] == pytest.approx(5 / 6)
    assert figures["trajectories"] == figures["positions"] == figures["scored_tokens"] == pytest.approx(10 / 12)
    assert figures["truncated"] == pytest.approx(0.4)


def test_tokens_and_positions_are_weighted_by_what_they_count() -> None:
    figures = zero_advantage(live=[False, True], lengths=[30, 10], scored_counts=[1, 9])
    assert figures == {"trajectories": 0.5, "scored_tokens": 0.1, "positions": 0.75}


def test_everything_equal_is_a_share_of_one() -> None:
    figures = zero_advantage(
        live=[False] * 8,
        lengths=[2] * 8,
        scored_counts=[1] * 8,
        groups=["a"] * 4 + ["b"] * 4,
        rewards=[1] * 4 + [0] * 4,
    )
    assert figures["groups"] == figures["trajectories"] == 1.0
    assert figures["all_pass"] == figures["all_fail"] == 0.5


def test_a_group_with_one_live_trajectory_is_live() -> None:
    figures = zero_advantage(
        live=[True, False, False], lengths=[1] * 3, scored_counts=[1] * 3, groups=["a"] * 3, rewards=[1.0, 0.5, 0.0]
    )
    assert figures["groups"] == 0.0
    assert figures["trajectories"] == pytest.approx(2 / 3)


def test_groups_need_rewards() -> None:
    with pytest.raises(ValueError, match="give `rewards`"):
        zero_advantage(live=[True], lengths=[1], scored_counts=[1], groups=["a"])


def test_microbatches_are_counted_without_fillers_and_groups() -> None:
    trajectories = [
        Trajectory([1, 2, 3], [0, 1, 1], 1.0),
        Trajectory([1, 2, 3, 4], [0, 0, 0, 1], 1.0),
        Trajectory([1, 2, 3], [0, 0, 0], 1.0),
    ]
    metric = ZeroAdvantageCounts()
    metric.update_batch(collate(trajectories, advantages=[0.0, 0.5, 0.7]))
    metric.update_batch(filler_batch())
    # the third has an advantage but no scored token, so it gives no gradient either
    assert metric.compute() == pytest.approx({"trajectories": 2 / 3, "scored_tokens": 2 / 3, "positions": 0.6})


# --- padding ------------------------------------------------------------------------------------------------------


def test_three_token_counts() -> None:
    metric = PaddingCounts()
    batch = collate([Trajectory([1, 2, 3, 4, 5], [0, 0, 1, 1, 1], 1.0)], rows=[[0]], row_tokens=8, max_tokens=16)
    metric.update(batch)
    figures = metric.compute()
    assert (figures["positions"], figures["real"], figures["prompt"], figures["scored"]) == (8, 5, 2, 3)
    assert figures["share"] == 0.375
    assert figures["fullest_share"] == 0.5


def test_a_padded_layout_is_what_the_longest_makes_of_it() -> None:
    pair = [Trajectory([1] * 8, [0] * 4 + [1] * 4, 1.0), Trajectory([1, 2], [0, 1], 0.0)]
    packed, padded = PaddingCounts(), PaddingCounts()
    packed.update(collate(pair, advantages=[0.5, 0.0]))
    padded.update(collate(pair, layout="padded"))
    assert packed.compute()["share"] == 0.0
    assert packed.compute()["live"] == 4
    for figures in (packed.compute(), padded.compute()):
        assert figures["padded_layout_positions"] == 16
        assert figures["padded_layout_share"] == padded.compute()["share"] == 0.375


def test_fillers_are_positions_but_not_tokens() -> None:
    metric = PaddingCounts()
    metric.update(collate([Trajectory([1, 2, 3], [0, 1, 1], 1.0)]))
    metric.update(filler_batch())
    figures = metric.compute()
    assert (figures["positions"], figures["real"], figures["filler"]) == (4, 3, 1)
    assert figures["share"] == 0.25


def test_steps_are_padded_apart() -> None:
    metric = PaddingCounts()
    total: dict[str, float] = {}
    for length in (8, 2):
        metric.update(collate([Trajectory([1] * length, [0] + [1] * (length - 1), 1.0)] * 2))
        total = PaddingCounts.merge(total, PaddingCounts.settle_step(metric.drain()))
    assert PaddingCounts.figures(total)["padded_layout_positions"] == 2 * 8 + 2 * 2


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 100), st.sampled_from(["packed", "padded"]))
def test_the_accounts_add_up(count: int, seed: int, layout: str) -> None:
    trajectories = random_trajectories(count, seed=seed)
    metric = PaddingCounts()
    half = max(1, count // 2)
    for part in (trajectories[:half], trajectories[half:]):
        metric.update(collate(part, layout=layout) if part else filler_batch())  # type: ignore[arg-type]
    figures = metric.compute()
    assert figures["real"] == sum(map(len, trajectories)) == figures["prompt"] + figures["scored"]
    assert figures["live"] <= figures["scored"] == sum(t.num_scored for t in trajectories)
    assert figures["positions"] >= figures["real"] + figures["filler"]
    assert 0.0 <= figures["share"] < 1.0
    assert figures["padded_layout_share"] >= 0.0


# --- log-ratios ---------------------------------------------------------------------------------------------------


def test_log_ratio_figures_by_hand() -> None:
    metric = LogRatioCounts()
    ratios = [1.0, 1.19, 1.21, 0.79]
    metric.update(torch.tensor(ratios, dtype=torch.float64).log(), torch.zeros(4))
    figures = metric.compute()
    assert figures["outside_20_percent"] == 0.5
    assert figures["max"] == pytest.approx(-math.log(0.79))
    assert figures["mean"] == pytest.approx(sum(map(math.log, ratios)) / 4)
    assert figures["kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 4)
    assert figures["above_20_percent"] == 0.25
    assert figures["mean_ratio"] == pytest.approx(sum(ratios) / 4)
    variance = sum(r * r for r in ratios) / 4 - (sum(ratios) / 4) ** 2
    assert figures["mean_ratio_error"] == pytest.approx(math.sqrt(variance / 4))


def test_bad_log_probs_are_counted_and_left_out() -> None:
    metric = LogRatioCounts()
    metric.update(torch.tensor([-1.0, math.nan, -math.inf]), torch.tensor([-1.0, -1.0, -1.0]))
    figures = metric.compute()
    assert (figures["tokens"], figures["non_finite"], figures["max"], figures["kl"]) == (1, 2, 0.0, 0.0)


def test_an_empty_microbatch_changes_nothing() -> None:
    metric = LogRatioCounts()
    metric.update(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    assert metric.compute() == {"tokens": 0.0, "non_finite": 0.0, "max": 0.0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-30, 0), min_size=1, max_size=20), st.integers(0, 19))
def test_log_ratios_do_not_depend_on_the_split(log_probs: list[float], cut: int) -> None:
    values, sampler = torch.tensor(log_probs, dtype=torch.float64), torch.full((len(log_probs),), -1.5)
    whole, split = LogRatioCounts(), LogRatioCounts()
    whole.update(values, sampler)
    split.update(values[:cut], sampler[:cut])
    split.update(values[cut:], sampler[cut:])
    assert split.compute() == pytest.approx(whole.compute())
    assert whole.compute()["kl"] >= 0
