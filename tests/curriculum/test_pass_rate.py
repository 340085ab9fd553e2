"""Estimators against hand calculations, and posteriors against sampling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.curriculum import (
    BetaPosterior,
    ExponentialAverage,
    LastGroup,
    MeanOfLast,
    PassRate,
    live_probability,
)

NOW = np.zeros(1, dtype=np.int64)
ESTIMATORS = [LastGroup(), MeanOfLast(3), ExponentialAverage(0.7), BetaPosterior(0.9)]


def estimate(estimator: PassRate, groups: list[tuple[int, int]], age: int = 0) -> float:
    state = np.zeros(estimator.width)
    for passes, attempts in groups:
        state = estimator.update(state, passes, attempts, age=0)
    return float(estimator.value(state[None], np.array([age]))[0])


def test_last_group_forgets_all_others() -> None:
    assert estimate(LastGroup(), [(0, 4), (1, 4)]) == 0.25


def test_mean_of_last_three_groups() -> None:
    groups = [(8, 8), (0, 8), (4, 8), (8, 8)]
    assert estimate(MeanOfLast(3), groups) == pytest.approx(12 / 24)
    assert estimate(MeanOfLast(3), groups[:1]) == 1.0


def test_exponential_average_is_normalized() -> None:
    # weights 0.25, 0.5, 1 over their sum 1.75
    assert estimate(ExponentialAverage(0.5), [(4, 4), (0, 4), (2, 4)]) == pytest.approx((0.25 + 0 + 0.5) / 1.75)
    assert estimate(ExponentialAverage(0.9), [(3, 4)]) == pytest.approx(0.75)
    assert estimate(ExponentialAverage(0.0), [(3, 4), (1, 4)]) == 0.25


def test_beta_posterior_fades_with_iterations_not_visits() -> None:
    estimator = BetaPosterior(memory=0.5)
    assert estimate(estimator, [(8, 8)]) == pytest.approx(9 / 10)
    assert estimate(estimator, [(8, 8)], age=3) == pytest.approx((1 + 1) / (2 + 1))
    assert estimate(estimator, [(8, 8)], age=200) == pytest.approx(0.5)
    state = estimator.update(np.zeros(2), 8, 8, age=0)
    # 3 iterations later the 8 passes are worth 1
    assert estimator.update(state, 0, 4, age=3).tolist() == [1.0, 4.0]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@given(groups=st.lists(st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=6))
def test_estimates_are_rates_and_updates_do_not_write(estimator: PassRate, groups: list[tuple[int, int]]) -> None:
    state = np.zeros(estimator.width)
    for passes, attempts in groups:
        before = state.copy()
        updated = estimator.update(state, passes, attempts, age=1)
        assert updated.shape == (estimator.width,)
        np.testing.assert_array_equal(state, before)
        state = updated
    beliefs = estimator.beliefs(state[None], np.array([len(groups)]), NOW)
    assert 0.0 <= beliefs.value[0] <= 1.0
    assert beliefs.value[0] == 0.5 or groups
    assert 0.0 <= beliefs.live_probability(4)[0] < 1.0


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_unseen_tasks_get_the_documented_prior(estimator: PassRate) -> None:
    beliefs = estimator.beliefs(np.zeros((1, estimator.width)), np.array([0]), NOW)
    assert beliefs.value[0] == estimator.initial == 0.5


@pytest.mark.parametrize(("passes", "fails"), [(1.0, 1.0), (9.0, 1.0), (0.5, 3.0), (40.0, 2.0)])
@pytest.mark.parametrize("group_size", [1, 2, 8])
def test_live_probability_is_the_expectation_under_the_posterior(passes: float, fails: float, group_size: int) -> None:
    p = np.random.default_rng(0).beta(passes, fails, size=400_000)
    sampled = (1 - p**group_size - (1 - p) ** group_size).mean()
    assert live_probability(passes, fails, group_size) == pytest.approx(sampled, abs=2e-3)


def test_live_probability_neither_overflows_nor_vanishes() -> None:
    assert live_probability(1e9, 1e9, 64) == pytest.approx(1.0)
    assert live_probability(1e-9, 1e9, 64) == pytest.approx(0.0, abs=1e-9)


def test_point_estimates_use_the_plain_formula() -> None:
    beliefs = LastGroup().beliefs(np.array([[0.9]]), np.array([1]), NOW)
    assert beliefs.live_probability(8)[0] == pytest.approx(1 - 0.9**8 - 0.1**8)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: MeanOfLast(0), ValueError),
        (lambda: MeanOfLast(2.5), TypeError),
        (lambda: ExponentialAverage(1.0), ValueError),
        (lambda: ExponentialAverage(-0.1), ValueError),
        (lambda: ExponentialAverage("0.5"), TypeError),
        (lambda: BetaPosterior(memory=0.0), ValueError),
        (lambda: BetaPosterior(memory=1.1), ValueError),
        (lambda: BetaPosterior(prior_passes=0.0), ValueError),
        (lambda: BetaPosterior(prior_fails=float("nan")), ValueError),
    ],
)
def test_impossible_numbers_are_refused_at_construction(make: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="must"):
        make()  # type: ignore[operator]
