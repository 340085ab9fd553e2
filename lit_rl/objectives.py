"""Per-token losses, as pure functions on flat [M] tensors of scored tokens.

None of them averages: a step's loss is the sum of weight x loss (see `lit_rl.normalization`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_rl.options import check_choices

ObjectiveName = Literal["clipped_ratio", "gspo", "cispo", "reinforce", "supervised"]
Correction = Literal["none", "truncate", "mask"]
CorrectionMode = Literal["truncate", "mask"]
CorrectionLevel = Literal["token", "sequence"]

# How far the ratio may fall below and rise above 1, where the user does not say: as in the papers.
DEFAULT_CLIPS: dict[ObjectiveName, tuple[float, float]] = {
    "clipped_ratio": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.2),
    "reinforce": (0.2, 0.2),
    "supervised": (0.2, 0.2),
}
assert set(DEFAULT_CLIPS) == set(get_args(ObjectiveName))

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


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    segments: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The clipped surrogate with one ratio per trajectory: the geometric mean of its tokens' ratios.

    Each token's loss has the value of its trajectory's; its gradient goes through its own log-probability. With
    `sequence_mean` weights the step is the paper's objective. Not local to a token: the ratio needs all of a segment.

    Args:
        log_probs: [M] log-probabilities in nats, with gradient.
        old_log_probs: [M] before the iteration's first update, or `None` for on-policy.
        advantages: [M].
        segments: int64 [M] segment of each token (`batch.scored_segments`).
        clip_low: How far the trajectory's ratio may fall below 1.
        clip_high: How far it may rise above 1.

    Returns:
        [M] losses.

    Source: Zheng et al. 2025 (GSPO), eq. 5 and 14 (GSPO-token).

    Example:
        >>> moved, segments = torch.tensor([0.2, 0.0, 0.1]), torch.tensor([0, 0, 1])
        >>> gspo(moved, torch.zeros(3), torch.ones(3), segments, clip_high=0.5).tolist()
        [-1.1051709651947021, -1.1051709651947021, -1.1051709651947021]
    """
    mean = sequence_log_ratio(log_probs, old_log_probs, segments).detach()
    moving = mean + (log_probs - log_probs.detach())
    return clipped_ratio(moving, torch.zeros_like(mean), advantages, clip_low=clip_low, clip_high=clip_high)


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor | None, segments: Tensor) -> Tensor:
    """The mean over a segment of its tokens' log-ratios, at each of its tokens.

    Args:
        log_probs: [M] in nats.
        old_log_probs: [M], or `None` for on-policy: zeros.
        segments: int64 [M] segment of each token.

    Returns:
        [M] in nats.

    Example:
        >>> sequence_log_ratio(torch.tensor([0.5, 0.25]), torch.zeros(2), torch.tensor([0, 0])).tolist()
        [0.375, 0.375]
    """
    log_ratio = _log_ratio(log_probs, old_log_probs)
    counts = _segment_sum(torch.ones_like(log_ratio), segments)
    return _segment_sum(log_ratio, segments) / counts


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


def reference_kl(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) at each sampled token: r - 1 - log r, r = reference / policy.

    Never negative, and unbiased for tokens that the policy sampled.

    Args:
        log_probs: [M] log-probabilities in nats, with gradient.
        reference_log_probs: [M] those of the frozen reference policy.

    Returns:
        [M] in nats.

    Source: Schulman 2020 ("Approximating KL divergence", k3); Shao et al. 2024 (GRPO), eq. 4.

    Example:
        >>> reference_kl(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -2.0])).tolist()
        [0.0, 0.3678794503211975]
    """
    log_ratio = _log_ratio(reference_log_probs.to(log_probs.dtype), log_probs)
    return log_ratio.exp() - 1.0 - log_ratio


def importance_weights(
    log_probs: Tensor,
    sampler_log_probs: Tensor,
    *,
    mode: CorrectionMode = "truncate",
    level: CorrectionLevel = "token",
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
        ValueError: `mode` or `level` is none of the words, `limit` is not above 1, or `segments` is missing for level
            "sequence".

    Source: Yao et al. 2025 (truncated importance sampling); IcePop for "mask".

    Example:
        >>> importance_weights(torch.tensor([0.0, -1.0]), torch.tensor([-2.0, -1.0])).tolist()
        [2.0, 1.0]
    """
    check_choices(mode=(mode, CorrectionMode), level=(level, CorrectionLevel))
    if not limit > 1:
        raise ValueError(f"`limit` must be greater than 1, got {limit}")
    log_ratio = (log_probs - sampler_log_probs).detach()
    if level == "sequence":
        if segments is None:
            raise ValueError("level 'sequence' needs `segments` (`batch.scored_segments`)")
        log_ratio = _segment_sum(log_ratio, segments)
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


def _segment_sum(values: Tensor, segments: Tensor) -> Tensor:
    """The sum over each token's segment, at the token."""
    sums = values.new_zeros(int(segments.max()) + 1 if segments.numel() else 0)
    return sums.index_add(0, segments, values)[segments]
