"""What excludes a task, and what must not: missing outcomes, rewards that never reach the threshold, own estimators."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_rl.curriculum import BetaPosterior, DynamicSampling, Interval, PassRate, TaskSampler, Uniform, Variance
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.trajectory import Trajectory
from tests.rollout.collecting import collect, source
from tests.rollout.toys import tiny_policy

IDS = [f"task-{number}" for number in range(6)]


def attempt(reward: float, **info: Any) -> Trajectory:
    return Trajectory([1, 2], [0, 1], reward, task="a", group="0:a", info=info)


# --- outcomes that are missing or no numbers ----------------------------------------------------------------------


def test_an_attempt_without_an_outcome_beside_others_is_not_passed() -> None:
    sampler = TaskSampler(["a"])
    sampler.observe_trajectories([attempt(1.0, outcome=1.0), attempt(2.0), attempt(0.1), attempt(1.0, outcome=True)])
    assert sampler.estimate("a") == 0.5
    assert sampler.observe("a", [0.3, 0.2], outcomes=[0.0, None]) == "all_fail"


def test_an_outcome_that_is_no_number_warns_once_and_counts_as_missing() -> None:
    sampler = TaskSampler(["a"])
    odd = [attempt(1.0, outcome="solved"), attempt(0.0, outcome=float("inf")), attempt(0.0, outcome=[1.0])]
    with pytest.warns(UserWarning, match=r"`info\[\"outcome\"\]` of task 'a' is 'solved'") as caught:
        sampler.observe_trajectories(odd)
    assert len(caught) == 1
    assert sampler.estimate("a") == pytest.approx(1 / 3)  # by reward, as no outcome is usable


class EndsSometimes(Environment):
    """Gives its outcome when it ends, which a limit of turns may prevent."""

    def reset(self, task: Any) -> list[int]:
        return [1, 5]

    def step(self, token_ids: Any) -> Turn:
        done = sum(token_ids) % 2 == 0
        return Turn([] if done else [4], done=done, reward=0.05, info={"outcome": 1.0} if done else {})


def test_a_truncated_episode_without_its_outcome_does_not_stop_a_rollout() -> None:
    trajectories = collect(source(EndsSometimes, max_new_tokens=3, max_turns=2, group_size=6), tiny_policy())
    assert {"outcome" in trajectory.info for trajectory in trajectories} == {True, False}


# --- rewards that never reach the threshold -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"rule": Interval()}, {"rule": Variance()}, {"estimator": BetaPosterior(), "rule": Interval(0.05, 0.95)}],
)
@pytest.mark.parametrize("rewards", [[0.5, 1 / 6, 1 / 3, 0.5], [1.5, 2.0, 1.0, 1.0]])
def test_a_group_whose_rewards_differ_is_never_certain(options: dict, rewards: list[float]) -> None:
    sampler = TaskSampler(IDS, revisit=0, **options)
    for iteration in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = sampler.sample(6, iteration=iteration)
        assert sorted(drawn) == IDS
        for task_id in drawn:
            assert sampler.observe(task_id, rewards) == "live"
    assert sampler.metrics()["pool_size"] == 6


def test_half_a_pass_stands_between_none_and_one() -> None:
    sampler = TaskSampler(["a", "b", "c", "d"])
    sampler.observe("a", [0.0] * 4)
    sampler.observe("b", [0.5] * 4)
    sampler.observe("c", [0.5, 0.1, 0.0, 0.0])
    sampler.observe("d", [1.0, 0.1, 0.0, 0.0])
    assert sampler.estimates() == {"a": 0.0, "b": 0.0, "c": 0.125, "d": 0.25}


def test_outcomes_still_say_that_a_shaped_group_is_hopeless() -> None:
    sampler = TaskSampler(IDS, rule=Interval(), revisit=0)
    sampler.observe(IDS[0], [0.1, 0.0], outcomes=[0, 0])
    assert sorted(sampler.sample(6)) == IDS[1:]


def messages_of(rewards: list[list[float]], **options: Any) -> list[str]:
    """Warnings of a run whose iterations have one group of two tasks each."""
    sampler = TaskSampler(["a", "b"], **({"rule": Interval()} | options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration, values in enumerate([*rewards, [1.0, 0.0]]):
            for task_id in sampler.sample(2, iteration=iteration):
                sampler.observe(task_id, values)
    return [str(warning.message) for warning in caught]


def test_a_threshold_that_no_attempt_reaches_is_named_once() -> None:
    (message,) = messages_of([[0.5, 0.2]] * 3)
    assert "no attempt of iteration 0 reached threshold=1, although the rewards differ in 2 of 2 groups" in message
    assert 'info["outcome"]' in message
    assert messages_of([[0.5, 0.2]] * 3, threshold=0.4) == []
    assert messages_of([[0.5, 0.2]] * 3, rule=Uniform()) == []
    assert messages_of([[0.5, 0.2]] * 3, threshold=0.5) == []


# --- estimators of one's own --------------------------------------------------------------------------------------


class Best(PassRate):
    """As the documentation of `PassRate` shows one: no `repr`, so Python prints an address."""

    width = 1

    def __init__(self, least: float = 0.0, cache: object = None) -> None:
        self.least, self._cache, self.table = least, cache, np.zeros(3)

    def update(self, state: Any, passes: float, attempts: int, age: int) -> Any:
        return np.maximum(state, max(self.least, passes / attempts))

    def value(self, states: Any, ages: Any) -> Any:
        return states[:, 0]


def stored(estimator: PassRate) -> dict[str, Any]:
    sampler = TaskSampler(["a", "b"], estimator=estimator)
    sampler.observe("a", [1.0, 1.0, 0.0, 0.0])
    return sampler.state_dict()


def test_an_own_estimator_is_known_again() -> None:
    sampler = TaskSampler(["a", "b"], estimator=Best(cache=object()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler.load_state_dict(stored(Best()))
    assert sampler.estimates() == {"a": 0.5, "b": 0.5}
    assert sampler.metrics()["estimates/unseen"] == 0.5


def test_an_own_estimator_is_known_again_in_another_process(tmp_path: Path) -> None:
    torch.save(stored(Best()), tmp_path / "state.pt")
    program = f"""
import torch
from lit_rl.curriculum import TaskSampler
from {Best.__module__} import Best
sampler = TaskSampler(["a", "b"], estimator=Best())
sampler.load_state_dict(torch.load({str(tmp_path / "state.pt")!r}, weights_only=True))
print(sampler.metrics()["estimates/unseen"])
"""
    command, root = [sys.executable, "-W", "error::UserWarning:lit_rl", "-c", program], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=True)
    assert done.stdout.strip() == "0.5"


class Wider(Best):
    width = 2


@pytest.mark.parametrize("other", [Best(least=0.1), Wider()], ids=["parameter", "class"])
def test_other_parameters_and_other_classes_start_afresh(other: PassRate) -> None:
    sampler = TaskSampler(["a", "b"], estimator=other)
    with pytest.warns(UserWarning, match="every task starts unobserved again"):
        sampler.load_state_dict(stored(Best()))
    assert sampler.metrics()["estimates/unseen"] == 1.0


def test_a_state_of_another_width_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    state = stored(Best())
    monkeypatch.setattr(Best, "width", 3)
    sampler = TaskSampler(["a", "b"], estimator=Best())
    with pytest.warns(UserWarning, match="of width 1, .* of width 3"):
        sampler.load_state_dict(state)
    assert sampler.metrics()["estimates/unseen"] == 1.0


# --- a second run -------------------------------------------------------------------------------------------------


def test_an_ended_iteration_is_no_further_round_and_evidence_goes_on_aging() -> None:
    sampler = TaskSampler(IDS, estimator=BetaPosterior(memory=0.5))
    for iteration in range(4):
        for task_id in sampler.sample(2, iteration=iteration):
            sampler.observe(task_id, [1.0, 1.0])
    sampler.end_iteration()
    assert sampler.metrics()["episodes_sampled"] == 16
    for wanted in (0, 1):
        rounds = list_rounds(sampler, wanted)
        assert (sampler.clock, sampler.iteration) == (4 + wanted, wanted)
        assert sampler.report.rounds == len(rounds)
        assert sampler.metrics()["tasks_drawn"] == sum(map(len, rounds))
    # A run that goes on counting where the first one stopped leaves no gap.
    sampler.end_iteration()
    sampler.sample(2, iteration=2)
    assert (sampler.clock, sampler.iteration) == (6, 2)


def list_rounds(sampler: TaskSampler, iteration: int) -> list[list[str]]:
    rounds = []
    for task_ids in DynamicSampling(limit=2).rounds(sampler, 2, iteration=iteration):
        rounds.append(task_ids)
        for task_id in task_ids:
            sampler.observe(task_id, [1.0, 0.0] if len(rounds) == 2 else [1.0, 1.0])
    return rounds


def test_the_shift_of_a_second_run_is_kept() -> None:
    sampler = TaskSampler(IDS)
    sampler.sample(2, iteration=3)
    sampler.end_iteration()
    other = TaskSampler(IDS)
    other.load_state_dict(sampler.state_dict())
    assert other.sample(2, iteration=0) == sampler.sample(2, iteration=0)
    last = TaskSampler(IDS)
    last.load_state_dict(sampler.state_dict())
    last.sample(2, iteration=1)
    assert (other.clock, last.clock) == (4, 5)
