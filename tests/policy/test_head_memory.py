from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lit_rl.policy.head import LogProbHead
from tests.policy.head_oracle import peak_bytes

CHUNK = 64
VOCABULARY = 32_000


def head_memory(
    tokens: int,
    mode: str,
    *,
    chunk_tokens: int | None = CHUNK,
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    entropy: bool = False,
    vocabulary: int = VOCABULARY,
) -> int:
    """Bytes of one forward and backward beyond the inputs and their gradients."""
    torch.manual_seed(0)
    head = LogProbHead(nn.Linear(width, vocabulary, bias=False, dtype=dtype), chunk_tokens=chunk_tokens)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    targets, upstream = torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens)

    def two_pass() -> None:
        scores = head(hidden, targets, entropy=entropy)
        total = (scores.log_probs * upstream).sum() + (scores.entropy.sum() if entropy else 0.0)
        total.backward()

    def one_pass() -> None:
        head.loss(hidden, targets, lambda log_probs, part: log_probs * upstream[part])[0].backward()

    runs: dict[str, Callable[[], None]] = {"two_pass": two_pass, "one_pass": one_pass}
    return peak_bytes(runs[mode], lambda: [hidden.grad, *(parameter.grad for parameter in head.parameters())])


@pytest.mark.parametrize("mode", ["two_pass", "one_pass"])
def test_memory_follows_the_chunk_and_not_the_tokens(mode: str) -> None:
    few, many = head_memory(128, mode), head_memory(2048, mode)
    assert abs(many - few) < 0.1 * few
    assert many < 1.25 * CHUNK * VOCABULARY * 4


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("chunk_tokens", "share"), [(32, 0.85), (256, 0.5)])
def test_two_passes_never_hold_a_chunk_of_logits(chunk_tokens: int, share: float, entropy: bool) -> None:
    memory = head_memory(512, "two_pass", chunk_tokens=chunk_tokens, entropy=entropy, width=64)
    assert memory < share * chunk_tokens * VOCABULARY * 4


def test_wide_models_stay_within_the_chunk() -> None:
    # A block of the weight's gradient is as wide as the model: at 64 tokens it could outweigh the logits.
    for mode in ("two_pass", "one_pass"):
        assert head_memory(128, mode, width=768) < 1.25 * CHUNK * VOCABULARY * 4


def test_sixteen_bit_weights_need_no_float32_copy() -> None:
    memory = head_memory(512, "two_pass", chunk_tokens=None, width=256, dtype=torch.bfloat16, vocabulary=64_000)
    weight_in_float32 = 64_000 * 256 * 4
    assert memory < 0.8 * weight_in_float32


def test_the_default_chunk_of_one_pass_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rl.policy.head_tiles.CHUNK_BYTES", 4 * 2**20)
    few, many = (head_memory(tokens, "one_pass", chunk_tokens=None) for tokens in (64, 512))
    assert few < 1.25 * 4 * 2**20
    assert many < 1.25 * 4 * 2**20


def test_fewer_tokens_than_a_chunk_take_less() -> None:
    assert head_memory(8, "one_pass", chunk_tokens=1000) < 3 * 8 * VOCABULARY * 4
