"""Dynamic sampling ends: with enough live groups, at its limit, or when no task is left."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.curriculum import DynamicSampling, Interval, TaskSampler

IDS = [f"task-{number}" for number in range(50)]


def search(
    dynamic: DynamicSampling, sampler: TaskSampler, count: int, rewards: Callable[[str], list[float]]
) -> list[list[str]]:
    rounds = []
    for task_ids in dynamic.rounds(sampler, count, iteration=0):
        rounds.append(task_ids)
        for task_id in task_ids:
            sampler.observe(task_id, rewards(task_id))
    return rounds


def test_it_stops_at_the_limit_and_says_what_was_tried() -> None:
    with pytest.warns(UserWarning, match=r"0 of 8 live groups in 3 rounds \(limit=3\); it tried 24 tasks: 24 all_fail"):
        rounds = search(DynamicSampling(limit=3), TaskSampler(IDS), 8, lambda _: [0.0, 0.0])
    assert [len(task_ids) for task_ids in rounds] == [8, 8, 8]
    assert len({task_id for task_ids in rounds for task_id in task_ids}) == 24


def test_it_raises_when_asked_to() -> None:
    with pytest.raises(RuntimeError, match="tried 24 tasks"):
        search(DynamicSampling(limit=3, exhausted="raise"), TaskSampler(IDS), 8, lambda _: [0.0, 0.0])


def test_the_limit_is_finite_by_default() -> None:
    with pytest.warns(UserWarning, match="live groups"):
        assert len(search(DynamicSampling(), TaskSampler(IDS), 2, lambda _: [1.0, 1.0])) == 3


def test_it_stops_when_no_task_is_left() -> None:
    with pytest.warns(UserWarning, match="it tried 5 tasks"):
        rounds = search(DynamicSampling(limit=100), TaskSampler(IDS[:5]), 4, lambda _: [1.0, 1.0])
    assert [len(task_ids) for task_ids in rounds] == [4, 1]


def test_a_live_first_round_is_the_only_one() -> None:
    sampler = TaskSampler(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(search(DynamicSampling(), sampler, 8, lambda _: [1.0, 0.0])) == 1
    assert sampler.metrics()["episodes_saved"] == 0


@settings(max_examples=40, deadline=None)
@given(st.sets(st.sampled_from(IDS)), st.integers(1, 8), st.integers(1, 6))
def test_rounds_ask_for_what_is_missing(live_ids: set[str], count: int, limit: int) -> None:
    sampler = TaskSampler(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rounds = search(DynamicSampling(limit), sampler, count, lambda i: [1.0, 0.0] if i in live_ids else [0.0, 0.0])
    live = 0
    for task_ids in rounds:
        assert len(task_ids) == count - live
        live += len(live_ids & set(task_ids))
    assert len(rounds) <= limit
    assert live == count or len(rounds) == limit
    assert sampler.report.rounds == len(rounds)
    assert sampler.report.drawn == sum(map(len, rounds))
    # what was spent beyond the places asked for counts against the saving
    assert sampler.metrics()["episodes_saved"] == 2 * (count - sampler.report.drawn)


def test_dead_groups_by_outcome_are_tried_again_and_counted_apart() -> None:
    sampler = TaskSampler(IDS)
    outcomes = iter([([0.1, 0.0], [0, 0]), ([0.5, 0.5], None), ([1.0, 0.0], None), ([1.0, 0.0], None)])
    rounds = []
    for task_ids in DynamicSampling().rounds(sampler, 2):
        rounds.append(len(task_ids))
        for task_id in task_ids:
            sampler.observe(task_id, *next(outcomes))
    assert rounds == [2, 2]
    assert (sampler.report.all_fail, sampler.report.equal_partial, sampler.report.live) == (1, 1, 2)


def test_further_rounds_leave_excluded_tasks_alone() -> None:
    sampler = TaskSampler(IDS, rule=Interval(), revisit=1)
    for task_id in IDS[:45]:
        sampler.observe(task_id, [1.0, 1.0])
    with pytest.warns(UserWarning, match="live groups"):
        rounds = search(DynamicSampling(limit=5), sampler, 4, lambda _: [0.0, 0.0])
    assert [len(task_ids) for task_ids in rounds] == [4, 2]  # 3 and 1 revisit, then the rest of the pool of 5


def test_an_unobserved_round_is_an_error() -> None:
    rounds = DynamicSampling().rounds(TaskSampler(IDS), 2)
    next(rounds)
    with pytest.raises(RuntimeError, match="2 tasks of the round were not observed"):
        next(rounds)


@pytest.mark.parametrize("arguments", [{"limit": 0}, {"limit": 2.0}, {"exhausted": "stop"}])
def test_bad_arguments_are_refused(arguments: dict) -> None:
    with pytest.raises((TypeError, ValueError), match="must"):
        DynamicSampling(**arguments)
