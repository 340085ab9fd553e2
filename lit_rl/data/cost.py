"""What a microbatch costs to compute, as a function of the lengths of its segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Cost = Callable[[Sequence[int]], float]
"""Lengths of one microbatch's segments (as computed: all the longest one in a padded microbatch) to a number."""


@dataclass(frozen=True)
class SegmentCost:
    """Cost that adds up over segments: `linear` x L + `quadratic` x L^2 for a segment of L tokens.

    The first term is what every token pays in matrix products, the second what it pays in attention to the tokens
    before it in its own segment. Only their ratio matters to a plan. For a transformer with P parameters, n layers
    and width d, forward and backward cost 6 P L + 6 n d L^2 FLOPs with causal attention; as P is near 12 n d^2, the
    terms are equal at L = 12 d. The defaults put that at 24,576 tokens (d = 2,048).

    Args:
        linear: Cost of a token, in any unit.
        quadratic: Cost of a pair of tokens, in the same unit.

    Raises:
        ValueError: A coefficient is negative or not finite, or both are 0.

    Example:
        >>> SegmentCost(linear=1.0, quadratic=0.5)([2, 4])
        16.0
        >>> SegmentCost(linear=1.0, quadratic=0.5).segments([2, 4]).tolist()
        [4.0, 12.0]
    """

    linear: float = 1.0
    quadratic: float = 1.0 / 24_576

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("quadratic", self.quadratic)):
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` must be a finite number of at least 0, got {value}")
        if self.linear == 0 and self.quadratic == 0:
            raise ValueError("`linear` and `quadratic` are both 0; a segment must cost something")

    def segments(self, lengths: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Cost of each segment alone.

        Args:
            lengths: [n] tokens of each segment.

        Returns:
            float64 [n].
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return tokens * (self.linear + self.quadratic * tokens)

    def __call__(self, lengths: Sequence[int] | npt.NDArray[Any]) -> float:
        """Cost of a microbatch.

        Args:
            lengths: Tokens of each of its segments.

        Returns:
            The sum over the segments.
        """
        return float(self.segments(lengths).sum())


def segment_costs(cost: Cost, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Cost of each trajectory in a microbatch of its own.

    Args:
        cost: A `SegmentCost` or any callable.
        lengths: int64 [n].

    Returns:
        float64 [n].

    Raises:
        ValueError: The callable gave something other than a finite number of at least 0.

    Example:
        >>> segment_costs(lambda lengths: sum(lengths) ** 2, np.array([1, 3, 3])).tolist()
        [1.0, 9.0, 9.0]
    """
    if isinstance(cost, SegmentCost):
        return cost.segments(lengths)
    distinct, where = np.unique(lengths, return_inverse=True)
    return np.array([_called(cost, (length,)) for length in distinct.tolist()], dtype=np.float64)[where]


def microbatch_costs(cost: Cost, microbatches: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Cost of each microbatch; nothing for a filler.

    Args:
        cost: A `SegmentCost` or any callable.
        microbatches: [m] lengths of the segments of each, as computed.

    Returns:
        float64 [m].

    Raises:
        ValueError: The callable gave something other than a finite number of at least 0.

    Example:
        >>> microbatch_costs(SegmentCost(linear=1.0, quadratic=0.0), [[2, 3], []]).tolist()
        [5.0, 0.0]
    """
    if isinstance(cost, SegmentCost):
        owner = np.repeat(np.arange(len(microbatches)), [len(microbatch) for microbatch in microbatches])
        flat = np.fromiter((length for microbatch in microbatches for length in microbatch), dtype=np.int64)
        return np.bincount(owner, cost.segments(flat), minlength=len(microbatches)).astype(np.float64)
    return np.array([_called(cost, tuple(lengths)) if len(lengths) else 0.0 for lengths in microbatches])


def _called(cost: Cost, lengths: tuple[int, ...]) -> float:
    value = float(cost(lengths))
    if not math.isfinite(value) or value < 0:
        raise ValueError(
            f"`cost` gave {value} for a microbatch with segments of {lengths[:8]} tokens; expected a finite number "
            "of at least 0"
        )
    return value
