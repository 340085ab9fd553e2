"""Decode and training rates, and the accelerators that they are computed for."""

from __future__ import annotations

import pytest

from lit_rl.testing import tiny_config
from lit_rl.throughput import (
    ACCELERATORS,
    Accelerator,
    ModelShape,
    bandwidth_share,
    decode_rate,
    find_accelerator,
    known_accelerator,
    read_seconds,
    read_weights,
    sequences_that_fit,
    train_rate,
)


@pytest.fixture(scope="module")
def qwen():
    return ModelShape.from_config("qwen3-8b")


def test_a_decode_step_reads_weights_once_and_every_cache():
    # (14e9 + 131072 x 4096) / 4.8e12 = 3.03 ms; 64 caches: (14e9 + 34.36e9) / 4.8e12 = 10.07 ms
    one, many = (read_seconds(14e9, 131_072, batch=batch, context=4096, bandwidth=4.8e12) for batch in (1, 64))
    assert (round(1e3 * one, 2), round(1 / one)) == (3.03, 330)
    assert (round(1e3 * many, 2), round(64 / many)) == (10.07, 6352)
    assert bandwidth_share(700e9, 1.0, 2e12) == 0.35


@pytest.mark.parametrize(("batch", "context", "expected"), [(64, 2048, 8600), (64, 16_384, 1800), (256, 16_384, 1935)])
def test_qwen3_8b_on_an_h200(qwen, batch, context, expected):
    rate = decode_rate(qwen, "h200", batch=batch, context=context)
    # 2 x 8.19e9 bytes of weights + batch x context x 147456 bytes of cache, over 4.8e12 bytes/s
    by_hand = batch / ((2 * 8_190_735_360 + batch * context * 147_456) / 4.8e12)
    assert rate.tokens_per_second == pytest.approx(by_hand)
    assert rate.tokens_per_second == pytest.approx(expected, rel=3e-3)
    assert rate.bound == "memory"


def test_the_rounded_size_of_the_model_card_gives_the_published_figure(qwen):
    rate = decode_rate(qwen, "h200", batch=256, context=16_384, parameters=8.2e9)
    assert round(rate.tokens_per_second) == 1935


def test_training_rate(qwen):
    assert train_rate(qwen, "h200", mfu=0.4) == pytest.approx(0.4 * 989.4e12 / (6 * 8_190_735_360))
    assert round(train_rate(qwen, "h200"), -2) == 8100
    assert round(train_rate(qwen, "h200", parameters=8.2e9), -3) == 8000
    # Counted: 7.568e9 weights of which the head only for a quarter, and 4 x 36 x 4096 x 24000 FLOPs of attention
    body, head = 8_190_735_360 - 2 * 622_329_856 - 36 * 8448 - 4096, 622_329_856
    forward = 2 * body + 2 * head / 4 + 4 * 36 * 4096 * 24_000
    counted = train_rate(qwen, "h200", counting="counted", length=24_000, scored_share=0.25)
    assert counted == pytest.approx(0.4 * 989.4e12 / (3 * forward))
    with pytest.raises(ValueError, match="means 40%"):
        train_rate(qwen, "h200", mfu=40)


def test_counted_leaves_out_the_table_that_is_only_looked_up(qwen):
    assert read_weights(qwen, 1) - read_weights(qwen, 1, counting="counted") == 151_936 * 4096
    tied = ModelShape.from_config("qwen3-0.6b")
    assert read_weights(tied, 1) == read_weights(tied, 1, counting="counted")


def test_experts_that_nobody_was_sent_to_are_not_read():
    shape = ModelShape.from_config("mixtral-8x7b")
    expert = 32 * 3 * 4096 * 14_336
    # one token reads 2 of 8 experts; two tokens 8 x (1 - 0.75^2) = 3.5; many read all
    assert read_weights(shape, 1) == pytest.approx(shape.active_parameters)
    assert read_weights(shape, 2) == pytest.approx(shape.parameters - 4.5 * expert)
    assert read_weights(shape, 512) == pytest.approx(shape.parameters)


def test_a_large_batch_of_short_contexts_is_bound_by_compute(qwen):
    rate = decode_rate(qwen, "h200", batch=4096, context=16)
    assert rate.bound == "compute"
    assert rate.seconds == pytest.approx(2 * 4096 * 8_190_735_360 / 989.4e12)


def test_bits_and_what_fits(qwen):
    narrow = decode_rate(qwen, "h200", batch=64, context=16_384, cache_bits=8)
    wide = decode_rate(qwen, "h200", batch=64, context=16_384)
    assert narrow.cache_bytes == wide.cache_bytes / 2
    # 0.9 x 141e9 - 16.4e9 = 110.5e9 bytes for caches of 2.416e9
    assert sequences_that_fit(qwen, "h200", context=16_384) == 45
    assert sequences_that_fit(ModelShape.from_config("llama-3.1-70b"), "h100", context=2048) == 0


def test_without_a_cache_there_is_no_limit(qwen):
    mamba = ModelShape.from_config(tiny_config("mamba"))
    assert sequences_that_fit(mamba, "h200", context=16_384) is None
    assert sequences_that_fit(mamba, Accelerator(name="x", peak_flops=1, bandwidth=1, memory=1), context=16_384) == 0
    # A cache that is scaled to next to nothing is still there.
    small = qwen.with_cache_scaled(0.0001)
    assert small.cache_bytes(16_384) == pytest.approx(0.0001 * qwen.cache_bytes(16_384))
    assert sequences_that_fit(small, "h200", context=16_384) == pytest.approx(455_000, rel=0.02)


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("h100", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
    ],
)
def test_peaks_are_dense(device, tera):
    assert find_accelerator(device).peak_flops == tera * 1e12


@pytest.mark.parametrize(
    "device", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", "h2000", ""]
)
def test_no_device_is_guessed(device):
    assert known_accelerator(device) is None
    with pytest.raises(ValueError, match=r"unknown accelerator.*--peak-tflops.*Accelerator\("):
        find_accelerator(device)


def test_every_entry_has_a_source_and_a_date():
    assert len(ACCELERATORS) >= 20
    assert all(entry.source and entry.date for entry in ACCELERATORS.values())
    with pytest.raises(ValueError, match="`bandwidth` must be > 0"):
        Accelerator(name="x", peak_flops=1.0, bandwidth=0.0, memory=1.0)
