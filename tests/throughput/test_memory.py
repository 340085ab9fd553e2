"""Memory by part, and the fit behind a token budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lit_rl.testing import tiny_config
from lit_rl.throughput import (
    Measurement,
    MemoryFit,
    ModelShape,
    activation_bytes,
    fit_memory,
    logits_bytes,
    memory_breakdown,
    recommend_budget,
)


@pytest.mark.parametrize(
    ("tokens", "head", "gigabytes"),
    [
        (4096, "full", 7.5),
        (16_384, "full", 29.9),
        (4096, "chunked", 3.7),
        (16_384, "chunked", 11.2),
        (4096, "recomputed", 2.2),
        (16_384, "recomputed", 2.2),
    ],
)
def test_logits_of_qwen3_0_6b(tokens, head, gigabytes):
    assert round(logits_bytes(151_936, 1024, tokens, head=head) / 1e9, 1) == gigabytes


def test_who_is_largest_in_a_32k_microbatch_of_8b():
    shape = ModelShape.from_config("qwen3-8b")
    parts = {head: memory_breakdown(shape, 32_768, head=head).by_part() for head in ("full", "chunked", "recomputed")}
    order = {head: sorted(part, key=part.get, reverse=True) for head, part in parts.items()}
    state = sum(parts["full"][name] for name in ("parameters", "gradients", "optimizer"))
    assert state == pytest.approx(16 * 8_190_735_360 / 8)
    assert order["full"][0] == "logits"
    assert parts["full"]["logits"] > state
    assert order["chunked"][:2] == ["activations", "logits"]
    assert order["recomputed"].index("logits") > 3


@pytest.mark.parametrize(
    ("precision", "parts"), [("bf16-mixed", (4, 4, 8)), ("bf16-true", (2, 2, 4)), ("32-true", (4, 4, 8))]
)
def test_bytes_per_parameter_are_sharded(precision, parts):
    shape = ModelShape.decoder(hidden=64, layers=2, vocabulary=1000, feed_forward=256, query_heads=4)
    found = memory_breakdown(shape, 100, shards=4, precision=precision)
    assert (found.parameters, found.gradients, found.optimizer) == tuple(b * shape.parameters / 4 for b in parts)
    adapter = memory_breakdown(shape, 100, shards=1, precision=precision, trainable_weights=10)
    assert (adapter.gradients, adapter.optimizer) == (10 * parts[1], 10 * parts[2])
    assert adapter.parameters == parts[0] * shape.parameters


def test_kept_activations_are_those_autograd_keeps():
    config = tiny_config("llama", hidden_size=64, intermediate_size=160, head_dim=16, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    kept: dict[int, int] = {}

    def keep(tensor):
        if tensor.dtype == torch.float32 and not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = 48
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.model(torch.arange(tokens)[None] % 30).last_hidden_state
    measured = sum(size for pointer, size in kept.items() if pointer not in weights)
    assert hidden.requires_grad
    estimate = activation_bytes(ModelShape.from_config(config), tokens, checkpointing="none", bytes_per_value=4)
    assert estimate == pytest.approx(measured, rel=0.25)


def test_checkpointing_keeps_less():
    shape = ModelShape.from_config("qwen3-8b")
    none, selective, full = (activation_bytes(shape, 1000, checkpointing=c) for c in ("none", "selective", "full"))
    assert none > selective > full
    assert selective == 4 * 4096 * 36 * 2 * 1000
    assert full == (4096 * 36 + none / 2 / 1000 / 36) * 2 * 1000


def test_impossible_microbatches_are_refused():
    shape = ModelShape.decoder(hidden=8, layers=1, vocabulary=10, feed_forward=8, query_heads=1)
    with pytest.raises(ValueError, match="tokens >= 1"):
        memory_breakdown(shape, 0)


@given(st.floats(1e8, 1e10), st.floats(1e3, 1e6), st.floats(0, 1e6))
def test_an_exact_plane_is_found(fixed, per_token, per_longest):
    points = [(1000, 250), (1000, 1000), (2000, 500), (4000, 1000), (4000, 4000)]
    measured = [
        Measurement(tokens=tokens, longest=longest, peak_bytes=fixed + per_token * tokens + per_longest * longest)
        for tokens, longest in points
    ]
    fit = fit_memory(measured)
    truth = fixed + per_token * 16_000 + per_longest * 2000
    assert fit.predict(16_000, 2000) == pytest.approx(truth, rel=0.01)


def test_no_coefficient_is_negative():
    # Longer segments that seem to save memory are noise; they must not be promised.
    points = [(1000, 250, 2.00e9), (1000, 1000, 1.98e9), (2000, 500, 3.0e9), (2000, 2000, 2.96e9)]
    fit = fit_memory([Measurement(tokens=t, longest=n, peak_bytes=b) for t, n, b in points])
    assert min(fit.fixed, fit.per_token, fit.per_longest) >= 0
    assert fit.per_longest == 0
    assert 0 < fit.worst_error < 0.02
    with pytest.raises(ValueError, match="at least 3"):
        fit_memory([Measurement(tokens=1, longest=1, peak_bytes=1.0)] * 2)


def test_the_recommendation_leaves_the_margin():
    fit = MemoryFit(fixed=4e9, per_token=2e6, per_longest=1e6, worst_error=0.01)
    advice = recommend_budget(fit, context=2000, limit_bytes=40e9, margin=0.1)
    # (36e9 - 4e9 - 2000 x 1e6) / 2e6 = 15000, rounded down to a multiple of 256
    assert advice.max_tokens == 14_848
    assert fit.predict(advice.max_tokens, 2000) == advice.predicted_bytes <= 36e9
    assert "max_tokens=14848" in advice.sentence


def test_a_context_that_does_not_fit_is_an_error():
    fit = MemoryFit(fixed=4e9, per_token=2e6, per_longest=1e6, worst_error=0.01)
    with pytest.raises(ValueError, match=r"one trajectory of 16,000 tokens needs 52.00 GB.*leaves 36.00 GB"):
        recommend_budget(fit, context=16_000, limit_bytes=40e9)
    tight = recommend_budget(fit, context=10_600, limit_bytes=40e9)
    assert tight.max_tokens == 10_600  # never below the longest trajectory
