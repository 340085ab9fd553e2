from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from datasets import Dataset

from lit_rl.data.collate import collate
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.rollout.engine import Completion
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.testing import oracle_log_probs
from tests.rollout.collecting import OneToken, collect, content, same, source
from tests.rollout.toys import END, Chain, Dialogue, ScriptedEngine, make_tasks, tiny_policy


def test_the_sampled_ids_are_the_ids_of_environment_and_trajectory() -> None:
    Dialogue.log.clear()
    trajectories = collect(source())
    assert len(trajectories) == 12
    by_actions = {(e.task["id"], tuple(map(tuple, e.actions))): e for e in Dialogue.log}
    for trajectory in trajectories:
        ids, mask = trajectory.token_ids.tolist(), trajectory.action_mask.tolist()
        starts = [i for i in range(len(ids)) if mask[i] and not mask[i - 1]]
        assert 1 <= len(starts) <= 3  # an empty observation joins two actions
        sampled = [token for token, is_action in zip(ids, mask, strict=True) if is_action]
        matching = [
            environment
            for (task_id, actions), environment in by_actions.items()
            if task_id == trajectory.task and [*chain.from_iterable(actions)] == sampled
        ]
        assert matching
        # Prompt, action, observation, action, ... and nothing after the last action.
        rebuilt = list(Dialogue().reset(matching[0].task))
        twin = Dialogue()
        twin.reset(matching[0].task)
        for action in matching[0].actions:
            rebuilt += action
            turn = twin.step(action)
            rebuilt += [] if turn.done else list(turn.observation)
        assert ids == rebuilt


def test_log_probabilities_are_those_of_the_trajectory_alone() -> None:
    policy = tiny_policy()
    for trajectory in collect(source(), policy):
        oracle = oracle_log_probs(policy.model, trajectory)
        scored = trajectory.scored
        assert (oracle[scored] - trajectory.log_probs[scored]).abs().max().item() < 1e-5
        assert trajectory.temperature.unique().tolist() == pytest.approx([0.8])


def test_the_ratio_of_a_packed_microbatch_to_the_sampler_is_one() -> None:
    policy = tiny_policy()
    batch = collate(collect(source(), policy))
    assert (policy(batch).log_probs - batch.sampler_log_probs).abs().max().item() < 1e-5


def test_first_and_last_answer_token_are_scored() -> None:
    engine = ScriptedEngine([5, 6, 7, END])
    trajectory = collect(source(OneToken, engine=engine))[0]
    assert trajectory.token_ids.tolist() == [4, 5, 6, 7, END]
    assert trajectory.scored.tolist() == [False, True, True, True, True]
    assert trajectory.log_probs.tolist() == [0.0, -0.5, -0.5, -0.5, -0.5]


def test_several_end_tokens_end_an_action_by_id() -> None:
    policy = CausalLMPolicy(Chain({4: 5, 5: 9}))
    trajectory = collect(source(OneToken, end_ids={8, 9}), policy)[0]
    assert trajectory.token_ids.tolist() == [4, 5, 9]
    assert trajectory.num_scored == 2
    assert (trajectory.truncated, trajectory.info["stop"]) == (False, "done")


def test_end_tokens_come_from_the_model() -> None:
    policy = tiny_policy(eos_token_id=[7, 11])
    trajectories = collect(source(end_ids=None, max_new_tokens=40, max_turns=1), policy)
    ends = {t.token_ids[-1].item() for t in trajectories if not t.truncated or t.info["stop"] == "max_turns"}
    assert ends
    assert ends <= {7, 11}
    with pytest.raises(ValueError, match="names no end token"):
        collect(source(OneToken, end_ids=None), CausalLMPolicy(Chain({})))


@pytest.mark.parametrize("limit", [7, 10, 13])
def test_no_trajectory_is_longer_than_allowed(limit: int) -> None:
    policy = tiny_policy()
    trajectories = collect(source(max_trajectory_tokens=limit, end_ids=()), policy)
    assert max(map(len, trajectories)) <= limit
    cut = [t for t in trajectories if t.info["stop"] == "max_trajectory_tokens"]
    assert cut
    assert all(t.truncated for t in cut)
    # A limit does not change what was sampled before it was reached.
    whole = {content(t)[0]: [] for t in trajectories}
    for t in collect(source(end_ids=()), policy):
        whole[t.group].append(t.token_ids.tolist())
    for t in trajectories:
        assert any(long[: len(t)] == t.token_ids.tolist() for long in whole[t.group])


def test_the_context_of_the_model_is_the_default_limit() -> None:
    trajectories = collect(source(end_ids=(), max_new_tokens=30), tiny_policy(max_position_embeddings=20))
    assert {len(t) for t in trajectories} == {20}


def test_an_action_of_fixed_length_is_whole() -> None:
    for t in collect(source(OneToken, end_ids=(), max_new_tokens=1)):
        assert (t.truncated, t.info["stop"]) == (False, "done")
    # The trajectory's own limit still is one.
    cut = collect(source(OneToken, end_ids=(), max_new_tokens=9, max_trajectory_tokens=4))
    assert all(t.truncated and t.info["stop"] == "max_trajectory_tokens" for t in cut)


def test_truncation_is_a_flag_and_says_which_limit() -> None:
    ended = collect(source(OneToken, engine=ScriptedEngine([5, 6, END])))[0]
    at_limit = collect(source(OneToken, engine=ScriptedEngine([5, 6, 7], truncated=True), max_new_tokens=3))[0]
    assert (ended.truncated, ended.info["stop"]) == (False, "done")
    assert (at_limit.truncated, at_limit.info["stop"]) == (True, "max_new_tokens")
    assert at_limit.reward == 1.0  # it still counts in its group
    too_many = collect(source(engine=ScriptedEngine([5, END]), max_turns=2))[0]
    assert (too_many.truncated, too_many.info["stop"], too_many.info["turns"]) == (True, "max_turns", 2)
    assert too_many.reward == 0.0


def test_an_action_cut_in_the_middle_of_an_episode_does_not_end_it() -> None:
    class CutOnce(ScriptedEngine):
        def generate(self, *args: Any, **options: Any) -> list[Completion]:
            self.truncated = len(self.prompts) == 0
            return super().generate(*args, **options)

    trajectory = collect(source(engine=CutOnce([5], [6, END], [7, END])))[0]
    assert (trajectory.truncated, trajectory.info["stop"], trajectory.info["turns"]) == (False, "done", 3)


def test_an_episode_that_is_cut_is_worth_what_the_environment_says() -> None:
    class HalfWay(Dialogue):
        def reward_when_cut(self, reason: str) -> float | None:
            return {"max_turns": 0.25}.get(reason)

    assert collect(source(HalfWay, engine=ScriptedEngine([5, END]), max_turns=1))[0].reward == 0.25
    with pytest.raises(RuntimeError, match="no turn gave a reward"):
        collect(source(HalfWay, engine=ScriptedEngine([5, END]), max_trajectory_tokens=7))


def test_rewards_of_turns_add_up_and_extras_are_kept() -> None:
    class Stepwise(Dialogue):
        def step(self, token_ids: Sequence[int]) -> Turn:
            turn = super().step(token_ids)
            number = len(self.actions)
            return Turn(
                turn.observation, turn.done, 0.5 if number != 2 else None, {f"turn-{number}": number, "last": number}
            )

    trajectory = collect(source(Stepwise, engine=ScriptedEngine([5, END])))[0]
    assert trajectory.reward == 1.0
    assert trajectory.info == {
        "turn-1": 1, "turn-2": 2, "turn-3": 3, "last": 3, "attempt": 0, "turns": 3, "stop": "done",
    }  # fmt: skip


def test_tasks_from_a_data_set() -> None:
    policy = tiny_policy()
    tasks = Dataset.from_list(make_tasks(6))
    assert same(collect(source(tasks=tasks), policy), collect(source(), policy))


def test_other_tasks_can_be_attempted() -> None:
    held_out = [{"id": "held-out", "number": 3, "turns": 1}]
    found = source().collect_tasks(tiny_policy(), held_out, attempts=2, temperature=1.0, progress=False)
    assert [(t.task, t.info["turns"]) for t in found] == [("held-out", 1)] * 2


def test_environments_may_step_together() -> None:
    class Together:
        calls: list[int] = []  # noqa: RUF012

        def __call__(self) -> Environment:
            return Dialogue()

        def step_together(self, environments: Sequence[Environment], actions: Sequence[Sequence[int]]) -> list[Turn]:
            self.calls.append(len(actions))
            return [e.step(action) for e, action in zip(environments, actions, strict=True)]

    policy = tiny_policy()
    assert same(collect(source(Together()), policy), collect(source(), policy))
    assert Together.calls == [12, 12, 12]


def test_a_batch_of_environments_that_fails_is_named() -> None:
    class Together:
        def __call__(self) -> Environment:
            return Dialogue()

        def step_together(self, environments: Any, actions: Any) -> list[Turn]:
            return [Turn()]

    with pytest.raises(RuntimeError, match=r"turn 1: ValueError: `step_together` returned 1 turns for 12 episodes"):
        collect(source(Together()))


def test_an_engine_is_given_the_weights_before_each_collection() -> None:
    class Remote(ScriptedEngine):
        seen: list[CausalLMPolicy] = []  # noqa: RUF012

        def synchronize(self, policy: CausalLMPolicy) -> None:
            assert not self.prompts
            self.seen.append(policy)

    policy = tiny_policy()
    engine = Remote([5, END])
    collect(source(engine=engine), policy)
    assert engine.seen == [policy]


def test_statistics_count_every_token() -> None:
    made = source()
    trajectories = collect(made)
    found = made.last_statistics
    assert found["episodes"] == 12.0
    assert found["turns"] == sum(t.info["turns"] for t in trajectories) == 36.0
    assert found["generated_tokens"] == sum(t.num_scored for t in trajectories)
    assert found["prompt_tokens"] == sum(t.action_mask.tolist().index(True) for t in trajectories)
    tokens = sum(map(len, trajectories))
    assert found["prompt_tokens"] + found["generated_tokens"] + found["observation_tokens"] == tokens
    assert found["truncated_episodes"] == sum(t.truncated for t in trajectories)
    assert 0 < found["generation_seconds"] <= found["seconds"]
    assert found["tokens_per_second"] == found["generated_tokens"] / found["seconds"]


def test_one_warning_when_everything_is_cut() -> None:
    made = source(engine=ScriptedEngine([5, 6, 7], truncated=True), max_turns=1)
    with pytest.warns(UserWarning, match=r"all 12 trajectories were cut by a limit \(12 by max_turns=1\) .* 0.0"):
        collect(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collect(made, iteration=1)
        collect(source(OneToken, engine=ScriptedEngine([5])))


def test_a_progress_bar_counts_finished_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    policy = tiny_policy()
    collect(source(), policy, progress=True)
    shown = capsys.readouterr().err
    assert "rollouts" in shown
    assert "/12" in shown
    collect(source(), policy, progress=False)
    assert capsys.readouterr().err == ""
