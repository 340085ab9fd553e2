from __future__ import annotations

from collections import Counter
from statistics import median

import pytest

from examples.bugfix.demonstrations import SCRIPTS, demonstrations
from examples.bugfix.environment import MAX_EPISODE_TOKENS, MAX_TURN_TOKENS, MAX_TURNS, BugFixEnvironment
from examples.bugfix.tasks import practice_tasks
from examples.bugfix.tokenizer import WordTokenizer
from lit_rl.trajectory import Trajectory

TOKENIZER = WordTokenizer()
TASKS = practice_tasks(600)


@pytest.fixture(scope="module")
def demos() -> list[Trajectory]:
    return demonstrations(TASKS)


def actions_of(trajectory: Trajectory) -> list[list[int]]:
    actions: list[list[int]] = []
    inside = False
    for token_id, is_action in zip(trajectory.token_ids.tolist(), trajectory.action_mask.tolist(), strict=True):
        if is_action and not inside:
            actions.append([])
        if is_action:
            actions[-1].append(token_id)
        inside = is_action
    return actions


def test_replaying_the_masked_tokens_gives_the_same_episode(demos: list[Trajectory]) -> None:
    for task, demo in zip(TASKS, demos, strict=True):
        environment = BugFixEnvironment()
        token_ids, reward = list(environment.reset(task)), None
        assert not demo.action_mask[: len(token_ids)].any()
        for action in actions_of(demo):
            turn = environment.step(action)
            token_ids += [*action, *turn.observation]
            reward = turn.reward
        assert token_ids == demo.token_ids.tolist()
        assert reward == demo.reward
        assert demo.task == task["id"]


def test_turns_end_with_the_end_token_and_keep_the_limits(demos: list[Trajectory]) -> None:
    for demo in demos:
        actions = actions_of(demo)
        assert len(demo) <= MAX_EPISODE_TOKENS
        assert len(actions) <= MAX_TURNS
        for action in actions:
            assert len(action) <= MAX_TURN_TOKENS
            assert action.index(TOKENIZER.end_id) == len(action) - 1


def test_scripts_are_shares_of_valid_episodes() -> None:
    assert sum(SCRIPTS.values()) == pytest.approx(1.0)
    assert all(script[-1] == "submit" and len(script) <= MAX_TURNS for script in SCRIPTS)


def test_demonstrations_are_imperfect_and_long_tailed(demos: list[Trajectory]) -> None:
    immediate = sum(demo.info["script"] == "submit" for demo in demos) / len(demos)
    assert 0.45 < immediate < 0.65
    assert 0.2 < sum(demo.reward for demo in demos) / len(demos) < 0.45
    lengths = [len(demo) for demo in demos]
    assert min(lengths) < 15
    assert median(lengths) < 30
    assert max(lengths) > 100


def test_only_fixed_programs_are_rewarded(demos: list[Trajectory]) -> None:
    rewards: dict[bool, Counter[float]] = {True: Counter(), False: Counter()}
    for demo in demos:
        rewards["fix" in demo.info["script"].split()][demo.reward] += 1
    assert set(rewards[True]) == {1.0}
    # A wrong edit may happen to be right on all inputs; nothing else passes.
    assert rewards[False][1.0] < 0.05 * rewards[False][0.0]


def test_seed_decides_the_scripts() -> None:
    first, again, other = (demonstrations(TASKS[:50], seed) for seed in (1, 1, 2))
    assert [demo.token_ids.tolist() for demo in first] == [demo.token_ids.tolist() for demo in again]
    assert [demo.token_ids.tolist() for demo in first] != [demo.token_ids.tolist() for demo in other]
