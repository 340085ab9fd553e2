"""Does the trainer give the sampled tokens the probabilities they were sampled with?"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from lit_rl.checks.verdict import Verdict
from lit_rl.log_ratio import LogRatioCounts

ALLOWED_SHARE = 0.01
"""Share of tokens with a ratio more than 20% from 1 up to which the sampler counts as agreeing with the trainer.

Kernels and bfloat16 move single tokens that far, in well under 1% of cases; a packing leak or a wrong temperature
moves several percent.
"""

ALLOWED_DEFICIT = 0.02
"""How far the mean ratio may lie below 1, beyond what chance explains; top-p 0.95 makes it 0.05."""
_STANDARD_ERRORS = 3.0
# A few tokens say little about their own spread; numerical noise of one ratio is of this size at most.
_SPREAD_OF_ONE = 0.05


def check_sampler_ratio(
    log_probs: Tensor,
    sampler_log_probs: Tensor,
    *,
    first_in_row: Tensor | None = None,
    allowed_share: float = ALLOWED_SHARE,
) -> Verdict:
    """Compares the log-probabilities of trainer and sampler for the same tokens, before any update on them.

    Two things have to hold. Hardly any token has a ratio of trainer to sampler far from 1. And their mean, over tokens
    that the sampler drew, is 1: it is the probability that the trainer gives to what the sampler could draw at all, so
    a distribution that was cut (top-p, top-k) shows there although each single ratio is close to 1.

    Args:
        log_probs: [M] the trainer's, in nats.
        sampler_log_probs: [M] the sampler's, in nats, at the same temperature.
        first_in_row: bool [M] whether a token's segment is the first of its row; tells a packing leak from the rest.
        allowed_share: Largest share of tokens with a ratio more than 20% from 1 that still counts as agreement.

    Returns:
        The verdict; its figures are those of `lit_rl.log_ratio.LogRatioCounts`.

    Raises:
        ValueError: The two have different shapes, or `allowed_share` is not in [0, 1].

    Example:
        >>> import torch
        >>> check_sampler_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.001])).ok
        True
    """
    if log_probs.shape != sampler_log_probs.shape:
        raise ValueError(
            f"`sampler_log_probs` has shape {list(sampler_log_probs.shape)}, expected {list(log_probs.shape)}: one "
            "entry per scored token, like `log_probs`"
        )
    metric = LogRatioCounts(sync_on_compute=False)
    metric.update(log_probs, sampler_log_probs, first_in_row)
    return ratio_verdict(metric.compute(), allowed_share=allowed_share)


def ratio_verdict(figures: Mapping[str, float], *, allowed_share: float = ALLOWED_SHARE) -> Verdict:
    """Judges figures that were already summed over microbatches and ranks.

    Args:
        figures: From `lit_rl.log_ratio.LogRatioCounts`.
        allowed_share: See `check_sampler_ratio`.

    Returns:
        The verdict. Where it fails, the message names the likely causes, the most frequent first.

    Example:
        >>> ratio_verdict({"tokens": 100, "non_finite": 0, "outside_20_percent": 0.058, "max": 6.4, "kl": 0.3}).ok
        False
    """
    if not 0.0 <= allowed_share <= 1.0:
        raise ValueError(f"`allowed_share` must lie in [0, 1], got {allowed_share}")
    tokens, bad = int(figures["tokens"]), int(figures["non_finite"])
    if tokens + bad == 0:
        return Verdict(True, "no scored token to compare", dict(figures))
    share, deficit = figures.get("outside_20_percent", math.nan), _deficit(figures)
    found = (
        f"{share:.2%} of {tokens} scored tokens have a trainer/sampler ratio more than 20% from 1 before any update "
        f"(allowed: {allowed_share:.2%}; largest log-ratio {figures['max']:.3g} nats, KL {figures.get('kl', 0.0):.3g} "
        "nats per token)"
    )
    if bad == 0 and share <= allowed_share and deficit is None:
        return Verdict(True, found, dict(figures))
    if bad:
        found += f"; {bad} more tokens have a log-probability that is not finite"
    if deficit is not None:
        found += (
            f"; the mean ratio is {figures['mean_ratio']:.4f} (allowed: {1 - deficit:.4f}), but 1 for a sampler that "
            "draws from the whole distribution"
        )
    # A cut lowers every ratio; where many are raised, the rare large ones are only missing in the sample.
    is_cut = deficit is not None and figures.get("above_20_percent", 0.0) <= allowed_share
    return Verdict(False, f"{found}. {_causes(figures, allowed_share, is_cut)}", dict(figures))


def _deficit(figures: Mapping[str, float]) -> float | None:
    """How far the mean ratio may be below 1, if it is further."""
    if "mean_ratio" not in figures:
        return None
    error = math.hypot(figures["mean_ratio_error"], _SPREAD_OF_ONE / math.sqrt(figures["tokens"]))
    allowed = ALLOWED_DEFICIT + _STANDARD_ERRORS * error
    return allowed if 1.0 - figures["mean_ratio"] > allowed else None


def _causes(figures: Mapping[str, float], allowed_share: float, is_cut: bool) -> str:
    later, first = figures.get("outside_later"), figures.get("outside_first")
    leak = "packing leak: segments of a packed row see each other (run `check_packing`, or use layout='padded')"
    if later is not None and first is not None and first <= allowed_share < later:
        leak += f": likely here, as only segments behind another one are off ({later:.2%} against {first:.2%})"
    cut = "cut distribution (top-p, top-k): the sampler left tokens out, and its log-probabilities are of what was left"
    temperature = "temperature: the sampler used another one than the trajectories record"
    causes = [leak, temperature if is_cut else f"{temperature}, or cut its distribution (top-p, top-k)"]
    causes += [
        "precision: sampler and trainer compute in different dtypes or kernels",
        "re-tokenised ids: the trained ids are not the sampled ones, or the log-probabilities are shifted by one token",
    ]
    listed = [f"({number}) {cause}" for number, cause in enumerate([cut, *causes] if is_cut else causes, 1)]
    return f"Likely causes, in this order: {'; '.join(listed)}"
