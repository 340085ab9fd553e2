"""Arithmetic on gradients by parameter name: sums, sizes, and how one relates to another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Gradient = Mapping[str, Tensor]


def relation(one: Gradient, other: Gradient) -> tuple[float, float, float]:
    """Relative error, cosine, and the factor that fits best, of one gradient to another.

    Args:
        one: Gradient by parameter name.
        other: The reference; a parameter missing on one side counts as 0 there.

    Returns:
        (|one - other| / |other|, cosine, <one, other> / <other, other>), in float64.

    Example:
        >>> relation({"w": torch.tensor([2.0])}, {"w": torch.tensor([1.0])})
        (1.0, 1.0, 2.0)
    """
    left, right = norm(one), norm(other)
    if right == 0.0:
        return (0.0 if left == 0.0 else math.inf), (1.0 if left == 0.0 else 0.0), 1.0
    product = sum(float((_double(one[name]) * _double(other[name])).sum()) for name in one.keys() & other.keys())
    cosine = product / left / right if left else 0.0
    return distance(one, other) / right, min(cosine, 1.0), product / right / right


def distance(one: Gradient, other: Gradient, factor: float = 1.0) -> float:
    """Norm of the difference between one gradient and a multiple of another.

    Args:
        one: Gradient by parameter name.
        other: The other; a parameter missing on one side counts as 0 there.
        factor: What the other is multiplied with.

    Returns:
        |one - factor * other|, in float64.

    Example:
        >>> distance({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}, 2.0)
        1.0
    """
    names = {**one, **other}
    return math.sqrt(sum(_square(_double(one.get(name)) - factor * _double(other.get(name))) for name in names))


def norm(gradient: Gradient) -> float:
    """Euclidean norm over all parameters.

    Args:
        gradient: By parameter name.

    Returns:
        The norm, in float64.

    Example:
        >>> norm({"w": torch.tensor([3.0]), "b": torch.tensor([4.0])})
        5.0
    """
    return math.sqrt(sum(_square(_double(tensor)) for tensor in gradient.values()))


def combine(parts: Sequence[Gradient], factors: Sequence[float]) -> dict[str, Tensor]:
    """A weighted sum of gradients.

    Args:
        parts: Gradients by parameter name.
        factors: One for each.

    Returns:
        The sum, float64.
    """
    total: dict[str, Tensor] = {}
    for part, factor in zip(parts, factors, strict=True):
        for name, gradient in part.items():
            scaled = gradient.double() * factor
            total[name] = total[name] + scaled if name in total else scaled
    return total


def take_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies the gradients a module holds, whole where they are sharded.

    Args:
        module: After a backward pass.

    Returns:
        Gradient by parameter name.
    """
    return {name: whole(p.grad).detach().clone() for name, p in module.named_parameters() if p.grad is not None}


def whole(tensor: Tensor) -> Tensor:
    """A tensor as it is without sharding; every rank must call it.

    Args:
        tensor: Sharded or not.

    Returns:
        All of it.
    """
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _double(gradient: Tensor | None) -> Tensor:
    return torch.zeros((), dtype=torch.float64) if gradient is None else gradient.detach().double().cpu()


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())
