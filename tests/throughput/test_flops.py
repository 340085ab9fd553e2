"""FLOPs: by segment, by convention, by what is trained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.throughput import LayerShape, ModelShape, attention_pairs, model_flops

SMALL = ModelShape.decoder(hidden=64, layers=2, vocabulary=1000, feed_forward=256, query_heads=4)


def test_attention_follows_the_segments_not_the_row():
    # 12 x layers x width x sum of n^2, forward and backward
    assert model_flops(SMALL, [4, 4]).attention == 12 * 2 * 64 * (16 + 16) == 49_152
    assert model_flops(SMALL, [8]).attention == 98_304
    assert model_flops(SMALL, [4, 4], attention="causal_half").attention == 24_576
    assert model_flops(SMALL, [4, 4], attention="causal_half").convention == "causal_half"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked", "none"])
def test_pairs_against_counting_them(length, kind):
    window = 4
    layer = LayerShape(attention=kind, window=None if kind == "full" else window)

    def reach(token):
        return {"full": token + 1, "sliding": min(token + 1, window), "chunked": token % window + 1, "none": 0}[kind]

    exact = sum(reach(token) for token in range(length))
    # Half squares leave out half of their diagonals; past its width a window is no square any more.
    diagonal = {"none": 0, "sliding": min(length, window) / 2}.get(kind, length / 2)
    assert attention_pairs(length, convention="causal_half", layer=layer) == exact - diagonal
    assert attention_pairs(length, layer=layer) == 2 * (exact - diagonal)


def test_the_head_costs_scored_tokens_only():
    every, some = model_flops(SMALL, [10, 20]), model_flops(SMALL, [10, 20], scored=6)
    assert every.head == 6 * 64_000 * 30
    assert some.head == 6 * 64_000 * 6
    assert (some.body, some.attention) == (every.body, every.attention)


def test_recomputation_is_executed_but_not_model_work():
    plain = model_flops(SMALL, [10], scored=4)
    assert plain.hardware == plain.model
    head = model_flops(SMALL, [10], scored=4, recompute="head")
    assert head.model == plain.model
    assert head.recomputed == plain.head / 3
    everything = model_flops(SMALL, [10], scored=4, recompute="all")
    assert everything.hardware == pytest.approx(plain.model * 4 / 3)
    assert model_flops(SMALL, [10], recompute="layers", work="forward").recomputed == 0


def test_a_forward_pass_is_a_third():
    train, forward = (model_flops(SMALL, [7, 9], work=work).model for work in ("train", "forward"))
    assert train == 3 * forward


def test_frozen_weights_need_no_gradient_of_their_own():
    full, adapted = model_flops(SMALL, [10]), model_flops(SMALL, [10], adapter_weights=500)
    assert adapted.body == full.body * 2 / 3
    assert adapted.head == full.head * 2 / 3
    assert adapted.attention == full.attention
    assert adapted.adapters == 6 * 500 * 10


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8))
def test_segments_add_up_and_joining_them_costs_more(lengths):
    one_by_one = sum(model_flops(SMALL, [length]).model for length in lengths)
    assert model_flops(SMALL, lengths).model == pytest.approx(one_by_one)
    assert model_flops(SMALL, [sum(lengths)]).model >= one_by_one * (1 - 1e-12)


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="within their sum 5, got scored=6"):
        model_flops(SMALL, [5], scored=6)
    with pytest.raises(ValueError, match="must be >= 0"):
        model_flops(SMALL, [5, -1])
