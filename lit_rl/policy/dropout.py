"""Dropout is switched off: with it, the ratio of two passes over the same weights is noise instead of 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def switch_off_dropout(model: nn.Module) -> Callable[[], None]:
    """Sets every dropout probability of a model to 0, on its modules and its configuration.

    Args:
        model: Any module; it stays in the mode (training or evaluation) it is in.

    Returns:
        A function that puts the numbers back.

    Example:
        >>> layer = nn.Dropout(0.1)
        >>> restore = switch_off_dropout(layer)
        >>> layer.p
        0.0
        >>> restore(); layer.p
        0.1
    """
    changed: list[tuple[dict[str, Any], str, float]] = []
    for values, name in _probabilities(model):
        changed.append((values, name, values[name]))
        values[name] = 0.0

    def restore() -> None:
        for values, name, value in changed:
            values[name] = value

    return restore


def _probabilities(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        for values in (vars(module), getattr(config, "__dict__", {})):
            if id(values) in seen:
                continue
            seen.add(id(values))
            is_dropout = values is vars(module) and isinstance(module, nn.modules.dropout._DropoutNd)
            for name, value in values.items():
                if isinstance(value, float) and value != 0.0 and ("drop" in name or (is_dropout and name == "p")):
                    yield values, name
