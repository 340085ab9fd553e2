"""Rules give scores; draws follow them and stay finite."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.curriculum import (
    Beliefs,
    BetaPosterior,
    Interval,
    LastGroup,
    LiveProbability,
    Rule,
    TaskSampler,
    Thompson,
    Uniform,
    Variance,
)
from lit_rl.curriculum.draws import draw_weighted, log_weights

GENERATOR = np.random.default_rng(0)


def beliefs(values: list[float], unseen: int = 0) -> Beliefs:
    value = np.array([0.5] * unseen + values)
    groups = np.array([0] * unseen + [1] * len(values))
    return Beliefs(value, groups, np.zeros_like(groups))


def sampler_with(rates: dict[str, float | None], rule: Rule, **options: object) -> TaskSampler:
    """Tasks whose last group of 10 passed at these rates; `None` is never observed."""
    sampler = TaskSampler(list(rates), rule=rule, **options)  # type: ignore[arg-type]
    for task_id, rate in rates.items():
        if rate is not None:
            passed = round(rate * 10)
            sampler.observe(task_id, [1.0] * passed + [0.0] * (10 - passed))
    return sampler


def test_the_interval_is_open_and_unseen_tasks_are_inside() -> None:
    scores = Interval(0.2, 0.8).scores(beliefs([0.2, 0.21, 0.79, 0.8, 0.0, 1.0], unseen=1), GENERATOR)
    assert scores.tolist() == [1, 0, 1, 1, 0, 0, 0]
    assert Interval(0.6, 0.9).scores(beliefs([0.5], unseen=1), GENERATOR).tolist() == [1, 0]
    # every task passes this one: the unfiltered arm through the same code
    assert Interval(-1, 2).scores(beliefs([0.0, 1.0]), GENERATOR).tolist() == [1, 1]


def test_variance_and_live_probability_scores() -> None:
    np.testing.assert_allclose(Variance().scores(beliefs([0.0, 0.2, 0.5, 1.0]), GENERATOR), [0, 0.16, 0.25, 0])
    scores = LiveProbability(8, least=0.5).scores(beliefs([0.05, 0.5]), GENERATOR)
    np.testing.assert_allclose(scores, [0.0, 1 - 2 * 0.5**8])  # 1 - 0.95**8 = 0.34 is below 0.5


@pytest.mark.parametrize("temperature", [1e-3, 1.0, 1e3, 0.0])
@pytest.mark.parametrize("rates", [{"a": None, "b": 0.0, "c": 0.5, "d": 1.0}, {"b": 0.0, "d": 1.0}])
def test_probabilities_are_finite_for_any_temperature(rates: dict, temperature: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chances = list(sampler_with(rates, Variance(temperature)).probabilities().values())
    assert np.isfinite(chances).all()
    assert min(chances) >= 0
    assert sum(chances) == pytest.approx(1.0)


def test_probabilities_by_hand() -> None:
    # unseen 0.25, 0.16, 0.25: shares of 0.66
    chances = sampler_with({"a": None, "b": 0.2, "c": 0.5, "d": 1.0}, Variance()).probabilities()
    assert chances == pytest.approx({"a": 0.25 / 0.66, "b": 0.16 / 0.66, "c": 0.25 / 0.66, "d": 0.0})
    cold = sampler_with({"b": 0.2, "c": 0.5, "e": 0.5}, Variance(0.0)).probabilities()
    assert cold == pytest.approx({"b": 0.0, "c": 0.5, "e": 0.5})


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=6).filter(any), st.floats(0, 1e6))
def test_weights_are_finite_for_any_scores(scores: list[float], temperature: float) -> None:
    weights = np.exp(log_weights(np.array(scores), temperature))
    assert np.isfinite(weights).all()
    assert weights.max() == 1.0
    assert (weights[np.array(scores) == 0] == 0).all()


def test_weighted_draws_follow_the_scores() -> None:
    generator = np.random.default_rng(0)
    scores = np.array([1.0, 2.0, 5.0])
    first = Counter(int(draw_weighted(scores, 1.0, 1, generator)[0]) for _ in range(4000))
    for index, share in enumerate(scores / scores.sum()):
        assert first[index] / 4000 == pytest.approx(share, abs=0.03)
    assert sorted(draw_weighted(scores, 1.0, 5, generator).tolist()) == [0, 1, 2]
    # temperature 2 draws in proportion to the square roots
    flat = Counter(int(draw_weighted(scores, 2.0, 1, generator)[0]) for _ in range(4000))
    assert flat[2] / 4000 == pytest.approx(5**0.5 / (1 + 2**0.5 + 5**0.5), abs=0.03)


def test_thompson_explores_little_known_tasks() -> None:
    # "sure" passed 9 of 10 many times over; "new" was never seen: its wide posterior often promises more.
    sampler = TaskSampler(["new", "sure"], estimator=BetaPosterior(memory=1.0), rule=Thompson())
    for _ in range(20):
        sampler.observe("sure", [1.0] * 9 + [0.0])
    drawn = Counter(sampler.sample(1)[0] for _ in range(300))
    assert 150 < drawn["new"] < 300
    assert drawn["sure"] > 10


def test_thompson_needs_a_posterior() -> None:
    with pytest.raises(ValueError, match="BetaPosterior"):
        TaskSampler(["a"], estimator=LastGroup(), rule=Thompson())


class _Broken(Rule):
    def __init__(self, scores: object) -> None:
        self.given = scores

    def scores(self, beliefs: Beliefs, generator: np.random.Generator) -> np.ndarray:
        return np.array(self.given, dtype=float)


@pytest.mark.parametrize("scores", [[1.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_unusable_scores_of_an_own_rule_are_refused_at_construction(scores: list[float]) -> None:
    with pytest.raises(ValueError, match=r"gave"):
        TaskSampler(["a", "b"], rule=_Broken(scores))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Interval(0.8, 0.2), ValueError),
        (lambda: Interval(0.5, 0.5), ValueError),
        (lambda: Interval("0", 1), TypeError),
        (lambda: Variance(-1.0), ValueError),
        (lambda: Variance(float("inf")), ValueError),
        (lambda: Variance(float("nan")), ValueError),
        (lambda: LiveProbability(1), ValueError),
        (lambda: LiveProbability(8.0), TypeError),
        (lambda: LiveProbability(8, least=1.0), ValueError),
    ],
)
def test_impossible_rules_are_refused(make: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="must"):
        make()  # type: ignore[operator]


def test_rules_print_what_they_are() -> None:
    assert repr(Interval(0.2, 0.8)) == "Interval(low=0.2, high=0.8)"
    assert repr(Uniform()) == "Uniform()"
