from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lit_rl.rollout.collect import rollouts
from lit_rl.rollout.engine import Completion
from lit_rl.rollout.environment import Turn
from tests.rollout.collecting import OneToken, collect, same, source
from tests.rollout.toys import Dialogue, ScriptedEngine, make_tasks, tiny_policy


class Planted(Dialogue):
    """Fails for one task in a chosen place."""

    def reset(self, task: Any) -> Sequence[int]:
        self.fails = task.get("fails") if task["id"] == "task-1" else None
        if self.fails == "reset":
            raise OSError("no sandbox")
        if self.fails == "text":
            return "a prompt"  # type: ignore[return-value]
        if self.fails == "empty":
            return []
        if self.fails == "long":
            return [3] * 50
        return super().reset(task)

    def step(self, token_ids: Sequence[int]) -> Turn:
        turn = super().step(token_ids)
        if self.fails is None or len(self.actions) < 2:
            return turn
        planted: dict[str, Any] = {
            "none": None,
            "observation": Turn("text"),  # type: ignore[arg-type]
            "done": Turn(done=1),  # type: ignore[arg-type]
            "infinite": Turn(done=True, reward=math.inf),
            "replaced": self.replaced(),
            "missing": Turn(done=True),
            "reserved": Turn(info={"stop": "now"}),
            "json": Turn(info={"tensor": torch.ones(1)}),
        }
        if self.fails == "refused":
            return Turn(done=True, reward="1.0")  # type: ignore[arg-type]
        if self.fails == "listed":
            return Turn(info=["a"])  # type: ignore[arg-type]
        if self.fails == "step":
            raise ZeroDivisionError("by zero")
        return planted.get(self.fails, turn)

    def replaced(self) -> Turn:
        turn = Turn(done=True, reward=1.0)
        turn.reward = "1.0"  # type: ignore[assignment]
        return turn

    def reward_when_cut(self, reason: str) -> Any:
        return "0.0" if getattr(self, "fails", None) == "cut" else 0.0

    def close(self) -> None:
        super().close()
        if getattr(self, "fails", None) == "close":
            raise OSError("no container")


PLANTED = {
    "reset": r"task 'task-1', attempt 0, reset: OSError: no sandbox",
    "text": r"reset: TypeError: the prompt is 'a prompt', expected a sequence of token ids",
    "empty": r"reset: ValueError: the prompt is empty",
    "long": r"reset: ValueError: the prompt has 50 tokens and leaves no room within 40",
    "step": r"task 'task-1', attempt 0, turn 2: ZeroDivisionError: by zero",
    "none": r"turn 2: TypeError: `step` returned None, expected a `Turn`",
    "observation": r"turn 2: TypeError: the observation is 'text'",
    "done": r"turn 2: TypeError: `Turn.done` is 1",
    "infinite": r"turn 2: ValueError: the reward is inf",
    "refused": r"turn 2: TypeError: `Turn.reward` is '1.0', expected a number or None",
    "replaced": r"turn 2: TypeError: the reward is '1.0'; expected a number, or None where there is none",
    "listed": r"turn 2: TypeError: `Turn.info` is \['a'\], expected a dict or None",
    "missing": r"turn 2: ValueError: the episode is over and no turn gave a reward",
    "reserved": r"turn 2: ValueError: `Turn.info` has the keys \['stop'\]",
    "json": r"turn 2: TypeError: `Turn.info` must hold JSON-like values",
    "close": r"task 'task-1', attempt 0, close: OSError: no container",
}


@pytest.mark.parametrize("fails", PLANTED)
def test_an_error_names_task_and_turn_and_closes_every_environment(fails: str) -> None:
    Dialogue.log.clear()
    made = source(Planted, make_tasks(4, fails=fails), max_trajectory_tokens=40)
    with pytest.raises(RuntimeError, match=PLANTED[fails]):
        collect(made)
    opened = [environment for environment in Dialogue.log if hasattr(environment, "task")]
    assert opened
    assert {environment.closed for environment in opened} == {1}


@pytest.mark.parametrize("fails", PLANTED)
def test_an_error_leaves_an_unscored_trajectory_where_that_is_allowed(fails: str) -> None:
    policy = tiny_policy()
    made = source(Planted, make_tasks(4, fails=fails), max_trajectory_tokens=40, errors="unscored")
    trajectories = collect(made, policy)
    failed = [t for t in trajectories if t.task == "task-1"]
    assert len(failed) == 3
    for trajectory in failed:
        assert math.isnan(trajectory.reward)
        assert PLANTED[fails].split(": ")[-1].replace("\\", "")[:12] in trajectory.info["error"]
        assert len(trajectory) == 1 or trajectory.info["turns"] >= 2
        assert (trajectory.num_scored == 0) == (PLANTED[fails].find("reset") >= 0)
    healthy = collect(source(Planted, make_tasks(4), max_trajectory_tokens=40), policy)
    assert same([t for t in trajectories if t not in failed], [t for t in healthy if t.task != "task-1"])
    assert made.last_statistics["unscored_episodes"] == 3.0


def test_a_missing_reward_keeps_the_truncation_flag() -> None:
    tasks = make_tasks(6, reward=None)
    made = source(OneToken, tasks, engine=ScriptedEngine([5], truncated=True), max_new_tokens=1, errors="unscored")
    trajectory = collect(made)[0]
    assert math.isnan(trajectory.reward)
    assert (trajectory.truncated, trajectory.info["stop"]) == (True, "max_new_tokens")


def test_a_reward_of_a_cut_episode_is_checked_like_any_other() -> None:
    with pytest.raises(RuntimeError, match=r"task 'task-1', attempt 0, turn 1: TypeError: the reward is '0.0'"):
        collect(source(Planted, make_tasks(4, fails="cut"), max_turns=1))


@pytest.mark.parametrize("one", [1, True, np.float32(1), np.bool_(True), torch.tensor(1), torch.tensor([1.0])])
@pytest.mark.parametrize("done", [True, np.bool_(True), torch.tensor(True)])
def test_a_turn_takes_anybodys_numbers_and_flags(one: Any, done: Any) -> None:
    class Judge(OneToken):
        def step(self, token_ids: Sequence[int]) -> Turn:
            return Turn(done=done, reward=one, info=None)

    assert Turn(reward=one).reward == 1.0
    assert Turn(info=None).info == {}
    assert {(t.reward, t.info["stop"]) for t in collect(source(Judge, engine=ScriptedEngine([5])))} == {(1.0, "done")}


@pytest.mark.parametrize("reward", ["1.0", b"1", [1.0], np.array([1.0, 2.0]), torch.ones(2), np.str_("1"), object()])
def test_a_reward_that_is_no_number_is_refused_at_construction(reward: Any) -> None:
    with pytest.raises(TypeError, match=r"`Turn.reward` is .*, expected a number or None"):
        Turn(reward=reward)


def test_a_factory_that_makes_something_else_is_refused() -> None:
    with pytest.raises(RuntimeError, match="reset: TypeError: `environment` made <object"):
        collect(source(object))


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (Completion([], [], False), "got 0 ids and 0 log-probabilities; expected 1 to 6"),
        (Completion([3] * 7, [-1.0] * 7, False), "got 7 ids and 7 log-probabilities"),
        (Completion([3, 4], [-1.0], False), "got 2 ids and 1 log-probabilities"),
        (
            Completion([3], None, False),
            r"Completion\(.*\) has no \['log_probs'\]; expected a `Completion` with one log-",
        ),
        (Completion([3, 4], [-1.0, None], False), r"`log_probs`\[1\] is None, expected a number"),
        (Completion([3], [-1.0], "length"), "`truncated` is 'length', expected True or False"),
        (Completion([3.5], [-1.0], False), "`token_ids` holds 3.5, expected integers"),
        (Completion([99], [-1.0], False), "`token_ids` holds the id 99; expected 0 to 31"),
        ({"token_ids": [3]}, r"has no \['token_ids', 'log_probs', 'truncated'\]"),
    ],
)
def test_an_engine_that_breaks_the_rules_is_named(completion: Any, message: str) -> None:
    class Careless(ScriptedEngine):
        def generate(self, prompts: Any, **_: Any) -> list[Completion]:
            return [completion] * len(prompts)

    where = r"`Careless.generate` for prompt 0 \(task 'task-\d', attempt 0, turn 1\): "
    with pytest.raises((TypeError, ValueError), match=where + f".*{message}"):
        collect(source(engine=Careless()))


@pytest.mark.parametrize(
    "kind", [tuple, np.array, torch.tensor, lambda values: [np.asarray(value) for value in values]]
)
def test_an_engine_may_answer_in_arrays(kind: Any) -> None:
    class Arrays(ScriptedEngine):
        def generate(self, *args: Any, **options: Any) -> list[Completion]:
            found = super().generate(*args, **options)
            return [Completion(kind(c.token_ids), kind(c.log_probs), np.bool_(c.truncated)) for c in found]

    # Several turns, so that later ones are appended to earlier ones.
    assert same(collect(source(engine=Arrays([5, 6]))), collect(source(engine=ScriptedEngine([5, 6]))))


def test_an_engine_that_loses_prompts_is_named() -> None:
    class Lossy(ScriptedEngine):
        def generate(self, *args: Any, **options: Any) -> list[Completion]:
            return super().generate(*args, **options)[1:]

    with pytest.raises(ValueError, match="returned 11 completions for 12 prompts"):
        collect(source(engine=Lossy([3])))


def test_positive_log_probabilities_are_refused_by_name() -> None:
    class Odd(ScriptedEngine):
        def generate(self, *args: Any, **options: Any) -> list[Completion]:
            return [
                Completion(c.token_ids, [0.5] * len(c.token_ids), False) for c in super().generate(*args, **options)
            ]

    with pytest.raises(ValueError, match=r"task 'task-\d'.*`log_probs`\[1\] is 0.5"):
        collect(source(OneToken, engine=Odd([5])))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"group_size": 1}, ValueError, "`group_size` must be at least 2, got 1"),
        ({"tasks_per_iteration": 7}, ValueError, "`tasks_per_iteration` is 7, but there are 6 tasks"),
        ({"tasks_per_iteration": 0}, ValueError, "at least 1"),
        ({"max_new_tokens": 0}, ValueError, "`max_new_tokens` must be at least 1"),
        ({"max_turns": 1.5}, TypeError, "`max_turns` must be an integer, got 1.5"),
        ({"max_trajectory_tokens": 1}, ValueError, "`max_trajectory_tokens` must be at least 2"),
        ({"errors": "ignore"}, ValueError, '`errors` must be "raise" or "unscored"'),
        ({"seed": -1}, ValueError, "`seed` must be at least 0"),
        ({"end_ids": "</s>"}, TypeError, "`end_ids` must be a collection"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
        ({"tasks": []}, ValueError, "`tasks` is empty"),
        ({"tasks": {"id": "a"}}, TypeError, "`tasks` must be a sequence of mappings, got dict"),
        ({"tasks": [{"number": 1}]}, ValueError, r"task 0 has no 'id' \(found \['number'\]\)"),
        ({"tasks": [{"id": 3}]}, TypeError, "task 0 has the id 3, expected a string"),
        ({"tasks": [{"id": "a"}, {"id": "b"}, {"id": "a"}]}, ValueError, "tasks 0 and 2 both have the id 'a'"),
        ({"tasks": ["a"]}, TypeError, "task 0 is a str, expected a mapping"),
        ({"environment": Dialogue()}, TypeError, "expected a callable that makes a fresh environment"),
        ({"environment": None}, TypeError, "`environment` is None"),
    ],
)
def test_bad_arguments_are_refused_at_construction(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        source(**({"tasks_per_iteration": 1} | options))


def test_settings_of_the_default_engine_do_not_go_with_another() -> None:
    with pytest.raises(ValueError, match="belong to the default engine"):
        rollouts(OneToken, make_tasks(8), engine=ScriptedEngine([1]), end_ids=[2])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "`temperature` must be finite and greater than 0"),
        ({"iteration": -1}, ValueError, "`iteration` must be at least 0"),
        ({"rank": 2, "world_size": 2}, ValueError, "`rank` is 2 of `world_size` 2"),
    ],
)
def test_bad_calls_are_refused(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collect(source(), **options)


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="no task with the id 'nine'"):
        source().collect_tasks(tiny_policy(), ["nine"], temperature=1.0)
