from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lit_rl.rollout.collect import rollouts
from lit_rl.rollout.rewards import SingleTurn
from lit_rl.trajectory import Trajectory
from tests.rollout.toys import END, ScriptedEngine, make_tasks, tiny_policy

VOCABULARY = {"<unk>": 0, "<s>": 1, "<end>": 2, "ab": 3, "a": 4, "b": 5, "c": 6, "user": 7, "assistant": 8}


def tokenizer() -> PreTrainedTokenizerFast:
    """The text "ab" is one token, although the ids of "a" and "b" decode to it too."""
    backend = Tokenizer(models.WordPiece(VOCABULARY, unk_token="<unk>", continuing_subword_prefix=""))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="<end>")
    made.chat_template = (
        "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    return made


def attempt(adapter: SingleTurn, tasks: list[dict], *action: int, **options: Any) -> list[Trajectory]:
    source = rollouts(adapter, tasks, engine=ScriptedEngine(list(action)), **({"tasks_per_iteration": 1} | options))
    return source.collect_tasks(tiny_policy(), [t["id"] for t in tasks], attempts=2, temperature=1.0, progress=False)


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_trained_ids_are_the_sampled_ids_although_their_text_encodes_differently() -> None:
    made = tokenizer()
    assert made("ab")["input_ids"] == [3]
    assert made.decode([4, 5]) == "ab"
    seen: list[tuple[str, list[int]]] = []

    def reward(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
        seen.extend(zip(completions, completion_ids, strict=True))
        return [1.0] * len(completions)

    trajectory = attempt(SingleTurn(reward, made), make_tasks(1, prompt="c ab"), 4, 5, END)[0]
    assert trajectory.token_ids.tolist() == [6, 3, 4, 5, END]
    assert trajectory.action_mask.tolist() == [False, False, True, True, True]
    assert seen[0] == ("ab", [4, 5, END])
    assert trajectory.info["completion"] == "ab"


def test_each_answer_is_decoded_once_and_each_function_called_once() -> None:
    made, calls = tokenizer(), []
    decode = made.decode
    made.decode = lambda ids, **options: (calls.append("decode"), decode(ids, **options))[1]  # type: ignore[method-assign]

    def first(completions: list[str], **_: Any) -> list[float]:
        calls.append(f"first {len(completions)}")
        return [0.0] * len(completions)

    def second(completions: list[str], **_: Any) -> list[float]:
        calls.append(f"second {len(completions)}")
        return [0.0] * len(completions)

    attempt(SingleTurn([first, second], made), make_tasks(3, prompt="c"), 4, END)
    assert calls == ["decode"] * 6 + ["first 6", "second 6"]


def test_columns_are_aligned_lists_and_functions_get_what_they_ask_for() -> None:
    got: dict[str, Any] = {}

    def everything(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        got.update(columns, prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    def little(number: list[int]) -> list[float]:
        return [float(n) for n in number]

    tasks = [{**task, "prompt": text} for task, text in zip(make_tasks(2), ["a", "c"], strict=True)]
    trajectories = attempt(SingleTurn([everything, little], tokenizer()), tasks, 5, END)
    assert got == {
        "prompts": ["a", "a", "c", "c"],
        "completions": ["b"] * 4,
        "prompt_ids": [[4], [4], [6], [6]],
        "completion_ids": [[5, END]] * 4,
        "id": ["task-0", "task-0", "task-1", "task-1"],
        "number": [0, 0, 1, 1],
    }
    assert [t.reward for t in trajectories] == [0.0, 0.0, 1.0, 1.0]


def test_messages_go_through_the_chat_template() -> None:
    got: list[Any] = []

    def reward(prompts: Any, completions: Any) -> list[float]:
        got.extend(zip(prompts, completions, strict=True))
        return [1.0] * len(prompts)

    messages = [{"role": "user", "content": "c"}]
    trajectory = attempt(SingleTurn(reward, tokenizer()), make_tasks(1, prompt=messages), 4, END)[0]
    assert trajectory.token_ids.tolist() == [7, 6, 8, 4, END]
    assert got[0] == (messages, [{"role": "assistant", "content": "a"}])


@pytest.mark.parametrize("prompt", [[4, 5], torch.tensor([4, 5]), (4, 5), np.array([4, 5], dtype=np.uint16)])
def test_prompts_of_ids_need_no_tokenizer(prompt: Any) -> None:
    trajectory = attempt(
        SingleTurn(lambda completions: [float(len(c)) for c in completions]), make_tasks(1, prompt=prompt), 6
    )[0]
    assert trajectory.token_ids.tolist() == [4, 5, 6]
    assert trajectory.reward == 1.0
    assert "completion" not in trajectory.info


def test_the_reward_is_the_weighted_sum_and_the_parts_are_kept() -> None:
    adapter = SingleTurn(
        {"right": lambda completions: [1] * len(completions), "short": lambda completions: [0] * len(completions)},
        weights=[0.7, 0.3],
    )
    trajectory = attempt(adapter, make_tasks(1, prompt=[4]), 5)[0]
    assert trajectory.reward == pytest.approx(0.7)
    assert trajectory.info["rewards"] == {"right": 1.0, "short": 0.0}


def test_a_function_that_does_not_apply_is_left_out_of_the_sum() -> None:
    def even(number: list[int]) -> list[float | None]:
        return [1.0 if n % 2 == 0 else None for n in number]

    def always(completions: list[Any]) -> torch.Tensor:
        return torch.full((len(completions),), 0.5)

    trajectories = attempt(SingleTurn([even, always]), make_tasks(2, prompt=[4]), 5)
    assert [t.reward for t in trajectories] == [1.5, 1.5, 0.5, 0.5]
    assert trajectories[2].info["rewards"] == {"even": None, "always": 0.5}


def test_an_answer_that_nobody_can_score() -> None:
    def odd(number: list[int]) -> list[float]:
        return [1.0 if n % 2 else math.nan for n in number]

    with pytest.raises(RuntimeError, match=r"task 'task-0', attempt 0, turn 1: .* no turn gave a reward"):
        attempt(SingleTurn(odd), make_tasks(2, prompt=[4]), 5)
    trajectories = attempt(SingleTurn(odd), make_tasks(2, prompt=[4]), 5, errors="unscored")
    assert [t.is_rewarded for t in trajectories] == [False, False, True, True]
    assert trajectories[0].info["rewards"] == {"odd": None}


def picky(completions: list[Any], number: list[int]) -> list[float]:
    if 1 in number:
        raise KeyError("one")
    return [1.0] * len(completions)


def test_a_reward_that_raises_names_its_task_and_costs_only_that() -> None:
    with pytest.raises(RuntimeError, match=r"task 'task-1', attempt 0, turn 1: KeyError: 'one'"):
        attempt(SingleTurn(picky), make_tasks(3, prompt=[4]), 5)
    trajectories = attempt(SingleTurn(picky), make_tasks(3, prompt=[4]), 5, errors="unscored")
    assert [t.is_rewarded for t in trajectories] == [True, True, False, False, True, True]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions: [1.0] * 3, "reward '<lambda>' returned 3 values for 2 completions; return one for each"),
        (lambda completions: [1.0] * (len(completions) - 1), "returned 1 values for 2 completions"),
        (lambda completions: None, "TypeError: reward '<lambda>' returned None, expected a list"),
        (lambda completions: "good", "TypeError: reward '<lambda>' returned 'good', expected a list"),
        (lambda completions: ["good"] * len(completions), "returned 'good', expected a number or None"),
        (lambda completions: [math.inf] * len(completions), "returned inf; expected a finite number"),
        (lambda completions, answer: [1.0], r"asks for \['answer'\], but the tasks only give \['completion_ids'"),
    ],
)
def test_results_that_are_no_rewards_are_named(reward: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        attempt(SingleTurn(reward), make_tasks(1, prompt=[4]), 5)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, r"the task has no field 'prompt' \(found \['id', 'number'\]\)"),
        ({"prompt": "c"}, r"the prompt is text \('c'\) and there is no tokenizer"),
        ({"prompt": 7}, r"the prompt must be text, a list of messages or token ids \(integers\), got 7"),
        ({"prompt": [1.7, 2.2]}, r"token ids \(integers\), got \[1.7, 2.2\]"),
        ({"prompt": torch.tensor([1.7, 2.2])}, r"token ids \(integers\), got tensor\(\[1.7000, 2.2000\]\)"),
        ({"prompt": np.array([1.7, 2.2])}, r"token ids \(integers\), got array\(\[1.7, 2.2\]\)"),
        ({"prompt": [torch.tensor(1.0)]}, r"token ids \(integers\), got \[tensor\(1.\)\]"),
        ({"prompt": torch.tensor([True, False])}, r"token ids \(integers\), got tensor\(\[ True, False\]\)"),
        ({"prompt": None}, "got None"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(task: dict, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"task 'task-0', attempt 0, reset: .*{message}"):
        attempt(SingleTurn(length), make_tasks(1, **task), 5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rewards": []}, ValueError, "`rewards` is empty"),
        ({"rewards": {"a": 1}}, TypeError, "reward 'a' is 1, expected a function"),
        ({"rewards": [length], "weights": [1.0, 2.0]}, ValueError, "2 entries for 1 reward functions"),
        ({"rewards": [length], "weights": [math.nan]}, ValueError, "`weights` must be finite"),
        (
            {"rewards": [length], "weights": {"length": 1.0}},
            TypeError,
            r"`weights` is \{'length': 1.0\}; expected a list",
        ),
        ({"rewards": [length], "weights": 1.0}, TypeError, "`weights` is 1.0; expected a list"),
        ({"rewards": [length], "weights": "1"}, TypeError, "`weights` is '1'; expected a list"),
        ({"rewards": [length], "weights": ["1"]}, TypeError, r"`weights`\[0\] is '1', expected a number"),
        ({"rewards": 7}, TypeError, "`rewards` is 7, expected a function, several, or several by name"),
        ({"rewards": torch.add}, TypeError, "reward 'add' is .* does not say what arguments it takes; wrap it"),
    ],
)
def test_bad_settings_are_refused(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SingleTurn(**arguments)


def test_arguments_that_are_positional_only_are_given_by_position() -> None:
    def first(completions: list[Any], number: list[int], /, unknown: int = 3) -> list[float]:
        return [float(len(ids) + n + unknown) for ids, n in zip(completions, number, strict=True)]

    def rest(completions: list[Any], other: Any = None, /, **columns: Any) -> list[float]:
        assert other is None
        assert "completions" not in columns
        return [0.5] * len(completions) if "number" in columns else []

    trajectories = attempt(SingleTurn([first, rest]), make_tasks(2, prompt=[4]), 5, 6)
    assert [t.reward for t in trajectories] == [5.5, 5.5, 6.5, 6.5]


def test_a_builtin_that_asks_for_no_column_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"reward 'len' asks for \['obj'\], but the tasks only give"):
        attempt(SingleTurn(len), make_tasks(1, prompt=[4]), 5)


def test_an_answer_that_a_function_skips_is_told_in_the_numbers_of_the_whole_call() -> None:
    def skips(completions: list[Any], number: list[int]) -> list[float]:
        return [1.0 for n in number if n != 1]

    with pytest.warns(UserWarning, match="each was scored alone"):
        trajectories = attempt(SingleTurn(skips), make_tasks(3, prompt=[4]), 5, errors="unscored")
    assert [t.is_rewarded for t in trajectories] == [True, True, False, False, True, True]
    assert "reward 'skips' returned 4 values for 6 completions" in trajectories[2].info["error"]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_weights_and_rewards_may_be_arrays(kind: Any) -> None:
    def one(completions: list[Any]) -> Any:
        return kind([1.0] * len(completions))

    def ones(completions: list[Any]) -> Any:
        return [torch.ones(1)] * len(completions)

    trajectory = attempt(SingleTurn([one, ones], weights=kind([0.25, 0.5])), make_tasks(1, prompt=[4]), 5)[0]
    assert trajectory.reward == 0.75


def test_functions_of_one_name_are_told_apart() -> None:
    assert list(SingleTurn([length, length, picky]).rewards) == ["length", "length#2", "picky"]
