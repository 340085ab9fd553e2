from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lit_rl import CausalLMPolicy
from lit_rl.checks.head import check_head
from lit_rl.testing import tiny_policy_model


def settled(architecture: str, dtype: torch.dtype = torch.float32, **overrides: object) -> CausalLMPolicy:
    policy = CausalLMPolicy(tiny_policy_model(architecture, dtype=dtype, **overrides), layout="padded")
    policy.resolve_layout()
    return policy


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("granite", {"logits_scaling": 16.0}),
        ("cohere", {"logit_scale": 0.125}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("phi", {}),  # an output layer with a bias
        ("falcon_h1", {"lm_head_multiplier": 3.0}),
        ("gpt2", {}),
    ],
)
def test_what_models_do_to_their_logits_is_done_too(
    architecture: str, overrides: dict[str, object], dtype: torch.dtype
) -> None:
    verdict = check_head(settled(architecture, dtype, **overrides))
    assert verdict.ok, verdict.message
    assert verdict.figures["difference_nats"] <= verdict.figures["tolerance_nats"]


@pytest.mark.parametrize(
    ("architecture", "overrides", "attribute", "wrong"),
    [
        ("granite", {"logits_scaling": 16.0}, "logit_scale", 1.0),
        ("cohere", {"logit_scale": 0.125}, "logit_scale", 1.0),
        ("gemma2", {"final_logit_softcapping": 2.0}, "softcap", None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forgotten_transform_is_found(
    architecture: str, overrides: dict[str, object], attribute: str, wrong: float | None, dtype: torch.dtype
) -> None:
    policy = settled(architecture, dtype, **overrides)
    setattr(policy.head, attribute, wrong)
    verdict = check_head(policy)
    assert not verdict.ok
    assert f"{attribute}={wrong}" in verdict.message


def test_models_that_transform_hidden_states_before_their_output_layer_are_found() -> None:
    verdict = check_head(settled("modernbert-decoder"))
    assert not verdict.ok
    assert "ModernBertDecoderForCausalLM does more at its output" in verdict.message


def test_a_patched_forward_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = settled("qwen3")
    forward = policy.model.forward

    def doubled(*arguments: object, **options: object) -> object:
        output = forward(*arguments, **options)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(policy.model, "forward", doubled)
    verdict = check_head(policy)
    assert not verdict.ok
    assert "another library has patched its forward pass" in verdict.message

    def without_logits(*arguments: object, **options: object) -> object:
        output = forward(*arguments, **options)
        output.logits = None
        return output

    monkeypatch.setattr(policy.model, "forward", without_logits)
    verdict = check_head(policy)
    assert not verdict.ok
    assert "returned no logits" in verdict.message


def test_an_adapter_on_the_output_layer_is_seen() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    policy = CausalLMPolicy(get_peft_model(tiny_policy_model("qwen3"), config), layout="padded")
    assert check_head(policy).ok
    policy.head.output_layer = policy.model.get_base_model().lm_head.base_layer
    assert not check_head(policy).ok


def test_a_cut_vocabulary_is_compared_as_cut() -> None:
    policy = CausalLMPolicy(tiny_policy_model("qwen3"), vocab_size=20, layout="padded")
    verdict = check_head(policy)
    assert verdict.ok, verdict.message


def test_the_model_is_left_as_it_was() -> None:
    policy = settled("qwen3").train()
    state = torch.get_rng_state()
    assert check_head(policy, tokens=1).ok
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in policy.modules())
    assert all(parameter.grad is None for parameter in policy.parameters())
    with pytest.raises(ValueError, match="at least 1, got 0"):
        check_head(policy, tokens=0)


def test_bad_numbers_are_never_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = settled("qwen3")
    with torch.no_grad():
        policy.model.lm_head.weight[3] = torch.nan
    verdict = check_head(policy)
    assert isinstance(policy.model.lm_head.weight, Tensor)
    assert not verdict.ok
