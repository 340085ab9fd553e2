"""Checks of arguments that several parts of a rollout share."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def check_temperature(temperature: Any) -> float:
    """Refuses temperatures that cannot be sampled at.

    Args:
        temperature: A finite number greater than 0.

    Returns:
        The temperature.

    Raises:
        TypeError: It is not a number.
        ValueError: It is out of range.

    Example:
        >>> check_temperature(0)
        Traceback (most recent call last):
        ...
        ValueError: `temperature` must be finite and greater than 0, got 0; for nearly greedy sampling use 0.01
    """
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"`temperature` must be a number, got {temperature!r}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"`temperature` must be finite and greater than 0, got {temperature}; for nearly greedy sampling use 0.01"
        )
    return float(temperature)


def check_end_ids(end_ids: Any) -> tuple[int, ...]:
    """Refuses end tokens that are not ids.

    Args:
        end_ids: Integers of at least 0, any number of them.

    Returns:
        The ids, sorted, each once.

    Raises:
        TypeError: It is not a collection of integers.
        ValueError: An id is negative.

    Example:
        >>> check_end_ids({9, 8})
        (8, 9)
    """
    if isinstance(end_ids, (str, bytes)) or not isinstance(end_ids, Collection):
        raise TypeError(f"`end_ids` must be a collection of token ids such as (2,), got {end_ids!r}")
    for end_id in end_ids:
        if not isinstance(end_id, int) or isinstance(end_id, bool):
            raise TypeError(f"`end_ids` must hold integers, got {end_id!r}; look the id up in the tokenizer")
        if end_id < 0:
            raise ValueError(f"`end_ids` holds {end_id}; ids are at least 0")
    return tuple(sorted(set(end_ids)))


def check_integer(name: str, value: Any, least: int) -> int:
    """Refuses anything but integers of at least `least`.

    Args:
        name: Of the argument, for the message.
        value: What was given.
        least: The smallest allowed value.

    Returns:
        The value.

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small.

    Example:
        >>> check_integer("group_size", 1, 2)
        Traceback (most recent call last):
        ...
        ValueError: `group_size` must be at least 2, got 1
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    return value
