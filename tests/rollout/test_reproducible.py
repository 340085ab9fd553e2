from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lit_rl.curriculum import DynamicSampling
from tests.rollout.collecting import OneToken, collect, content, same, source
from tests.rollout.toys import END, Dialogue, ScriptedEngine, make_tasks, tiny_policy


@pytest.mark.parametrize("batch_size", [1, 3])
def test_trajectories_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    policy = tiny_policy()
    assert same(collect(source(), policy), collect(source(batch_size=batch_size), policy))


def test_iterations_differ_and_repeat() -> None:
    policy = tiny_policy()
    first, again = source(), source()
    both = [collect(first, policy, iteration=i) for i in range(2)]
    assert same(collect(again, policy, iteration=0), both[0])
    assert same(collect(again, policy, iteration=1), both[1])
    seeded = collect(source(seed=1), policy)
    actions = [[t.token_ids[t.action_mask].tolist() for t in sorted(found, key=str)] for found in (*both, seeded)]
    assert actions[0] != actions[1]
    assert actions[0] != actions[2]


def test_every_action_has_a_seed_of_its_own() -> None:
    engine = ScriptedEngine([5, END])
    made = source(engine=engine, tasks_per_iteration=6)
    for iteration in range(3):
        collect(made, iteration=iteration)
    assert [len(seeds) for seeds in engine.seeds] == [18] * 9
    assert len({seed for seeds in engine.seeds for seed in seeds}) == 18 * 9
    other = ScriptedEngine([5, END])
    collect(source(engine=other, tasks_per_iteration=6, seed=1))
    assert not {seed for seeds in other.seeds for seed in seeds} & {seed for seeds in engine.seeds for seed in seeds}


def test_a_task_sampled_twice_gets_two_groups_and_other_samples() -> None:
    trajectories = source().collect_tasks(
        tiny_policy(), ["task-1", "task-2", "task-1"], attempts=2, iteration=5, temperature=1.0, progress=False
    )
    assert [t.group for t in trajectories[::2]] == ["5:task-1:0", "5:task-2:0", "5:task-1:1"]
    assert [t.info["attempt"] for t in trajectories] == [0, 1, 0, 1, 2, 3]
    assert len({tuple(t.token_ids.tolist()) for t in trajectories}) == 6


def test_evaluation_does_not_repeat_the_samples_of_training() -> None:
    policy, made = tiny_policy(), source()
    ids = [t.task for t in collect(made, policy)[::3]]
    evaluated = made.collect_tasks(policy, ids, attempts=3, iteration=0, temperature=0.8, progress=False)
    assert [content(t)[1] for t in evaluated] != [content(t)[1] for t in collect(source(), policy)]


def test_environments_have_a_seed_of_their_own() -> None:
    Dialogue.log.clear()
    collect(source())
    first = sorted(environment.seed for environment in Dialogue.log)
    Dialogue.log.clear()
    collect(source(batch_size=1))
    assert len(set(first)) == 12
    assert sorted(environment.seed for environment in Dialogue.log) == first


def test_tasks_are_not_changed() -> None:
    class Greedy(OneToken):
        def reset(self, task: Any) -> Sequence[int]:
            task["number"] = task.pop("id")
            return super().reset(task)

    tasks = make_tasks(6)
    collect(source(Greedy, tasks))
    assert tasks == make_tasks(6)


def test_tasks_come_in_shuffled_passes_and_groups_are_whole() -> None:
    made, policy = source(tasks_per_iteration=3), tiny_policy()
    drawn = [[t.task for t in collect(made, policy, iteration=i)] for i in range(2)]
    assert sorted(drawn[0][::3] + drawn[1][::3]) == [f"task-{i}" for i in range(6)]
    assert all(tasks == [task for task in tasks[::3] for _ in range(3)] for tasks in drawn)


def test_the_task_sampler_learns_from_training_only() -> None:
    made, policy = source(OneToken, tasks_per_iteration=6), tiny_policy()
    made.collect_tasks(policy, ["task-0"], temperature=1.0, progress=False)
    assert set(made.task_sampler.estimates().values()) == {0.5}
    collect(made, policy)
    assert set(made.task_sampler.estimates().values()) == {1.0}


def test_dynamic_sampling_draws_further_rounds() -> None:
    made = source(OneToken, tasks_per_iteration=2, dynamic_sampling=DynamicSampling(limit=2))
    with pytest.warns(UserWarning, match="0 of 2 live groups in 2 rounds"):
        trajectories = collect(made)
    assert len({t.task for t in trajectories}) == len({t.group for t in trajectories}) == 4
    assert made.last_statistics["episodes"] == 12.0
