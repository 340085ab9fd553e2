"""Draws without replacement: shuffled passes, and weighted draws that stay finite for any temperature."""

from __future__ import annotations

import numpy as np

from lit_rl.curriculum.pass_rate import Floats, Integers


def log_weights(scores: Floats, temperature: float) -> Floats:
    """Logarithm of score ** (1 / temperature), shifted so that the largest is 0.

    Args:
        scores: float64 [n], at least 0, not all 0.
        temperature: At least 0; at 0 only the largest scores have a weight.

    Returns:
        float64 [n] of at most 0; -inf where the score is 0.

    Example:
        >>> np.exp(log_weights(np.array([0.0, 1.0, 4.0]), 2.0))
        array([0. , 0.5, 1. ])
    """
    with np.errstate(divide="ignore", over="ignore"):
        shifted = np.log(scores) - np.log(scores.max())
        return np.where(shifted == 0.0, 0.0, -np.inf) if temperature == 0.0 else shifted / temperature


def draw_weighted(scores: Floats, temperature: float, count: int, generator: np.random.Generator) -> Integers:
    """Draws without replacement in proportion to score ** (1 / temperature).

    Gumbel noise is added to the logarithms and the largest sums are taken, so no power of a score is ever formed. At
    temperature 0 the largest scores are taken, ties at random.

    Args:
        scores: float64 [n], greater than 0.
        temperature: At least 0.
        count: How many to draw; all of them when there are fewer.
        generator: Source of randomness.

    Returns:
        int64 indices.

    Source: Vieira 2014, "Gumbel-max trick and weighted reservoir sampling".

    Example:
        >>> draw_weighted(np.array([1.0, 3.0, 2.0]), 0.0, 2, np.random.default_rng(0))
        array([1, 2])
    """
    noise = generator.gumbel(size=scores.size)
    if temperature == 0.0:
        return np.lexsort((noise, -scores))[:count]
    return np.argsort(-(log_weights(scores, temperature) + noise), kind="stable")[:count]


def draw_pass(pool: Integers, in_pass: Integers, count: int, generator: np.random.Generator) -> Integers:
    """Draws in shuffled passes: no row comes twice before every row of the pool came once.

    Args:
        pool: Rows to draw from.
        in_pass: 1 for each row already drawn in the current pass; updated in place.
        count: How many to draw; all of the pool when it has fewer.
        generator: Source of randomness.

    Returns:
        Distinct rows: the rest of the current pass first, then the beginning of a new one.

    Example:
        >>> draw_pass(np.array([0, 1, 2]), np.array([1, 0, 1]), 1, np.random.default_rng(0))
        array([1])
    """
    shuffled = pool[generator.permutation(pool.size)]
    left = shuffled[in_pass[shuffled] == 0][:count]
    in_pass[left] = 1
    if left.size == count:
        return left
    in_pass[:] = 0
    fresh = shuffled[~np.isin(shuffled, left)][: count - left.size]
    in_pass[fresh] = 1
    return np.concatenate([left, fresh])


def longest_undrawn(rows: Integers, drawn_at: Integers, generator: np.random.Generator) -> Integers:
    """The rows ordered by when they were last drawn, longest ago first, ties at random.

    Args:
        rows: Rows to order.
        drawn_at: Iteration of the last draw of every row of the table; -1 for never.
        generator: Source of randomness.

    Returns:
        The same rows.

    Example:
        >>> longest_undrawn(np.array([0, 2]), np.array([5, 0, 3]), np.random.default_rng(0))
        array([2, 0])
    """
    return rows[np.lexsort((generator.random(rows.size), drawn_at[rows]))]
