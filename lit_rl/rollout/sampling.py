"""Sampling without state: every random number is a function of where it is used, so order and ranks do not matter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MIX = np.uint64(0x94D049BB133111EB)


def derive_seed(*parts: str | int) -> int:
    """Derives an integer seed from a name, the same in every process, on every machine and after every restart.

    Args:
        parts: What the seed belongs to, for example (seed, iteration, task id, attempt, turn).

    Returns:
        A number in [0, 2**63): the first bits of the BLAKE2b digest of the parts.

    Example:
        >>> derive_seed(0, 1, "task") == derive_seed(0, 1, "task"), derive_seed(1, "1") == derive_seed("1", 1)
        (True, False)
    """
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """Draws uniform numbers, `count` for each seed.

    The generator is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014): the
    i-th number is a hash of `seed + i * gamma`, so all seeds advance in one array operation and a longer draw
    begins with the shorter one.

    Args:
        seeds: B integers in [0, 2**64).
        count: Numbers per seed.

    Returns:
        float64 [count, B] in [0, 1), on the CPU.

    Example:
        >>> uniforms([1, 2], 3).shape, bool((uniforms([7], 5)[:2] == uniforms([7], 2)).all())
        (torch.Size([3, 2]), True)
    """
    index = np.arange(1, count + 1, dtype=np.uint64)[:, None]
    state = np.array(seeds, dtype=np.uint64)[None, :] + index * _GOLDEN_GAMMA
    state = (state ^ (state >> np.uint64(30))) * _FIRST_MIX
    state = (state ^ (state >> np.uint64(27))) * _SECOND_MIX
    state = state ^ (state >> np.uint64(31))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample_tokens(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token per row by inverting the cumulative distribution at a given uniform number.

    Args:
        logits: [B, V] as the head gives them, before temperature.
        temperature: Greater than 0; the logits are divided by it.
        uniform: float64 [B] in [0, 1).

    Returns:
        The sampled ids, int64 [B], and their log-probabilities in nats at that temperature, in the dtype of `logits`
        ([B], float32, or float64 for a float64 model). A token of probability 0 is never sampled.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
        >>> ids, log_probs = sample_tokens(logits, 1.0, torch.tensor([0.4, 0.6], dtype=torch.float64))
        >>> ids.tolist(), round(log_probs[0].item(), 4)
        ([0, 1], -0.6931)
    """
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    # Below the total even after rounding, as `uniform` is at most 1 - 2**-53: an entry above the target exists.
    target = uniform[:, None] * cumulative[:, -1:]
    # Clamped for NaN only, which the caller reports: an index out of range would end the process on a GPU.
    ids = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)
    return ids.squeeze(-1), log_probs.gather(-1, ids).squeeze(-1)
