from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from lit_rl.policy import attention_kernels
from lit_rl.policy.attention import (
    SegmentMask,
    Segments,
    attach_segment_attention,
    attention_name,
    detach_segment_attention,
    own_attention,
    packed_forward,
    register_segment_attention,
)
from lit_rl.policy.attention_kernels import AttentionPattern, attend_segments
from lit_rl.policy.mask_pattern import read_pattern
from lit_rl.testing import tiny_policy_model

register_segment_attention()


def plain_attention(query: Tensor, key: Tensor, value: Tensor, pattern: AttentionPattern, scaling: float) -> Tensor:
    """One segment [heads, length, size] token by token, from the definition."""
    shared_by = query.shape[0] // key.shape[0]
    outputs = []
    for head in range(query.shape[0]):
        for token in range(query.shape[1]):
            first = 0 if pattern.window is None else max(0, token - pattern.window + 1)
            if pattern.chunk is not None:
                first = max(first, token // pattern.chunk * pattern.chunk)
            scores = key[head // shared_by, first : token + 1] @ query[head, token] * scaling
            if pattern.softcap is not None:
                scores = pattern.softcap * torch.tanh(scores / pattern.softcap)
            if pattern.sinks is not None:
                scores = torch.cat([scores, pattern.sinks[head : head + 1]])
            weights = scores.softmax(0)[: token + 1 - first]
            outputs.append(weights @ value[head // shared_by, first : token + 1])
    return torch.stack(outputs).view(*query.shape[:2], -1)


def random_inputs(rows: int, width: int, heads: int, key_heads: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, 4), (key_heads, 4), (key_heads, 3))
    return tuple(
        torch.randn(rows, count, width, size, generator=generator, dtype=torch.float64) for count, size in shapes
    )


patterns = st.builds(
    AttentionPattern,
    window=st.none() | st.integers(1, 6),
    chunk=st.none() | st.integers(1, 6),
    softcap=st.none() | st.just(2.0),
    sinks=st.none() | st.just(torch.tensor([0.5, -1.0], dtype=torch.float64)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), patterns, st.sampled_from([1, 2]), st.integers(0, 99))
def test_each_segment_attends_to_itself_only(
    lengths: list[int], pattern: AttentionPattern, key_heads: int, seed: int
) -> None:
    query, key, value = random_inputs(1, sum(lengths), 2, key_heads, seed)
    cumulative = torch.tensor([0, *lengths]).cumsum(0)
    output = attend_segments(query, key, value, lengths, cumulative, pattern, scaling=0.7)
    pieces = zip(*(x[0].split(lengths, dim=1) for x in (query, key, value)), strict=True)
    expected = torch.cat([plain_attention(*piece, pattern, 0.7) for piece in pieces], dim=1)
    torch.testing.assert_close(output[0].transpose(0, 1), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block", [1, 3, 128])
def test_windows_are_computed_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(attention_kernels, "_SMALLEST_BLOCK", block)
    query, key, value = random_inputs(1, 23, 2, 1, seed=3)
    output = attend_segments(
        query, key, value, [20, 3], torch.tensor([0, 20, 23]), AttentionPattern(window=2), scaling=1.0
    )
    expected = plain_attention(query[0, :, :20], key[0, :, :20], value[0, :, :20], AttentionPattern(window=2), 1.0)
    torch.testing.assert_close(output[0, :20].transpose(0, 1), expected)


def test_rows_are_cut_at_segments_and_padding_is_a_piece_of_its_own() -> None:
    def cut(starts: list[int], lengths: list[int], rows: int, width: int) -> tuple[int, ...]:
        return Segments.from_rows(starts, lengths, rows=rows, width=width, device="cpu").lengths

    assert cut([0], [5], 1, 8) == (5, 3)
    assert cut([0, 3], [3, 5], 1, 8) == (3, 5)
    assert cut([0, 8, 10], [6, 2, 1], 2, 8) == (6, 2, 2, 1, 5)
    assert cut([8], [8], 2, 8) == (8, 8)  # a row of nothing but padding
    assert cut([2], [3], 1, 8) == (2, 3, 3)
    assert Segments.from_lengths([3, 2], device="cpu").cu_seqlens.tolist() == [0, 3, 5]


@pytest.mark.parametrize(
    ("starts", "lengths", "message"),
    [
        ([0, 3], [3, 0], "segment 1 has length 0"),
        ([0, 2], [3, 2], "segment 1 covers flat positions 2..3; expected it to begin at 3"),
        ([6], [3], "end within its row of 8"),
        ([14], [3], "end within its row of 8"),
    ],
)
def test_boundaries_that_cannot_be_are_refused(starts: list[int], lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segments.from_rows(starts, lengths, rows=2, width=8, device="cpu")


def test_outputs_and_gradients_are_finite_where_there_is_only_padding() -> None:
    query, key, value = (x.requires_grad_() for x in random_inputs(2, 8, 2, 2, seed=0))
    segments = Segments.from_rows([0], [5], rows=2, width=8, device="cpu")
    output = attend_segments(query, key, value, segments.lengths, segments.cu_seqlens, AttentionPattern())
    output[0, :5].sum().backward()
    assert output.isfinite().all()
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[0, :, 5:].any()
        assert not tensor.grad[1].any()


class Layer(nn.Module):
    """Stands for an attention layer; it is causal unless told otherwise."""

    is_causal = True
    num_key_value_groups = 1


def call(
    mask: object = None, name: str = "lit_rl_segments", layer: nn.Module | None = None, **options: object
) -> Tensor:
    query, key, value = random_inputs(1, 8, 2, 2, seed=5)
    return AttentionInterface()[name](layer or Layer(), query, key, value, mask, **options)[0]


SEGMENTS = Segments.from_lengths([5, 3], device="cpu")


def test_boundaries_may_come_as_arguments_or_in_place_of_the_mask() -> None:
    expected = call(SegmentMask(SEGMENTS, AttentionPattern()))
    torch.testing.assert_close(call(**SEGMENTS.keyword_arguments), expected, rtol=0, atol=0)
    assert not torch.allclose(call(), expected)


def test_a_window_may_come_as_an_argument_or_in_the_mask_function() -> None:
    expected = call(SegmentMask(SEGMENTS, AttentionPattern(window=2)))
    torch.testing.assert_close(call(sliding_window=2, **SEGMENTS.keyword_arguments), expected, rtol=0, atol=0)
    assert not torch.allclose(call(SegmentMask(SEGMENTS, AttentionPattern())), expected)


def test_a_mask_that_the_model_built_is_cut_into_its_diagonal_blocks() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]
    expected = call(SegmentMask(SEGMENTS, AttentionPattern()))
    torch.testing.assert_close(call(mask, **SEGMENTS.keyword_arguments), expected)
    additive = torch.zeros(8, 8, dtype=torch.float64).masked_fill(~mask[0, 0], -1e30)[None, None]
    torch.testing.assert_close(call(additive, **SEGMENTS.keyword_arguments), expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"block_table": 3}, "block_table"),
        ({"output_attentions": True}, "output_attentions"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(NotImplementedError, match=named):
        call(**SEGMENTS.keyword_arguments, **options)


def test_layers_that_are_not_causal_are_refused() -> None:
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(NotImplementedError, match="causal"):
        call(layer=layer, **SEGMENTS.keyword_arguments)


def test_segments_cannot_be_combined_with_a_cache() -> None:
    query, key, value = random_inputs(1, 8, 2, 2, seed=5)
    with pytest.raises(NotImplementedError, match="key-value cache"):
        AttentionInterface()["lit_rl_segments"](
            Layer(), query[:, :, :5], key, value, None, **Segments.from_lengths([5], device="cpu").keyword_arguments
        )


@pytest.mark.parametrize("window", [None, 2, 9])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_variable_length_kernel_gets_the_same_pattern(
    monkeypatch: pytest.MonkeyPatch, window: int | None, chunk: int | None
) -> None:
    """The kernel itself needs a GPU; here a stand-in follows its documentation."""

    def stand_in(
        query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **options
    ) -> Tensor:
        left, right = options["window_size"]
        bounds = cu_q.tolist()
        assert torch.equal(cu_q, cu_k)
        assert cu_q.dtype == torch.int32
        assert (right, max_q, max_k) == (0, int(cu_q.diff().max()), int(cu_q.diff().max()))
        assert options["enable_gqa"]
        assert all(x.is_contiguous() for x in (query, key, value))
        pattern = AttentionPattern(window=None if left < 0 else left + 1)
        outputs = []
        for start, end in itertools.pairwise(bounds):
            piece = (x[start:end].transpose(0, 1) for x in (query, key, value))
            outputs.append(plain_attention(*piece, pattern, options["scale"]).transpose(0, 1))
        return torch.cat(outputs)

    query, key, value = random_inputs(2, 4, 2, 1, seed=7)
    segments = Segments.from_rows([0, 4], [4, 3], rows=2, width=4, device="cpu")
    arguments = (query, key, value, segments.lengths, segments.cu_seqlens, AttentionPattern(window=window, chunk=chunk))
    expected = attend_segments(*arguments, scaling=0.5)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    monkeypatch.setattr(attention_kernels, "_has_varlen_kernel", lambda *_: True)
    torch.testing.assert_close(attend_segments(*arguments, scaling=0.5), expected)


def test_under_autocast_queries_take_the_precision_of_the_values() -> None:
    query, key, value = (x.float() for x in random_inputs(1, 8, 2, 2, seed=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend_segments(query, key, value.bfloat16(), [5, 3], SEGMENTS.cu_seqlens, AttentionPattern())
    assert output.dtype == torch.bfloat16


def mask_functions() -> list[tuple[object, tuple[int | None, int | None]]]:
    sliding = masking_utils.sliding_window_causal_mask_function(4)
    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    packed = masking_utils.packed_sequence_mask_function(positions)
    remapped = masking_utils.remap_positions_for_packed_sequence(sliding, positions)
    return [
        (masking_utils.causal_mask_function, (None, None)),
        (sliding, (4, None)),
        (chunked, (None, 3)),
        (masking_utils.and_masks(remapped, packed), (4, None)),
        (masking_utils.and_masks(sliding, masking_utils.sliding_window_overlay(2)), (2, None)),
    ]


@pytest.mark.parametrize("index", range(5))
def test_mask_functions_are_read(index: int) -> None:
    function, expected = mask_functions()[index]
    pattern = read_pattern(function)
    assert pattern is not None
    assert (pattern.window, pattern.chunk) == expected


def test_mask_functions_that_are_not_known_or_not_causal_are_not_guessed() -> None:
    assert read_pattern(lambda b, h, q, k: k <= q) is None
    assert read_pattern(masking_utils.bidirectional_mask_function) is None
    assert read_pattern(masking_utils.sliding_window_overlay(3)) is None
    assert read_pattern(masking_utils.or_masks(masking_utils.causal_mask_function, lambda *_: True)) is None
    custom = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q - k) % 2 == 0)
    assert read_pattern(custom) is None


def test_masks_are_the_models_own_outside_of_a_packed_forward_pass() -> None:
    arguments = {
        "batch_size": 1,
        "q_length": 8,
        "kv_length": 8,
        "mask_function": masking_utils.causal_mask_function,
        "allow_is_causal_skip": False,
        "dtype": torch.float32,
        "device": "cpu",
    }
    for base, name in (("sdpa", "lit_rl_segments"), ("eager", "lit_rl_segments_eager")):
        interface = AttentionMaskInterface()
        torch.testing.assert_close(interface[name](**arguments), interface[base](**arguments), rtol=0, atol=0)
        with packed_forward(SEGMENTS):
            assert isinstance(interface[name](**arguments), SegmentMask)
            padding = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]], dtype=torch.bool)
            assert isinstance(interface[name](**arguments, attention_mask=padding), Tensor)
            assert isinstance(interface[name](**arguments, attention_mask=padding | True), SegmentMask)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_is_attached_and_given_back(implementation: str) -> None:
    model = tiny_policy_model("qwen3")
    model.set_attn_implementation(implementation)
    ids = torch.arange(3, 12)[None]
    before = model(ids).logits
    assert attach_segment_attention(model) is None
    assert attach_segment_attention(model) is None
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
    with own_attention(model):
        assert attention_name(model) == implementation
    assert attention_name(model) not in ("sdpa", "eager")
    assert "lit_rl" not in model.config.to_json_string()
    detach_segment_attention(model)
    assert attention_name(model) == implementation


def test_models_with_an_attention_of_their_own_say_so() -> None:
    assert "BloomForCausalLM" in str(attach_segment_attention(tiny_policy_model("bloom")))
    model = tiny_policy_model("qwen3")
    model.config._attn_implementation = "flex_attention"
    assert "'flex_attention'" in str(attach_segment_attention(model))
