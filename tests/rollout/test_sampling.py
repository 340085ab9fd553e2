from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.rollout.sampling import derive_seed, sample_tokens, uniforms


def test_seeds_are_the_same_everywhere() -> None:
    # BLAKE2b-64 of '[0, 3, "task", 1]', shifted to 63 bits: a constant, not something this process made up.
    assert derive_seed(0, 3, "task", 1) == 3606756399507657133
    seeds = {derive_seed(0, i, "task", a, t) for i in range(8) for a in range(8) for t in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_uniforms_are_splitmix64() -> None:
    # The first outputs of SplitMix64 for the seed 1234567, as published with the generator's reference code.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert uniforms([1234567], 4).squeeze(1).tolist() == [(value >> 11) * 2.0**-53 for value in expected]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5), st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_uniforms_of_a_seed_do_not_depend_on_the_others(seeds: list[int], count: int) -> None:
    together = uniforms(seeds, count)
    assert together.dtype == torch.float64
    assert bool(((together >= 0) & (together < 1)).all())
    for column, seed in enumerate(seeds):
        assert torch.equal(together[:, column], uniforms([seed], count + 3)[:count, 0])


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.09, 0), (0.11, 1), (0.29, 1), (0.31, 2), (1 - 2**-53, 2)])
def test_inverse_of_the_cumulative_distribution(uniform: float, token: int) -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log()
    ids, log_probs = sample_tokens(logits, 1.0, torch.tensor([uniform], dtype=torch.float64))
    assert ids.tolist() == [token]
    assert log_probs.item() == pytest.approx(math.log([0.1, 0.2, 0.7][token]), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_sampled(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.3, -math.inf, -math.inf]])
    ids, log_probs = sample_tokens(logits, 1.0, torch.tensor([uniform], dtype=torch.float64))
    assert (ids.tolist(), log_probs.tolist()) == ([1], [0.0])


@given(st.integers(0, 2**32), st.integers(2, 300), st.sampled_from([0.05, 1.0, 20.0]))
@settings(max_examples=50, deadline=None)
def test_the_last_possible_uniform_samples_a_possible_token(seed: int, vocabulary: int, temperature: float) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed))
    logits[:, -1] = -math.inf
    ids, log_probs = sample_tokens(logits, temperature, torch.full((4,), 1 - 2**-53, dtype=torch.float64))
    assert bool((ids < vocabulary - 1).all())
    assert bool(log_probs.isfinite().all())


def test_temperature_divides_logits_before_the_softmax() -> None:
    logits = torch.tensor([[0.0, math.log(2.0)]])
    _, log_probs = sample_tokens(logits, 0.5, torch.tensor([0.9], dtype=torch.float64))
    assert log_probs.item() == pytest.approx(math.log(0.8), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probabilities_have_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    _, log_probs = sample_tokens(torch.zeros(2, 3, dtype=dtype), 1.0, torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert log_probs.dtype == dtype


def test_frequencies_are_the_probabilities() -> None:
    count = 20_000
    logits = torch.tensor([0.0, 1.0, -0.5, 0.3])
    uniform = uniforms(list(range(count)), 1)[0]
    ids, _ = sample_tokens(logits.expand(count, -1), 0.7, uniform)
    expected = torch.softmax(logits / 0.7, dim=-1)
    deviation = (expected * (1 - expected) / count).sqrt()
    found = torch.bincount(ids, minlength=4) / count
    assert bool(((found - expected).abs() < 4 * deviation).all())
