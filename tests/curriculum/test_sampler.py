"""TaskSampler: passes, filters, revisits, floors, identity, and exact continuation."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.curriculum import (
    BetaPosterior,
    ExponentialAverage,
    Interval,
    LastGroup,
    LiveProbability,
    MeanOfLast,
    TaskSampler,
    Thompson,
    Variance,
)
from lit_rl.trajectory import Trajectory

IDS = [f"task-{number}" for number in range(20)]
PASS, FAIL, MIXED = [1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0]
COMBINATIONS = [
    {},
    {"rule": Interval(), "revisit": 2},
    {"estimator": MeanOfLast(2), "rule": Interval(0.1, 0.9), "refill": "full"},
    {"estimator": ExponentialAverage(0.5), "rule": Variance(0.5)},
    {"estimator": BetaPosterior(0.9), "rule": LiveProbability(4, least=0.2)},
    {"estimator": BetaPosterior(0.9), "rule": Thompson()},
]


def rewards_of(task_id: str, iteration: int) -> list[float]:
    """A fixed world in which every task sometimes passes."""
    return [float((int(task_id.split("-")[1]) * 7 + iteration * 3 + attempt) % 5 < 3) for attempt in range(4)]


def run(sampler: TaskSampler, iterations: range, count: int = 6) -> list[list[str]]:
    drawn = []
    for iteration in iterations:
        drawn.append(sampler.sample(count, iteration=iteration))
        for task_id in drawn[-1]:
            sampler.observe(task_id, rewards_of(task_id, iteration))
    return drawn


def solved(sampler: TaskSampler, ids: list[str], rewards: list[float] = PASS) -> TaskSampler:
    for task_id in ids:
        sampler.observe(task_id, rewards)
    return sampler


# --- drawing ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 5))
def test_the_default_draws_in_shuffled_passes(tasks: int, count: int, seed: int) -> None:
    count = min(count, tasks)
    sampler = TaskSampler([f"t{number}" for number in range(tasks)], seed=seed)
    drawn = [task_id for _ in range(3 * tasks) for task_id in sampler.sample(count)]
    for start in range(0, len(drawn) - tasks + 1, tasks):
        assert len(set(drawn[start : start + tasks])) == tasks  # every pass holds every task once


def test_passes_differ_and_depend_on_the_seed() -> None:
    sampler = TaskSampler(IDS, seed=0)
    first, second = sampler.sample(20), sampler.sample(20)
    assert first != second
    assert TaskSampler(IDS, seed=1).sample(20) != first


@pytest.mark.parametrize("options", COMBINATIONS, ids=repr)
def test_draws_are_distinct_known_and_within_the_count(options: dict) -> None:
    drawn = run(TaskSampler(IDS, seed=3, **options), range(40))
    for task_ids in drawn:
        assert 1 <= len(task_ids) <= 6
        assert len(set(task_ids)) == len(task_ids)
        assert set(task_ids) <= set(IDS)


@pytest.mark.parametrize("options", COMBINATIONS, ids=repr)
def test_draws_do_not_depend_on_the_order_of_the_tasks(options: dict) -> None:
    assert run(TaskSampler(IDS, **options), range(8)) == run(TaskSampler(IDS[::-1], **options), range(8))


def test_solved_and_hopeless_tasks_leave_the_pool() -> None:
    sampler = TaskSampler(IDS, rule=Interval(), revisit=0)
    solved(sampler, IDS[:8])
    solved(sampler, IDS[8:12], FAIL)
    drawn = sampler.sample(20)
    assert sorted(drawn) == sorted(IDS[12:])
    metrics = sampler.metrics()
    assert (metrics["pool_size"], metrics["excluded_easy"], metrics["excluded_hard"]) == (8, 8, 4)


def test_the_last_group_decides_for_the_default_estimator() -> None:
    sampler = solved(TaskSampler(["a", "b"], rule=Interval(), revisit=0), ["a"])
    assert sampler.sample(2) == ["b"]
    sampler.observe("a", MIXED)
    assert sorted(sampler.sample(2)) == ["a", "b"]


def test_revisits_take_the_longest_undrawn_and_reach_every_excluded_task() -> None:
    sampler = solved(TaskSampler(IDS, rule=Interval(), revisit=2), IDS[:10])
    revisited: list[str] = []
    for _ in range(5):
        drawn = sampler.sample(6)
        assert len(drawn) == 6
        back = [task_id for task_id in drawn if task_id in IDS[:10]]
        assert len(back) == 2
        solved(sampler, back)
        revisited += back
    assert sorted(revisited) == sorted(IDS[:10])  # 10 excluded, 2 per iteration: all within 5 iterations
    assert sampler.metrics()["revisits"] == 2


def test_revisits_never_take_every_place() -> None:
    sampler = solved(TaskSampler(["a", "b", "c"], rule=Interval(), revisit=5), ["a", "b"])
    assert sampler.sample(1) == ["c"]
    assert len(sampler.sample(2)) == 2


def test_a_short_pool_samples_fewer_unless_refilled() -> None:
    saving = solved(TaskSampler(IDS, rule=Interval(), revisit=1), IDS[:17])
    assert len(saving.sample(8)) == 4  # 3 in the pool and 1 revisit
    full = solved(TaskSampler(IDS, rule=Interval(), revisit=1, refill="full"), IDS[:17])
    drawn = full.sample(8)
    assert len(drawn) == 8
    assert set(IDS[17:]) <= set(drawn)
    assert full.metrics()["stand_ins"] == 4


@pytest.mark.parametrize("refill", ["none", "full"])
@pytest.mark.parametrize("rewards", [PASS, FAIL])
def test_an_empty_pool_never_hangs_or_comes_back_empty(refill: str, rewards: list[float]) -> None:
    sampler = TaskSampler(IDS, rule=Interval(0.2, 0.8), refill=refill)  # type: ignore[arg-type]
    solved(sampler, IDS, rewards)
    with pytest.warns(UserWarning, match=r"0 of 20 tasks are in the pool .* fewer than floor=1") as caught:
        draws = [sampler.sample(8) for _ in range(20)]
    assert len(caught) == 1  # one warning, not one per iteration
    assert {len(drawn) for drawn in draws} == ({8} if refill == "full" else {2})
    assert {task_id for drawn in draws for task_id in drawn} == set(IDS)  # uniform fall-back reaches all of them


def test_a_warning_is_not_repeated_after_a_restart() -> None:
    sampler = solved(TaskSampler(IDS, rule=Interval()), IDS)
    with pytest.warns(UserWarning, match="0 of 20"):
        sampler.sample(8)
    restarted = TaskSampler(IDS, rule=Interval())
    restarted.load_state_dict(sampler.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restarted.sample(8)


def test_the_floor_tops_up_a_small_pool() -> None:
    sampler = solved(TaskSampler(IDS, rule=Interval(), revisit=0, floor=5), IDS[:18])
    with pytest.warns(UserWarning, match="2 of 20 tasks"):
        drawn = sampler.sample(8)
    assert len(drawn) == 5
    assert set(IDS[18:]) <= set(drawn)


def test_no_warning_while_the_pool_is_large_enough() -> None:
    sampler = TaskSampler(["a", "b", "c"], rule=Interval(), floor=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(sampler.sample(3)) == 3


def test_excluded_tasks_come_back_by_themselves_when_evidence_fades() -> None:
    options = {"estimator": BetaPosterior(memory=0.8), "rule": Interval(0.1, 0.85)}
    sampler = TaskSampler(["a", "b"], revisit=0, **options)
    sampler.sample(2, iteration=0)
    sampler.observe("a", [1.0] * 8)
    assert sampler.sample(2, iteration=1) == ["b"]
    assert sorted(sampler.sample(2, iteration=9)) == ["a", "b"]


# --- observing ----------------------------------------------------------------------------------------------------


def test_passing_goes_by_outcome_where_it_is_given() -> None:
    sampler = TaskSampler(["a", "b"], rule=Interval())
    assert sampler.observe("a", [0.10, 0.00, 0.05, 0.00], outcomes=[0, 0, 0, 0]) == "all_fail"
    assert sampler.observe("b", [0.5, 0.5, 0.5, 0.5]) == "equal_partial"
    assert sampler.report.all_fail == sampler.report.equal_partial == 1
    assert sampler.estimates() == {"a": 0.0, "b": 0.0}


def test_trajectories_are_observed_group_by_group() -> None:
    def attempt(task: str, group: str, reward: float | None, **info: float) -> Trajectory:
        return Trajectory([1, 2], [0, 1], reward, task=task, group=group, info=info)

    sampler = TaskSampler(["a", "b"], estimator=MeanOfLast(2))
    sampler.observe_trajectories(
        [
            attempt("a", "0:a:0", 1.0),
            attempt("b", "0:b:0", 0.3, outcome=1.0),
            attempt("a", "0:a:1", 0.0),
            attempt("b", "0:b:0", 0.2, outcome=0.0),
            attempt("a", "0:a:0", None),
        ]
    )
    assert sampler.estimates() == {"a": 0.5, "b": 0.5}
    assert sampler.report.groups == 3
    assert sampler.report.episodes == 5


def test_a_group_nobody_could_score_changes_nothing() -> None:
    sampler = TaskSampler(["a"])
    assert sampler.observe("a", [None, float("nan")]) == "unscored"
    assert sampler.estimate("a") == 0.5
    assert sampler.metrics()["episodes"] == 2
    assert "observed_live_share" not in sampler.metrics()


def test_predicted_and_observed_live_shares() -> None:
    sampler = TaskSampler(["a", "b"], estimator=BetaPosterior())
    sampler.sample(2)
    sampler.observe("a", [1.0, 0.0])
    sampler.observe("b", [1.0, 1.0])
    metrics = sampler.metrics()
    assert metrics["predicted_live_share"] == pytest.approx(1 / 3)  # uniform prior, groups of 2
    assert metrics["observed_live_share"] == 0.5


def test_saved_episodes_are_the_places_left_empty() -> None:
    sampler = solved(TaskSampler(IDS, rule=Interval(), revisit=0), IDS[:17])
    for _ in range(2):
        for task_id in sampler.sample(8):
            sampler.observe(task_id, MIXED)
    metrics = sampler.metrics()
    # 17 groups of 4 before the first draw, then twice 3 groups of 4 instead of 8
    assert metrics["episodes_sampled"] == 17 * 4 + 2 * 12
    assert metrics["episodes_saved"] == 2 * 5 * 4
    assert metrics["episodes"] == 12


def test_the_histogram_sums_to_one() -> None:
    sampler = TaskSampler(["a", "b", "c", "d", "e"])
    solved(solved(sampler, ["a"]), ["b"], FAIL).observe("c", MIXED)
    shares = {name: value for name, value in sampler.metrics().items() if name.startswith("estimates/")}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["estimates/one"] == shares["estimates/zero"] == shares["estimates/25_to_50"] == pytest.approx(0.2)
    assert shares["estimates/unseen"] == pytest.approx(0.4)


# --- identity and continuation ------------------------------------------------------------------------------------


def test_estimates_follow_the_id_through_new_and_vanished_tasks() -> None:
    sampler = TaskSampler(["b", "d"])
    sampler.observe("b", PASS)
    sampler.observe("d", MIXED)
    sampler.set_tasks(["a", "d", "e"])
    assert sampler.estimates() == {"a": 0.5, "d": 0.25, "e": 0.5}
    assert set(sampler.sample(3)) == {"a", "d", "e"}
    sampler.observe("b", FAIL)  # a late result of a task that vanished
    sampler.set_tasks(["b", "d"])
    assert sampler.estimates() == {"b": 0.0, "d": 0.25}


def test_a_loaded_state_is_matched_by_id_not_by_place() -> None:
    old = TaskSampler(["a", "b", "c"])
    old.observe("a", PASS)
    old.observe("c", MIXED)
    new = TaskSampler(["0-new", "c", "a"])
    new.load_state_dict(old.state_dict())
    assert new.estimates() == {"0-new": 0.5, "a": 1.0, "c": 0.25}
    new.set_tasks(["b", "c"])
    assert new.estimates() == {"b": 0.5, "c": 0.25}


@pytest.mark.parametrize("options", COMBINATIONS, ids=repr)
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_stopped_sampler_continues_exactly(options: dict, stop: int, tmp_path: Path) -> None:
    through = TaskSampler(IDS, seed=5, **options)
    expected = run(through, range(27))
    before = TaskSampler(IDS, seed=5, **options)
    run(before, range(stop))
    torch.save(before.state_dict(), tmp_path / "state.pt")
    after = TaskSampler(IDS, seed=5, **options)
    after.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert run(after, range(stop, 27)) == expected[stop:]
    assert after.metrics() == through.metrics()
    assert after.estimates() == through.estimates()


def test_a_new_process_continues_exactly(tmp_path: Path) -> None:
    options = "estimator=BetaPosterior(0.9), rule=LiveProbability(4, least=0.2)"
    program = f"""
import sys, torch
from lit_rl.curriculum import *
sampler = TaskSampler([f"task-{{n}}" for n in range(20)], seed=5, {options})
sampler.load_state_dict(torch.load({str(tmp_path / "state.pt")!r}, weights_only=True))
for _ in range(20):
    task_ids = sampler.sample(6)
    for task_id in task_ids:
        sampler.observe(task_id, [1.0, 0.0] if len(task_id) == 6 else [1.0, 1.0])
    print(*task_ids)
assert "lightning" not in sys.modules
"""
    sampler = TaskSampler(IDS, seed=5, estimator=BetaPosterior(0.9), rule=LiveProbability(4, least=0.2))

    def draw() -> str:
        task_ids = sampler.sample(6)
        for task_id in task_ids:
            sampler.observe(task_id, [1.0, 0.0] if len(task_id) == 6 else [1.0, 1.0])
        return " ".join(task_ids)

    for _ in range(7):
        draw()
    torch.save(sampler.state_dict(), tmp_path / "state.pt")
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=True)
    assert result.stdout.splitlines() == [draw() for _ in range(20)]


def test_saving_does_not_share_memory_with_the_sampler() -> None:
    sampler = TaskSampler(["a", "b"])
    state = sampler.state_dict()
    sampler.observe("a", PASS)
    other = TaskSampler(["a", "b"])
    other.load_state_dict(state)
    assert other.estimate("a") == 0.5
    other.observe("b", PASS)
    assert state["table"]["groups"].tolist() == [0, 0]


def test_another_estimator_starts_the_estimates_afresh_with_a_warning() -> None:
    old = solved(TaskSampler(["a", "b"]), ["a"])
    new = TaskSampler(["a", "b"], estimator=BetaPosterior(), rule=Thompson())
    with pytest.warns(UserWarning, match=r"made by .*LastGroup\(\) of width 1, this sampler uses .*BetaPosterior"):
        new.load_state_dict(old.state_dict())
    assert new.estimates() == {"a": 0.5, "b": 0.5}
    assert len(new.sample(2)) == 2


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"task_ids": []}, ValueError, "at least one task"),
        ({"task_ids": ["a", "b", "a"]}, ValueError, "'a' comes 2 times"),
        ({"task_ids": ["a", 1.5]}, TypeError, r"`task_ids`\[1\]"),
        ({"task_ids": "abc"}, TypeError, "text"),
        ({"seed": -1}, ValueError, "`seed`"),
        ({"seed": 0.5}, TypeError, "`seed`"),
        ({"revisit": -1}, ValueError, "`revisit`"),
        ({"floor": 0}, ValueError, "`floor`"),
        ({"refill": "some"}, ValueError, "`refill`"),
        ({"threshold": float("nan")}, ValueError, "`threshold`"),
        ({"threshold": "1"}, TypeError, "`threshold`"),
        ({"estimator": "beta"}, TypeError, "PassRate"),
        ({"rule": LastGroup()}, TypeError, "Rule"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        TaskSampler(**({"task_ids": ["a", "b"]} | arguments))


def test_integers_are_ids_too() -> None:
    sampler = TaskSampler(range(3))
    sampler.observe(1, PASS)
    assert sampler.estimate(1) == sampler.estimate("1") == 1.0


def test_asking_for_too_many_or_unknown_tasks_says_so() -> None:
    sampler = TaskSampler(["a", "b"])
    with pytest.raises(ValueError, match="3 different tasks of 2"):
        sampler.sample(3)
    with pytest.raises(ValueError, match="at least 1"):
        sampler.sample(0)
    with pytest.raises(ValueError, match="unknown task 'c'"):
        sampler.observe("c", PASS)
