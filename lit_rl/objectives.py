"""Per-token losses, as pure functions on flat [M] tensors of scored tokens.

None of them averages: a step's loss is the sum of weight x loss (see `lit_rl.normalization`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# exp of more than this has no use as a ratio and would overflow float16.
_LARGEST_LOG_RATIO = 20.0


def clipped_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """PPO's clipped surrogate, with separate clips below and above.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = exp(log_probs - old_log_probs).

    Args:
        log_probs: [M] log-probabilities in nats, with gradient.
        old_log_probs: [M] before the iteration's first update; `None` means on-policy: `log_probs` itself,
            detached, so that the ratio is exactly 1.
        advantages: [M].
        clip_low: How far the ratio may fall below 1, in [0, 1].
        clip_high: How far it may rise above 1; larger than `clip_low` is DAPO's clip-higher.

    Returns:
        [M] losses.

    Source: Schulman et al. 2017 (PPO), eq. 7; Yu et al. 2025 (DAPO), section 3.1.

    Example:
        >>> old = torch.zeros(2)
        >>> clipped_ratio(torch.tensor([0.5, 0.5]), old, torch.tensor([1.0, -1.0])).tolist()
        [-1.2000000476837158, 1.6487212181091309]
    """
    ratio = _log_ratio(log_probs, old_log_probs).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def reinforce(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """The plain policy gradient: -A * log_prob.

    Args:
        log_probs: [M] log-probabilities in nats, with gradient.
        advantages: [M].

    Returns:
        [M] losses.

    Source: Williams 1992 (REINFORCE).

    Example:
        >>> reinforce(torch.tensor([-2.0]), torch.tensor([0.5])).tolist()
        [1.0]
    """
    return -advantages * log_probs


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.2,
) -> Tensor:
    """REINFORCE weighted by a clipped, detached ratio: clipping bounds the weight and never drops a token.

    Args:
        log_probs: [M] log-probabilities in nats, with gradient.
        old_log_probs: [M], or `None` for on-policy.
        advantages: [M].
        clip_low: How far the weight may fall below 1.
        clip_high: How far it may rise above 1.

    Returns:
        [M] losses.

    Source: MiniMax 2025 (CISPO), eq. 4.

    Example:
        >>> cispo(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([1.0])).tolist()
        [1.2000000476837158]
    """
    ratio = _log_ratio(log_probs, old_log_probs).exp().detach()
    return -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages * log_probs


def supervised(log_probs: Tensor) -> Tensor:
    """Negative log-likelihood of the scored tokens: imitation, whatever the advantages.

    Args:
        log_probs: [M] log-probabilities in nats, with gradient.

    Returns:
        [M] losses.

    Example:
        >>> supervised(torch.tensor([-0.5])).tolist()
        [0.5]
    """
    return -log_probs


def importance_weights(
    log_probs: Tensor,
    sampler_log_probs: Tensor,
    *,
    mode: Literal["truncate", "mask"] = "truncate",
    level: Literal["token", "sequence"] = "token",
    limit: float = 2.0,
    segments: Tensor | None = None,
) -> Tensor:
    """Detached weights that correct for a sampler whose probabilities differ from the trainer's.

    Args:
        log_probs: [M] the trainer's log-probabilities before the first update, in nats.
        sampler_log_probs: [M] the sampler's.
        mode: "truncate" caps the ratio at `limit`; "mask" gives 0 to tokens outside [1 / limit, limit].
        level: "token" looks at each token; "sequence" at the summed log-ratio of its segment.
        limit: Greater than 1.
        segments: int64 [M] segment of each token (`batch.scored_segments`); needed for level "sequence".

    Returns:
        [M] weights to multiply losses with.

    Raises:
        ValueError: `limit` is not above 1, or `segments` is missing for level "sequence".

    Source: Yao et al. 2025 (truncated importance sampling); IcePop for "mask".

    Example:
        >>> importance_weights(torch.tensor([0.0, -1.0]), torch.tensor([-2.0, -1.0])).tolist()
        [2.0, 1.0]
    """
    if not limit > 1:
        raise ValueError(f"`limit` must be greater than 1, got {limit}")
    log_ratio = (log_probs - sampler_log_probs).detach()
    if level == "sequence":
        if segments is None:
            raise ValueError("level 'sequence' needs `segments` (`batch.scored_segments`)")
        sums = log_ratio.new_zeros(int(segments.max()) + 1 if segments.numel() else 0)
        log_ratio = sums.index_add(0, segments, log_ratio)[segments]
    ratio = log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    if mode == "truncate":
        return ratio.clamp(max=limit)
    return torch.where((ratio >= 1.0 / limit) & (ratio <= limit), ratio, torch.zeros_like(ratio))


class RatioDiagnostics(NamedTuple):
    """Per-token diagnostics of a ratio, detached; each [M], to be averaged over tokens.

    Attributes:
        ratio: exp(log_probs - old_log_probs).
        clipped_low: 1.0 where the clip below is active (negative advantage), else 0.0.
        clipped_high: 1.0 where the clip above is active (positive advantage), else 0.0.
        kl: The k3 estimate of KL(old || new), ratio - 1 - log ratio (Schulman 2020), in nats.
    """

    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor


@torch.no_grad()
def ratio_diagnostics(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> RatioDiagnostics:
    """How far the policy has moved since the iteration's first update.

    Args:
        log_probs: [M] log-probabilities in nats.
        old_log_probs: [M], or `None` for on-policy.
        advantages: [M].
        clip_low: As in `clipped_ratio`.
        clip_high: As in `clipped_ratio`.

    Returns:
        Per-token diagnostics.

    Example:
        >>> ratio_diagnostics(torch.tensor([0.0]), None, torch.tensor([1.0])).ratio.tolist()
        [1.0]
    """
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = log_ratio.exp()
    low = ((ratio < 1.0 - clip_low) & (advantages < 0)).to(ratio.dtype)
    high = ((ratio > 1.0 + clip_high) & (advantages > 0)).to(ratio.dtype)
    return RatioDiagnostics(ratio, low, high, ratio - 1.0 - log_ratio)


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor | None) -> Tensor:
    old = log_probs.detach() if old_log_probs is None else old_log_probs.to(log_probs.dtype)
    return (log_probs - old).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
