from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForConditionalGeneration

from lit_rl.data.summary import check_readable, summarize
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.rollout.decoding import model_context, model_end_ids
from lit_rl.rollout.environment import Turn
from lit_rl.testing import tiny_policy_model
from lit_rl.trajectory import Trajectory
from tests.rollout.collecting import OneToken, collect, source
from tests.rollout.toys import END, Chain, Dialogue, OwnNetwork, ScriptedEngine, make_tasks, tiny_policy


class Talkative(Dialogue):
    """Answers the first action with 30 tokens, and the second with a reward."""

    def step(self, token_ids: Sequence[int]) -> Turn:
        self.actions.append(list(token_ids))
        return Turn([3] * 30) if len(self.actions) == 1 else Turn(done=True, reward=1.0)


@pytest.mark.parametrize("model", [lambda: Chain({}), OwnNetwork, lambda: tiny_policy_model("mamba")])
def test_without_a_known_context_observations_may_be_long(model: Any) -> None:
    policy = CausalLMPolicy(model())
    assert model_context(policy.model) is None
    made = source(Talkative, engine=ScriptedEngine([5, END]), max_new_tokens=6)
    for trajectory in collect(made, policy):
        assert (trajectory.reward, trajectory.truncated, trajectory.info["stop"]) == (1.0, False, "done")
        assert trajectory.token_ids.tolist().count(3) >= 30


def test_without_a_known_context_a_cut_action_says_so() -> None:
    made = source(OneToken, engine=ScriptedEngine([5] * 9), max_new_tokens=6)
    with pytest.warns(UserWarning, match="cut by a limit"):
        assert collect(made, CausalLMPolicy(Chain({})))[0].info["stop"] == "max_new_tokens"


def composite() -> Gemma3ForConditionalGeneration:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32, "max_position_embeddings": 48}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = Gemma3Config(
        text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14}, image_token_index=31
    )
    return Gemma3ForConditionalGeneration(config)


def test_a_composite_configuration_is_read_in_its_text_part() -> None:
    model = composite()
    assert getattr(model.config, "max_position_embeddings", None) is None
    assert model_context(model) == 48
    long = Trajectory([3] * 50, [0] + [1] * 49, 1.0)
    with pytest.warns(UserWarning, match="has 50 tokens, .* `max_position_embeddings`=48"):
        check_readable(summarize([long]), model)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert model_end_ids(model) == [2]


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3"])
@pytest.mark.parametrize("engine", [None, ScriptedEngine([5, END])])
def test_a_limit_beyond_the_context_is_refused_before_anything_is_sampled(architecture: str, engine: Any) -> None:
    Dialogue.log.clear()
    options = {} if engine is None else {"engine": engine}
    made = source(max_trajectory_tokens=200, **options)
    with pytest.raises(ValueError, match=r"`max_trajectory_tokens` is 200, but .* reads 64 .*lower it"):
        collect(made, tiny_policy(architecture))
    assert not Dialogue.log
    assert collect(source(max_trajectory_tokens=64, **options), tiny_policy(architecture))


class Strange(Dialogue):
    """Says an id that there is not, in the prompt or in the second observation."""

    def reset(self, task: Any) -> Sequence[int]:
        prompt = super().reset(task)
        return [*prompt, 999] if task["id"] == "task-1" and task["where"] == "prompt" else prompt

    def step(self, token_ids: Sequence[int]) -> Turn:
        turn = super().step(token_ids)
        told = self.task["id"] == "task-1" and self.task["where"] == "observation" and len(self.actions) == 2
        return Turn([999]) if told else turn


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("prompt", "task 'task-1', attempt 0, reset: ValueError: the prompt holds the id 999; expected 0 to 31"),
        (
            "observation",
            "task 'task-1', attempt 0, turn 2: ValueError: the observation holds the id 999; expected 0 to",
        ),
    ],
)
def test_an_id_beyond_the_vocabulary_is_named_with_task_and_turn(where: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        collect(source(Strange, make_tasks(4, where=where)))
    trajectories = collect(source(Strange, make_tasks(4, where=where), errors="unscored"))
    assert {t.task for t in trajectories if not t.is_rewarded} == {"task-1"}


@pytest.mark.parametrize("kind", [np.int64, np.array, torch.tensor])
def test_numbers_may_be_numpys_or_torchs(kind: Any) -> None:
    names = {"tasks_per_iteration": 2, "group_size": 2, "max_new_tokens": 4, "max_turns": 2, "seed": 3}
    names |= {"max_trajectory_tokens": 40, "batch_size": 2}
    plain = source(**names, end_ids=[END])
    other = source(**{name: kind(value) for name, value in names.items()}, end_ids=kind([END]))
    policy = tiny_policy()
    temperature = torch.tensor(0.5) if kind is torch.tensor else np.float32(0.5)
    found = collect(other, policy, iteration=kind(1), temperature=temperature)
    wanted = collect(plain, policy, iteration=1, temperature=0.5)
    assert [t.token_ids.tolist() for t in found] == [t.token_ids.tolist() for t in wanted]
    assert [t.group for t in found] == [t.group for t in wanted]
