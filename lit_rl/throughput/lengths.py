"""Trajectory lengths for a plan: from a file, or a log-normal distribution with a given mean and 95th percentile."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist

# Standard deviations from the middle of a normal distribution to its 95th percentile.
_Z95 = NormalDist().inv_cdf(0.95)


def parse_lengths(text: str, count: int, *, longest: int | None = None) -> list[int]:
    """Lengths from what a user writes on the command line.

    Args:
        text: A JSON file with a list of lengths, or "mean", or "mean,p95" in tokens.
        count: How many lengths to make of a mean and percentile; a file's are taken as they are.
        longest: The context limit; longer ones are cut to it.

    Returns:
        Lengths, each at least 1.

    Raises:
        ValueError: Neither a file nor numbers, or a file that is no list of positive integers.

    Example:
        >>> parse_lengths("1000", 3)
        [1000, 1000, 1000]
    """
    if Path(text).suffix == ".json" or Path(text).is_file():
        lengths = _read(Path(text))
    else:
        try:
            mean, *rest = (float(part) for part in text.split(","))
        except ValueError:
            raise ValueError(
                f"`tokens` must be a .json file with a list of lengths, or MEAN, or MEAN,P95; got {text!r}"
            ) from None
        if len(rest) > 1:
            raise ValueError(f"`tokens` takes a mean and one percentile, got {text!r}")
        lengths = lognormal_lengths(mean, rest[0] if rest else mean, count)
    return lengths if longest is None else [min(length, longest) for length in lengths]


def _read(path: Path) -> list[int]:
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} with lengths: write a JSON list such as [812, 15022, 7310]")
    try:
        lengths = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON ({error}); write a list such as [812, 15022, 7310]") from None
    if not isinstance(lengths, list) or not lengths or not all(type(n) is int and n > 0 for n in lengths):
        raise ValueError(f"{str(path)!r} must hold a non-empty JSON list of positive integers, one per trajectory")
    return lengths


def lognormal_lengths(mean: float, p95: float, count: int) -> list[int]:
    """The `count` mid-quantiles of the log-normal distribution with this mean and 95th percentile.

    With mu and s of the underlying normal, mean = exp(mu + s^2/2) and p95 = exp(mu + 1.645 s), so
    s = 1.645 - sqrt(1.645^2 - 2 ln(p95 / mean)). The quantiles are scaled so that their own mean is the given one.

    Args:
        mean: Tokens.
        p95: Tokens; equal to the mean for constant lengths, at most 3.87 times the mean.
        count: Lengths to make.

    Returns:
        Increasing lengths, each at least 1. No randomness.

    Raises:
        ValueError: The two numbers fit no such distribution.

    Example:
        >>> lengths = lognormal_lengths(8_000, 24_000, 512)
        >>> sum(lengths) // 512, sorted(lengths)[round(0.95 * 512)] // 1000
        (8000, 24)
    """
    if not 1 <= mean <= p95 < math.inf or count < 1:
        raise ValueError(f"need count >= 1 and finite tokens with 1 <= mean <= p95, got {count=}, {mean=}, {p95=}")
    ratio = math.log(p95 / mean)
    if 2 * ratio > _Z95**2:
        raise ValueError(
            f"no log-normal distribution has a 95th percentile of {p95 / mean:.2f} times its mean (at most "
            f"{math.exp(_Z95**2 / 2):.2f}); give the lengths themselves in a JSON file"
        )
    spread = _Z95 - math.sqrt(_Z95**2 - 2 * ratio)
    normal = NormalDist()
    raw = [math.exp(spread * normal.inv_cdf((index + 0.5) / count)) for index in range(count)]
    scale = mean * count / sum(raw)
    return [max(1, round(scale * value)) for value in raw]
