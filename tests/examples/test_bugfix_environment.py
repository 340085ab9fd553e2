from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.bugfix.environment import MAX_TURN_TOKENS, MAX_TURNS, BugFixEnvironment
from examples.bugfix.tasks import BugFixTask, bugfix_tasks, practice_tasks
from examples.bugfix.tokenizer import ACT, LINE_LABELS, VOCABULARY, WordTokenizer

TOKENIZER = WordTokenizer()
TASK = BugFixTask(
    id="by-hand",
    family="operator",
    comments=["a minus 5", "times b"],
    program=["r = a * 5", "r = r * b"],
    reference=["r = a - 5", "r = r * b"],
    visible_test={"inputs": {"a": 1, "b": 3, "c": 9}, "want": -12},
    visible_trace=[-4, -12],
    hidden_tests=[
        {"inputs": {"a": 7, "b": 2, "c": 1}, "want": 4},
        {"inputs": {"a": 5, "b": 8, "c": 3}, "want": 0},
    ],
)


def play(environment: BugFixEnvironment, words: str) -> tuple[str, bool, float | None]:
    turn = environment.step(TOKENIZER.encode(words))
    return TOKENIZER.decode(turn.observation), turn.done, turn.reward


@pytest.fixture
def environment() -> BugFixEnvironment:
    environment = BugFixEnvironment()
    environment.reset(TASK)
    return environment


def test_prompt_shows_comment_and_line_in_turn() -> None:
    prompt = BugFixEnvironment().reset(TASK)
    assert TOKENIZER.decode(prompt) == "a minus 5 L1 r = a * 5 times b L2 r = r * b <act>"


def test_run_edit_run_submit_is_rewarded(environment: BugFixEnvironment) -> None:
    assert play(environment, "run <end>") == ("L1 want - 4 got 5 <act>", False, None)
    assert play(environment, "edit L1 r = a - 5 <end>") == ("L1 r = a - 5 L2 r = r * b <act>", False, None)
    assert play(environment, "run <end>") == ("pass <act>", False, None)
    assert play(environment, "submit <end>") == ("", True, 1.0)


def test_immediate_submit_earns_nothing(environment: BugFixEnvironment) -> None:
    assert play(environment, "submit <end>") == ("", True, 0.0)


def test_passing_the_visible_test_is_not_enough(environment: BugFixEnvironment) -> None:
    play(environment, "edit L1 r = 0 - 4 <end>")
    assert play(environment, "run <end>")[0] == "pass <act>"
    assert play(environment, "submit <end>") == ("", True, 0.0)


def test_another_right_program_is_rewarded(environment: BugFixEnvironment) -> None:
    play(environment, "edit L1 repeat 5 : a = a - 1 <end>")
    play(environment, "edit L2 r = a * b <end>")
    assert play(environment, "submit <end>") == ("", True, 1.0)


@pytest.mark.parametrize(
    ("line", "observation"),
    [
        ("r = a - b", "L1 want - 4 got - 2 <act>"),
        ("r = a / c", "L1 want - 4 got 0 <act>"),
        ("r = a / r", "L1 want - 4 got zero <act>"),
        ("while a > 0 : r = 1", "L1 want - 4 got limit <act>"),
        ("repeat 9 : a = a * 9", "L1 want - 4 got huge <act>"),
    ],
)
def test_run_names_the_line_and_what_it_left(environment: BugFixEnvironment, line: str, observation: str) -> None:
    play(environment, f"edit L1 {line} <end>")
    assert play(environment, "run <end>")[0] == observation


def test_run_finds_a_bug_behind_a_right_line(environment: BugFixEnvironment) -> None:
    play(environment, "edit L1 r = a - 5 <end>")
    play(environment, "edit L2 r = r + b <end>")
    assert play(environment, "run <end>")[0] == "L2 want - 1 2 got - 1 <act>"


@pytest.mark.parametrize(
    "words",
    [
        "run",
        "run run <end>",
        "<end>",
        "submit",
        "submit submit <end>",
        "edit <end>",
        "edit L1 <end>",
        "edit L3 r = a <end>",
        "edit r = a - 5 <end>",
        "edit L1 r = a -",
        "edit L1 r = a - <end>",
        "edit L1 L2 <end>",
        "<pad> <act>",
    ],
)
def test_other_turns_are_errors_and_change_nothing(environment: BugFixEnvironment, words: str) -> None:
    assert play(environment, words) == ("error <act>", False, None)
    assert play(environment, "run <end>")[0] == "L1 want - 4 got 5 <act>"


def test_last_turn_ends_the_episode_without_reward() -> None:
    environment = BugFixEnvironment(max_turns=3)
    environment.reset(TASK)
    play(environment, "edit L1 r = a - 5 <end>")
    play(environment, "run <end>")
    assert play(environment, "run <end>") == ("", True, 0.0)
    environment.reset(TASK)
    play(environment, "edit L1 r = a - 5 <end>")
    play(environment, "run <end>")
    assert play(environment, "submit <end>") == ("", True, 1.0)


def test_reset_forgets_the_last_episode(environment: BugFixEnvironment) -> None:
    play(environment, "edit L1 r = a - 5 <end>")
    environment.reset(TASK)
    assert play(environment, "run <end>")[0] == "L1 want - 4 got 5 <act>"
    assert TASK["program"] == ["r = a * 5", "r = r * b"]


def test_max_turns_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="`max_turns` 0"):
        BugFixEnvironment(max_turns=0)


@pytest.mark.parametrize("seed", [0, 1])
def test_reference_edit_solves_every_task_within_the_turn_limit(seed: int) -> None:
    training, held_out = bugfix_tasks(seed)
    for task in [*training, *held_out, *practice_tasks(100, seed)]:
        environment = BugFixEnvironment()
        environment.reset(task)
        index = next(i for i, line in enumerate(task["program"]) if line != task["reference"][i])
        edit = TOKENIZER.encode(f"edit {LINE_LABELS[index]} {task['reference'][index]} <end>")
        assert len(edit) <= MAX_TURN_TOKENS
        environment.step(edit)
        assert play(environment, "run <end>")[0] == "pass <act>"
        assert play(environment, "submit <end>") == ("", True, 1.0)


turns = st.one_of(
    st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=MAX_TURN_TOKENS),
    st.sampled_from(["run <end>", "edit L1 r = a - 5 <end>", "edit L2 while 1 > 0 : r = 1 <end>"]).map(
        TOKENIZER.encode
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(turns, min_size=MAX_TURNS, max_size=MAX_TURNS))
def test_any_ids_lead_to_an_answer_or_the_end(actions: list[list[int]]) -> None:
    environment = BugFixEnvironment()
    environment.reset(TASK)
    for number, action in enumerate(actions, start=1):
        turn = environment.step(action)
        if turn.done:
            assert turn.reward in (0.0, 1.0)
            break
        assert number < MAX_TURNS
        assert TOKENIZER.decode(turn.observation).split()[-1] == ACT
