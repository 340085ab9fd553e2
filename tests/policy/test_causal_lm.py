from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lit_rl import CausalLMPolicy, Trajectory, collate
from lit_rl.data.batch import PackedBatch
from lit_rl.data.collate import filler_batch
from lit_rl.policy.attention import Segments, attention_name, packed_forward
from lit_rl.policy.isolation import measure_isolation
from lit_rl.testing import oracle_gradient, oracle_log_probs, tiny_policy_model


def trajectories(*lengths: int, seed: int = 1, prompt: int = 1, temperature: float = 1.0) -> list[Trajectory]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 32, (length,), generator=generator) for length in lengths]
    return [Trajectory(x, [i >= prompt for i in range(len(x))], 0.0, temperature=temperature) for x in ids]


def oracle(model: nn.Module, attempts: list[Trajectory]) -> Tensor:
    return torch.cat([oracle_log_probs(model, attempt)[attempt.scored] for attempt in attempts]).detach()


def quiet(model: nn.Module, **options: object) -> CausalLMPolicy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = CausalLMPolicy(model, **options)
        policy.resolve_layout()
    return policy


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt2", "gpt_oss", "falcon", "mamba"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gradients_agree_with_the_oracle(architecture: str, layout: str) -> None:
    if architecture == "mamba":
        layout = "padded"
    attempts = trajectories(9, 1, 2, 9, 12, prompt=2, temperature=0.7)
    model = tiny_policy_model(architecture, dtype=torch.float64)
    expected = oracle_gradient(model, attempts, lambda log_probs, index: (index + 1.0) * log_probs.sum())
    policy = quiet(model, chunk_tokens=3, layout=layout)
    batch = collate(attempts, layout=layout)
    weights = batch.scored_segments + 1.0
    (weights * policy(batch).log_probs).sum().backward()
    tolerance = 1e-5 if architecture in ("gemma2", "mamba") else 1e-10  # these compute in float32 inside
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected.get(name, torch.zeros_like(found)), rtol=tolerance, atol=tolerance)


def test_tied_embeddings_get_both_of_their_gradients() -> None:
    model = tiny_policy_model("qwen3", dtype=torch.float64, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    attempts = trajectories(5, 7)
    expected = oracle_gradient(model, attempts, lambda log_probs, _: log_probs.sum())
    for chunk_tokens in (None, 2):
        model.zero_grad()
        quiet(model, chunk_tokens=chunk_tokens)(collate(attempts)).log_probs.sum().backward()
        found = model.model.embed_tokens.weight.grad
        torch.testing.assert_close(found, expected["model.embed_tokens.weight"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_changed_token_stays_in_its_segment(implementation: str, with_mask: bool) -> None:
    model = tiny_policy_model("qwen3")
    model.set_attn_implementation(implementation)
    policy = CausalLMPolicy(model, layout="packed")
    batch = collate(trajectories(3, 5))
    changed = batch.replace(input_ids=batch.input_ids.index_fill(1, torch.tensor([1]), 31))
    segments = Segments.from_lengths([3, 5], device="cpu")

    def run(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        policy.resolve_layout()
        embeddings = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
        extra = {"attention_mask": torch.ones_like(batch.input_ids)} if with_mask else {}
        with packed_forward(segments):
            hidden = model.model(
                inputs_embeds=embeddings, position_ids=batch.position_ids, **extra, **segments.keyword_arguments
            )[0]
        log_probs = policy.head(hidden.flatten(0, 1)[batch.predictors], batch.targets).log_probs
        return log_probs[2:].detach(), torch.autograd.grad(log_probs[2:].sum(), embeddings)[0]

    (before, gradient), (after, changed_gradient) = run(batch), run(changed)
    torch.testing.assert_close(before.double(), oracle(model, trajectories(3, 5))[2:], rtol=0, atol=1e-5)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    torch.testing.assert_close(changed_gradient, gradient, rtol=0, atol=0)
    assert not gradient[:, :3].any()


def test_positions_restart_within_a_learned_table() -> None:
    model = tiny_policy_model("gpt2", n_positions=4)
    attempts = trajectories(3, 2, 3)
    batch = collate(attempts)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    policy = CausalLMPolicy(model, layout="packed")
    torch.testing.assert_close(policy(batch).log_probs.double(), oracle(model, attempts), rtol=0, atol=1e-5)


def test_segments_and_answers_of_one_token() -> None:
    model = tiny_policy_model("qwen3")
    policy = CausalLMPolicy(model)
    batch = collate(trajectories(1, 1, 4))
    assert batch.num_scored == 3
    assert policy(batch).log_probs.isfinite().all()
    attempt = Trajectory([5, 6, 7], [0, 0, 1], 0.0)
    log_probs = policy(collate([attempt])).log_probs
    assert log_probs.shape == (1,)
    (-log_probs.sum()).backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_padding_at_the_end_of_a_row_changes_nothing(implementation: str) -> None:
    model = tiny_policy_model("qwen3", dtype=torch.float64)
    model.set_attn_implementation(implementation)
    policy = CausalLMPolicy(model, layout="packed")
    attempts = trajectories(5)
    gradients = []
    for batch in (collate(attempts), collate(attempts, rows=[[0]], row_tokens=8)):
        model.zero_grad()
        policy(batch).log_probs.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        assert policy.hidden_states(batch).isfinite().all()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-10, atol=1e-12)


def test_a_row_of_nothing_but_padding_is_finite() -> None:
    model = tiny_policy_model("qwen3")
    policy = CausalLMPolicy(model, layout="packed")
    batch = collate(trajectories(5), rows=[[0]], row_tokens=8)
    grown = {
        name: torch.cat([getattr(batch, name), torch.full((1, 8), fill)])
        for name, fill in (("input_ids", 0), ("position_ids", 0), ("segment_ids", -1))
    }
    log_probs = policy(batch.replace(**grown)).log_probs
    torch.testing.assert_close(log_probs, policy(batch).log_probs, rtol=0, atol=1e-6)
    log_probs.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_boundaries_are_not_guessed_from_positions() -> None:
    policy = CausalLMPolicy(tiny_policy_model("qwen3"))
    batch = collate(trajectories(8))
    continued = batch.replace(position_ids=batch.position_ids + 5)
    # Rotary positions are relative: a segment that starts at 5 is the same segment.
    torch.testing.assert_close(policy(continued).log_probs, policy(batch).log_probs, rtol=0, atol=1e-5)
    jumping = batch.replace(position_ids=batch.position_ids * 2)
    assert policy(jumping).log_probs.shape == (7,)
    seen: list[Tensor] = []
    attention = policy.model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda _m, _a, named: seen.append(named["cu_seq_lens_q"]), with_kwargs=True)
    policy(jumping)
    assert seen[0].tolist() == [0, 8]


@pytest.mark.parametrize("architecture", ["gemma3_text", "cohere2", "olmo3", "gpt_oss", "llama4_text"])
def test_layer_by_layer_with_alternating_patterns(architecture: str) -> None:
    attempts = trajectories(6, 6)
    model = tiny_policy_model(architecture)
    policy = CausalLMPolicy(model, layout="packed")
    policy.resolve_layout()
    packed: list[Tensor] = []
    alone: list[Tensor] = []
    layers = model.model.layers

    def record(into: list[Tensor]) -> list[torch.utils.hooks.RemovableHandle]:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            into.append(output[0] if isinstance(output, tuple) else output)

        return [layer.register_forward_hook(hook) for layer in layers]

    for into, batches in ((packed, [collate(attempts)]), (alone, [collate([a], layout="padded") for a in attempts])):
        handles = record(into)
        for batch in batches:
            with policy.reference_attention() if into is alone else torch.enable_grad():
                policy.hidden_states(batch)
        for handle in handles:
            handle.remove()
    for layer in range(2):
        expected = torch.cat([alone[layer][0], alone[layer + 2][0]])
        torch.testing.assert_close(packed[layer][0], expected, rtol=1e-4, atol=1e-4)


# --- recomputation, generation, modes -------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss", "falcon"])
def test_recomputed_layers_see_the_same_segments(architecture: str, use_reentrant: bool) -> None:
    model = tiny_policy_model(architecture)
    policy = CausalLMPolicy(model, layout="packed").train()
    batch = collate(trajectories(9, 3, 9))
    policy(batch).log_probs.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    calls: list[int] = []
    inner = next(m for name, m in model.named_modules() if name.endswith(("self_attn", "self_attention")))
    inner.register_forward_hook(lambda *_: calls.append(1))
    policy(batch).log_probs.sum().backward()
    assert len(calls) == 2
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "falcon", "mistral"])
def test_generation_keeps_the_models_own_attention(architecture: str) -> None:
    model = tiny_policy_model(architecture)
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [3, 4, 5, 6, 7, 8, 9], [0, 0, 0, 0, 0, 0, 9]])
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 8, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    before = model.generate(ids, **options)
    policy = CausalLMPolicy(model, layout="packed")
    policy(collate(trajectories(5, 3)))
    after = model.generate(ids, **options)
    assert torch.equal(before.sequences, after.sequences)
    for first, second in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("architecture", "dropout"),
    [
        ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),  # modules
        ("qwen3", {"attention_dropout": 0.1}),  # a number on each layer
        ("opt", {"dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.5}),
    ],
)
def test_dropout_is_off_and_two_passes_are_equal(architecture: str, dropout: dict[str, float]) -> None:
    model = tiny_policy_model(architecture, **dropout)
    policy = CausalLMPolicy(model).train()
    attempts = trajectories(7, 5, 3)
    batch = collate(attempts)
    first, second = policy(batch).log_probs, policy(batch).log_probs
    assert torch.equal(first, second)
    repacked = policy(collate(attempts, rows=[[1, 2], [0]], row_tokens=10)).log_probs
    order = torch.tensor([6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5])
    torch.testing.assert_close(repacked, first[order], rtol=0, atol=1e-6)


def test_randomness_in_training_mode_is_said_and_named() -> None:
    model = tiny_policy_model("mixtral", router_jitter_noise=0.5).train()
    with pytest.warns(UserWarning, match=r"random in training mode.*`model\.layers\.0\.mlp` \(Mixtral"):
        CausalLMPolicy(model).resolve_layout()


def test_the_probe_leaves_the_model_as_it_was() -> None:
    for architecture in ("qwen3", "mamba"):
        model = tiny_policy_model(architecture).train()
        model.get_input_embeddings().eval()
        flags = {name: module.training for name, module in model.named_modules()}
        state = torch.get_rng_state()
        attention = attention_name(model)
        weights = copy.deepcopy(model.state_dict())
        quiet(model)
        assert {name: module.training for name, module in model.named_modules()} == flags
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        if architecture == "mamba":
            assert attention_name(model) == attention


def test_the_layout_is_settled_while_layers_are_recomputed() -> None:
    model = tiny_policy_model("qwen3")
    policy = CausalLMPolicy(model)
    policy.gradient_checkpointing_enable({"use_reentrant": True})
    policy.train()
    assert policy.attention == "segments"
    assert model.model.layers[0].gradient_checkpointing


def test_the_layout_is_settled_in_inference_mode_too() -> None:
    policy = CausalLMPolicy(tiny_policy_model("qwen3"))
    with torch.inference_mode():
        assert policy(collate(trajectories(4, 3))).log_probs.shape == (5,)
    assert policy.attention == "segments"
    policy(collate(trajectories(4, 3))).log_probs.sum().backward()


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("mamba", r"`backbone\.layers\.0\.mixer` \(MambaMixer\)"),
        ("mamba2", r"`backbone\.layers\.0\.mixer` \(Mamba2Mixer\)"),
        ("lfm2", r"`model\.layers\.0\.conv` \(Lfm2ShortConv\)"),
        ("qwen3_next", r"`model\.layers\.0\.linear_attn` \(Qwen3NextGatedDeltaNet\)"),
        ("minimax", r"`model\.layers\.1\.self_attn` \(MiniMaxLightningAttention\)"),
        ("bloom", r"`transformer\.h\.0\.self_attention` \(BloomAttention\)"),
        ("recurrent_gemma", r"`model\.layers\.0\.temporal_block` \(RecurrentGemmaRecurrentBlock\)"),
    ],
)
def test_models_that_leak_are_refused_packing_by_the_name_of_the_layer(architecture: str, module: str) -> None:
    with pytest.raises(ValueError, match=f'layout="packed" was asked for.*{module}'):
        CausalLMPolicy(tiny_policy_model(architecture), layout="packed").resolve_layout()
    policy = CausalLMPolicy(tiny_policy_model(architecture))
    with pytest.warns(UserWarning, match=f"padded, in rows of one.*{module}") as record:
        policy.resolve_layout()
    assert len(record) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert policy.resolve_layout() == policy.layout == "padded"


def test_padded_on_request_is_silent_and_never_packs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = CausalLMPolicy(tiny_policy_model("qwen3"), layout="padded")
        assert policy.resolve_layout() == "padded"
    with pytest.raises(ValueError, match=r'packs 2 segments into 1 rows.*layout="padded"'):
        policy(collate(trajectories(3, 4)))
    assert policy(filler_batch()).log_probs.shape == (0,)


def test_a_model_that_looks_ahead_is_no_policy() -> None:
    with pytest.raises(ValueError, match=r"no causal language model.*not causal.*attention"):
        CausalLMPolicy(tiny_policy_model("bert")).resolve_layout()


@pytest.mark.parametrize("layout", ["auto", "packed", "padded"])
def test_weights_that_are_no_numbers_are_named(layout) -> None:
    model = tiny_policy_model("qwen3")
    model.model.layers[1].mlp.up_proj.weight.data[3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"1 of 512 values of `model\.layers\.1\.mlp\.up_proj\.weight` are NaN"):
        CausalLMPolicy(model, layout=layout).resolve_layout()


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="torch module, got str"):
        CausalLMPolicy("a/path")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 'packd'"):
        CausalLMPolicy(tiny_policy_model(), layout="packd")  # type: ignore[arg-type]


def test_batches_that_are_none_are_refused_by_the_missing_field() -> None:
    policy = CausalLMPolicy(tiny_policy_model())
    policy.resolve_layout()
    with pytest.raises(TypeError, match=r"got dict without `input_ids`.*PackedDataModule"):
        policy({"input_ids": torch.zeros(1, 3)})

    class Unsegmented:
        input_ids = position_ids = segment_ids = torch.zeros(1, 3, dtype=torch.long)

    with pytest.raises(TypeError, match="got Unsegmented without `segment_starts`"):
        policy(Unsegmented())


def test_fillers_give_zero_gradients_to_every_parameter() -> None:
    model = tiny_policy_model("qwen3")
    CausalLMPolicy(model)(filler_batch()).log_probs.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_only_predicting_hidden_states_reach_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CausalLMPolicy(tiny_policy_model("qwen3"))
    policy.resolve_layout()
    seen: list[torch.Size] = []
    forward = policy.head.forward
    monkeypatch.setattr(
        policy.head, "forward", lambda hidden, *a, **k: seen.append(hidden.shape) or forward(hidden, *a, **k)
    )
    result = policy(collate(trajectories(9, 7, prompt=6)), entropy=True)
    assert seen == [torch.Size([4, 16])]
    assert result.entropy.shape == (4,)


def test_the_head_is_no_submodule_and_copies_share_nothing() -> None:
    model = tiny_policy_model("qwen3")
    policy = CausalLMPolicy(model)
    assert set(policy.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    batch = collate(trajectories(4, 3))
    reference = copy.deepcopy(policy)
    assert reference.head.output_layer is reference.model.lm_head
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert not torch.equal(reference(batch).log_probs, policy(batch).log_probs)


def test_router_losses_are_said_to_be_left_out() -> None:
    with pytest.warns(UserWarning, match="output_router_logits"):
        CausalLMPolicy(tiny_policy_model("mixtral", output_router_logits=True))


# --- adapters and modules of one's own -------------------------------------------------------------------------------


def lora(model: nn.Module, **options: object) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.5, init_lora_weights=False, **options))
    return adapted.train()


def test_adapters_are_packed_and_only_they_get_gradients() -> None:
    model = lora(tiny_policy_model("qwen3"), target_modules=["q_proj", "v_proj", "lm_head"])
    policy = CausalLMPolicy(model)
    attempts = trajectories(5, 7, 2)
    log_probs = policy(collate(attempts)).log_probs
    assert policy.attention == "segments"
    torch.testing.assert_close(log_probs.double(), oracle(model, attempts), rtol=0, atol=1e-5)
    log_probs.sum().backward()
    assert all((p.grad is not None) == ("lora" in name) for name, p in model.named_parameters())


def test_prompt_learning_is_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(tiny_policy_model("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="adapter 'default' is prompt learning"):
        CausalLMPolicy(model)


class OwnModule(nn.Module):
    """A recurrent model of one's own; `mix` says what it does with earlier tokens."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 16)
        self.position = nn.Embedding(64, 16)
        self.lm_head = nn.Linear(16, 32, bias=False)
        self.mix = mix


class Unsegmented(OwnModule):
    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.mix(self.embedding(input_ids) + self.position(position_ids), None)


class Segmented(OwnModule):
    def forward(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Tensor:
        return self.mix(self.embedding(input_ids) + self.position(position_ids), segment_ids)


def running_mean(hidden: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Mean over the earlier tokens of the same segment, or of the row."""
    mask = torch.ones(hidden.shape[1], hidden.shape[1]).tril().expand(hidden.shape[0], -1, -1)
    if segment_ids is not None:
        mask = mask * (segment_ids[:, :, None] == segment_ids[:, None, :])
    return torch.tanh(mask @ hidden / mask.sum(-1, keepdim=True))


def own_oracle(model: nn.Module, attempt: Trajectory) -> Tensor:
    ids = attempt.token_ids[None]
    segments = [torch.zeros_like(ids)] if isinstance(model, Segmented) else []
    logits = model.lm_head(model(ids, torch.arange(ids.shape[1])[None], *segments))
    return logits[0, :-1].log_softmax(-1).gather(1, attempt.token_ids[1:, None])[:, 0]


@pytest.mark.parametrize(("kind", "layout"), [(Segmented, "packed"), (Unsegmented, "padded")])
def test_own_modules(kind: type[OwnModule], layout: str) -> None:
    model = kind(running_mean)
    policy = quiet(model)
    assert policy.layout == layout
    attempts = trajectories(5, 7, 1, 2)
    expected = torch.cat([own_oracle(model, attempt) for attempt in attempts])
    for batch in [collate(attempts, layout="padded"), collate(attempts)][: 2 if layout == "packed" else 1]:
        torch.testing.assert_close(policy(batch).log_probs, expected, rtol=0, atol=1e-5)


def test_own_modules_that_ignore_segments_are_not_packed() -> None:
    model = Segmented(lambda hidden, _segments: running_mean(hidden, None))
    policy = CausalLMPolicy(model)
    with pytest.warns(UserWarning, match=r"segments see each other.*`the model` \(Segmented\)"):
        policy.resolve_layout()
    assert policy.layout == "padded"
    with pytest.raises(ValueError, match="takes no `segment_ids`"):
        CausalLMPolicy(Unsegmented(running_mean), layout="packed").resolve_layout()


def test_isolation_is_measured_in_half_precision_too() -> None:
    policy = quiet(tiny_policy_model("qwen3", dtype=torch.bfloat16))
    assert policy.attention == "segments"
    result = measure_isolation(policy, layout="packed")
    assert result.gradient == 0.0
    assert result.ok
