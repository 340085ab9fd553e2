"""From a few measured peaks to a token budget: bytes = a + b x tokens + c x longest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The peak of one microbatch.

    Args:
        tokens: Positions of the microbatch.
        longest: Its longest segment, tokens.
        peak_bytes: Most memory held at once while it was trained.
    """

    tokens: int
    longest: int
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """Peak memory as a function of a microbatch.

    Args:
        fixed: Bytes whatever the microbatch: weights, optimizer, libraries, one chunk of logits.
        per_token: Bytes per position.
        per_longest: Bytes per token of the longest segment.
        worst_error: Largest relative error over the measurements it was fitted to.
    """

    fixed: float
    per_token: float
    per_longest: float
    worst_error: float

    def predict(self, tokens: int, longest: int) -> float:
        """Peak bytes of a microbatch of `tokens` positions with a longest segment of `longest`."""
        return self.fixed + self.per_token * tokens + self.per_longest * longest


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A token budget.

    Args:
        max_tokens: Positions per microbatch.
        predicted_bytes: Predicted peak at that budget and the full context.
        limit_bytes: Memory there is.
        margin: Share of it that is kept free.
        sentence: What to paste into the configuration.
    """

    max_tokens: int
    predicted_bytes: float
    limit_bytes: float
    margin: float
    sentence: str


def fit_memory(measurements: Sequence[Measurement]) -> MemoryFit:
    """Least squares with no negative coefficient, over relative errors.

    A negative coefficient would promise memory for longer segments, so each subset of the three terms is fitted and
    the best one without a negative coefficient is taken.

    Args:
        measurements: At least three, with at least two different token counts.

    Returns:
        The fit.

    Raises:
        ValueError: Too few measurements.

    Example:
        >>> points = [(1000, 500), (2000, 500), (2000, 1000), (4000, 1000)]
        >>> fit = fit_memory([Measurement(tokens=t, longest=n, peak_bytes=1e6 + 100 * t + 10 * n) for t, n in points])
        >>> round(fit.fixed), round(fit.per_token), round(fit.per_longest)
        (1000000, 100, 10)
    """
    if len(measurements) < 3 or len({point.tokens for point in measurements}) < 2:
        raise ValueError(f"need at least 3 measurements with 2 token counts, got {len(measurements)}")
    peaks = np.array([point.peak_bytes for point in measurements])
    columns = np.array([[1.0, point.tokens, point.longest] for point in measurements]) / peaks[:, None]
    scale = np.abs(columns).max(axis=0)
    best, smallest = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for terms in itertools.combinations(range(3), size):
            chosen = list(terms)
            solution = np.linalg.lstsq(columns[:, chosen] / scale[chosen], np.ones(len(peaks)), rcond=None)[0]
            coefficients = np.zeros(3)
            coefficients[chosen] = solution / scale[chosen]
            error = float(np.square(columns @ coefficients - 1).sum())
            # More terms must earn their place by more than rounding.
            if coefficients.min() >= 0 and error < smallest * (1 - 1e-6):
                best, smallest = coefficients, error
    worst = float(np.abs(columns @ best - 1).max())
    return MemoryFit(fixed=best[0], per_token=best[1], per_longest=best[2], worst_error=worst)


def recommend_budget(
    fit: MemoryFit, *, context: int, limit_bytes: float, margin: float = 0.1, multiple: int = 256
) -> Recommendation:
    """The largest token budget that keeps a margin of memory free with a trajectory of full length in it.

    Args:
        fit: From `fit_memory`.
        context: Longest trajectory, tokens: no budget may be smaller.
        limit_bytes: Memory of the device.
        margin: Share of it to keep free, for fragmentation and what was not measured.
        multiple: The budget is rounded down to a multiple of this.

    Returns:
        The budget and the sentence to paste.

    Raises:
        ValueError: Not even one trajectory of full length fits; the message says by how much.

    Example:
        >>> fit = MemoryFit(fixed=2e9, per_token=1e6, per_longest=0.0, worst_error=0.01)
        >>> recommend_budget(fit, context=4096, limit_bytes=20e9).max_tokens
        15872
    """
    usable = (1 - margin) * limit_bytes
    if (needed := fit.predict(context, context)) > usable:
        raise ValueError(
            f"one trajectory of {context:,} tokens needs {needed / 1e9:.2f} GB, but {limit_bytes / 1e9:.2f} GB less a "
            f"margin of {margin:.0%} leaves {usable / 1e9:.2f} GB: shorten the context, shard over more GPUs, or turn "
            "on gradient checkpointing"
        )
    room = usable - fit.fixed - fit.per_longest * context
    most = int(room / fit.per_token) if fit.per_token > 0 else context * 64
    tokens = max(context, most // multiple * multiple)
    predicted = fit.predict(tokens, context)
    return Recommendation(
        max_tokens=tokens,
        predicted_bytes=predicted,
        limit_bytes=limit_bytes,
        margin=margin,
        sentence=(
            f"PackedDataModule(source, max_tokens={tokens})  # predicted peak {predicted / 1e9:.2f} of "
            f"{limit_bytes / 1e9:.2f} GB with a longest trajectory of {context} tokens"
        ),
    )
