from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from lit_rl.policy.head import LogProbHead
from lit_rl.policy.output_layer import LogitTransform, find_output_layer
from tests.policy.head_oracle import full_scores

IDS = torch.tensor([[3, 14, 15, 9, 2]])
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}


def build(name: str, **overrides: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **overrides})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # Away from the small initial values, so that caps and scales are felt.
        parameter.data.mul_(4.0).add_(torch.randn_like(parameter), alpha=0.1)
    return model


def hidden_and_logits(model: nn.Module) -> tuple[Tensor, Tensor]:
    """What the backbone returned, and what the model made of it."""
    seen: list[Tensor] = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    backbone = getattr(base.base_model, "decoder", base.base_model)
    hook = backbone.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits
    hook.remove()
    return seen[0], logits


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("Qwen3", {"head_dim": 8}, LogitTransform()),
        ("Llama", {"tie_word_embeddings": True}, LogitTransform()),
        ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 16}, LogitTransform()),
        ("Phi", {}, LogitTransform()),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0}, LogitTransform(softcap=3.0)),
        ("Gemma2", {"head_dim": 8, "final_logit_softcapping": None}, LogitTransform()),
        ("NanoChat", {}, LogitTransform(softcap=15.0)),
        ("Cohere", {"logit_scale": 0.125}, LogitTransform(scale=0.125)),
        ("Cohere2", {"logit_scale": 0.125}, LogitTransform(scale=0.125)),
        ("Granite", {"logits_scaling": 16.0}, LogitTransform(scale=1 / 16)),
        ("MiniCPM3", {**LATENT, "dim_model_base": 4, "num_key_value_heads": 2}, LogitTransform(scale=0.25)),
        ("HyperCLOVAX", {"logits_scaling": 0.3}, LogitTransform(scale=0.3)),
        ("FalconH1", {"lm_head_multiplier": 0.2, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8},
         LogitTransform(scale=0.2)),
    ],
)  # fmt: skip
def test_equal_to_the_models_own_logits(name: str, overrides: dict, expected: LogitTransform) -> None:
    model = build(name, **overrides)
    head = LogProbHead.from_model(model, chunk_tokens=3)
    assert (head.logit_scale, head.softcap, head.vocab_size) == (expected.scale, expected.softcap, expected.vocab_size)
    hidden, logits = hidden_and_logits(model)
    torch.testing.assert_close(head.logits(hidden), logits, rtol=1e-4, atol=1e-4)
    targets = IDS.roll(-1, 1)
    wanted = (logits / 0.7).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(head(hidden, targets, temperature=0.7).log_probs, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.RecurrentGemmaConfig(logits_soft_cap=30.0), LogitTransform(softcap=30.0)),
        (transformers.xLSTMConfig(output_logit_soft_cap=20.0), LogitTransform(softcap=20.0)),
        (transformers.MptConfig(logit_scale=0.5), LogitTransform()),
        (transformers.CohereConfig(logit_scale=None), LogitTransform()),
        (transformers.Gemma3Config(text_config={"final_logit_softcapping": 9.0}), LogitTransform(softcap=9.0)),
        (transformers.GraniteMoeConfig(logits_scaling=8.0), LogitTransform(scale=0.125)),
        (
            transformers.InklingTextConfig(logits_mup_width_multiplier=8.0, unpadded_vocab_size=77),
            LogitTransform(scale=0.125, vocab_size=77),
        ),
        (
            transformers.MuseSparkConfig(text_config={"output_multiplier": 0.5, "final_logit_softcapping": 20.0}),
            LogitTransform(scale=0.5, softcap=20.0),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_transforms_are_read_from_configurations(config: object, expected: LogitTransform) -> None:
    assert LogitTransform.from_config(config) == expected


def test_a_tied_table_gets_both_of_its_gradients() -> None:
    torch.manual_seed(0)
    table, body = nn.Embedding(23, 8).double(), nn.Linear(8, 8).double()
    layer = nn.Linear(8, 23, bias=False)
    layer.weight = table.weight
    ids, targets = torch.randint(0, 23, (9,)), torch.randint(0, 23, (9,))
    upstream = torch.randn(9, dtype=torch.float64)

    def gradient(scores: Callable[[Tensor], Tensor]) -> Tensor:
        (found,) = torch.autograd.grad((scores(body(table(ids)).tanh()) * upstream).sum(), table.weight)
        return found

    expected = gradient(lambda hidden: full_scores(hidden, table.weight, targets)[0])
    for output_layer in (layer, table):
        for chunk_tokens in (None, 2):
            head = LogProbHead(output_layer, chunk_tokens=chunk_tokens)
            torch.testing.assert_close(gradient(lambda hidden, head=head: head(hidden, targets).log_probs), expected)


# --- adapters and wrappers --------------------------------------------------------------------------------------


def adapted(name: str = "Qwen3", **settings: object) -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(build(name, head_dim=8).double(), LoraConfig(r=3, lora_alpha=5, **settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = torch.randn_like(parameter.data).double() * 0.3
    return model


def assert_evaluated_as_the_model_does(model: nn.Module) -> None:
    head = LogProbHead.from_model(model, chunk_tokens=2)
    hidden, logits = hidden_and_logits(model)
    torch.testing.assert_close(head.logits(hidden), logits, rtol=1e-9, atol=1e-9)
    hidden = hidden.flatten(0, 1).requires_grad_()
    parameters = [p for p in find_output_layer(model).parameters() if p.requires_grad]
    targets, upstream = IDS.flatten(), torch.randn(IDS.numel(), dtype=torch.float64)
    full = find_output_layer(model)(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected = torch.autograd.grad((full * upstream).sum(), [hidden, *parameters])
    found = torch.autograd.grad((head(hidden, targets).log_probs * upstream).sum(), [hidden, *parameters])
    torch.testing.assert_close(found, expected)
    loss, _ = head.loss(hidden, targets, lambda log_probs, part: upstream[part] * log_probs)
    torch.testing.assert_close(torch.autograd.grad(loss, [hidden, *parameters]), expected)


@pytest.mark.parametrize("settings", [{}, {"lora_bias": True}, {"use_rslora": True}], ids=str)
@pytest.mark.parametrize("name", ["Qwen3", "Phi"])  # the second has a bias
def test_lora_on_the_output_layer(name: str, settings: dict) -> None:
    model = adapted(name, target_modules=["lm_head"], **settings)
    assert_evaluated_as_the_model_does(model)
    assert not find_output_layer(model).base_layer.weight.requires_grad


def test_lora_switched_off_merged_and_doubled() -> None:
    model = adapted(target_modules=["lm_head"])
    head = LogProbHead.from_model(model)
    hidden, logits = hidden_and_logits(model)
    with model.disable_adapter():
        plain_hidden, plain = hidden_and_logits(model)
        torch.testing.assert_close(head.logits(plain_hidden), plain)
        assert not torch.allclose(plain, logits)
    model.merge_adapter()
    torch.testing.assert_close(head.logits(hidden), logits)
    with model.disable_adapter():
        torch.testing.assert_close(head.logits(hidden), plain)
    model = adapted(target_modules=["lm_head"])
    model.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"]))
    nn.init.normal_(find_output_layer(model).lora_B["second"].weight)
    model.base_model.set_adapter(["default", "second"])
    assert_evaluated_as_the_model_does(model)


def test_the_adapters_dropout_is_applied_while_training() -> None:
    model = adapted(target_modules=["lm_head"], lora_dropout=0.5).train()
    head, layer = LogProbHead.from_model(model), find_output_layer(model)
    hidden = torch.randn(6, 16, dtype=torch.float64)
    torch.manual_seed(5)
    expected = layer(hidden)
    torch.manual_seed(5)
    torch.testing.assert_close(head.logits(hidden), expected)


def test_float32_adapters_leave_the_large_product_in_sixteen_bits() -> None:
    model = adapted(target_modules=["lm_head"]).bfloat16()
    layer = find_output_layer(model)
    layer.lora_A.float()
    layer.lora_B.float()
    terms = LogProbHead.from_model(model)._inputs(torch.randn(2, 16).bfloat16(), torch.zeros(2).long(), 1.0)
    assert [weight.dtype for weight in terms.weights] == [torch.bfloat16, torch.float32]


def test_modules_to_save() -> None:
    model = adapted(target_modules=["q_proj"], modules_to_save=["lm_head"])
    assert_evaluated_as_the_model_does(model)
    head = LogProbHead.from_model(model)
    with model.disable_adapter():
        hidden, logits = hidden_and_logits(model)
        torch.testing.assert_close(head.logits(hidden), logits)


def test_trainable_tokens() -> None:
    model = adapted(target_modules=["q_proj"], trainable_token_indices={"lm_head": [1, 2]})
    assert type(find_output_layer(model)).__name__ == "TrainableTokensWrapper"
    assert_evaluated_as_the_model_does(model)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(use_dora=True, target_modules=["lm_head"]),
        IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        LoHaConfig(target_modules=["lm_head"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_adapters_are_refused_by_name(config: PeftConfig) -> None:
    model = get_peft_model(build("Qwen3", head_dim=8), config)
    kind = type(find_output_layer(model)).__name__
    with pytest.raises(TypeError, match=rf"output layer is .*peft\..*{kind}"):
        LogProbHead.from_model(model)


class Normed(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(functional.layer_norm(input, input.shape[-1:]))


class Capped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 30.0 * torch.tanh(super().forward(input) / 30.0)


class Harmless(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input.float(), self.weight.float(), self.bias)


@pytest.mark.parametrize(
    "layer", [Normed(8, 12), Capped(8, 12), nn.Sequential(nn.Linear(8, 12)), nn.Bilinear(8, 8, 12)]
)
def test_layers_that_do_more_are_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(TypeError, match=type(layer).__name__):
        LogProbHead(layer)


def test_patched_and_hooked_layers_are_found_out() -> None:
    patched = nn.Linear(8, 12)
    patched.forward = lambda input: functional.linear(input, patched.weight)  # the bias is lost
    with pytest.raises(TypeError, match="Linear"):
        LogProbHead(patched)
    hooked = nn.Linear(8, 12)
    hooked.register_forward_hook(lambda module, inputs, output: output * 2.0)
    with pytest.raises(TypeError, match="Linear"):
        LogProbHead(hooked)
    watched = nn.Linear(8, 12)
    watched.register_forward_hook(lambda module, inputs, output: None)
    LogProbHead(watched)


def test_layers_that_compute_the_same_are_accepted() -> None:
    torch.manual_seed(0)
    layer = Harmless(8, 12)
    hidden = torch.randn(3, 8)
    torch.testing.assert_close(LogProbHead(layer).logits(hidden), layer(hidden))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 12))
    head = LogProbHead(normed)
    torch.testing.assert_close(head.logits(hidden), normed(hidden))
    head(hidden, torch.zeros(3, dtype=torch.long)).log_probs.sum().backward()
    assert all(parameter.grad is not None for parameter in normed.parameters())


def test_models_without_an_output_layer_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Linear has no output layer.*lm_head"):
        LogProbHead.from_model(nn.Linear(3, 3))


def test_a_users_own_module() -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(8, 12)
    hidden = torch.randn(2, 3, 8)
    torch.testing.assert_close(
        LogProbHead.from_model(model, vocab_size=9).logits(hidden), model.lm_head(hidden)[..., :9]
    )


def test_logits_are_float32_without_gradient() -> None:
    head = LogProbHead(nn.Linear(8, 12, dtype=torch.bfloat16), softcap=5.0)
    logits = head.logits(torch.randn(2, 8, dtype=torch.bfloat16))
    assert logits.dtype is torch.float32
    assert not logits.requires_grad
    assert logits.abs().max() <= 5.0
