"""Checks of arguments that several parts of a rollout share."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from lit_rl.options import as_flag, as_integer, as_number


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
    number = None if as_flag(temperature) is not None else as_number(temperature)
    if number is None:
        raise TypeError(f"`temperature` must be a number, got {temperature!r}")
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"`temperature` must be finite and greater than 0, got {temperature}; for nearly greedy sampling use 0.01"
        )
    return number


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
    ids = set()
    for end_id in end_ids:
        number = as_integer(end_id)
        if number is None:
            raise TypeError(f"`end_ids` must hold integers, got {end_id!r}; look the id up in the tokenizer")
        if number < 0:
            raise ValueError(f"`end_ids` holds {number}; ids are at least 0")
        ids.add(number)
    return tuple(sorted(ids))


def check_integer(name: str, value: Any, least: int) -> int:
    """Refuses anything but integers of at least `least`.

    Args:
        name: Of the argument, for the message.
        value: What was given.
        least: The smallest allowed value.

    Returns:
        The value, as Python's own integer.

    Raises:
        TypeError: It is no integer.
        ValueError: It is too small.

    Example:
        >>> check_integer("group_size", 1, 2)
        Traceback (most recent call last):
        ...
        ValueError: `group_size` must be at least 2, got 1
    """
    number = as_integer(value)
    if number is None:
        raise TypeError(f"`{name}` must be an integer, got {value!r}")
    if number < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
    return number


def read_ids(values: Any, what: str, vocabulary: int | None = None) -> list[int]:
    """Token ids as a plain list, from any flat sequence of integers.

    Args:
        values: A list, tuple, array or tensor; text and floats are refused.
        what: They are, for the message.
        vocabulary: How many ids there are; `None` is unknown.

    Returns:
        The ids.

    Raises:
        TypeError: They are no sequence of integers.
        ValueError: An id is out of range.

    Example:
        >>> read_ids((4, 99), "the observation", vocabulary=32)
        Traceback (most recent call last):
        ...
        ValueError: the observation holds the id 99; expected 0 to 31: were the ids made with another tokenizer?
    """
    items = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise TypeError(f"{what} is {values!r}, expected a sequence of token ids (text is never encoded here)")
    ids = []
    for item in items:
        token_id = as_integer(item)
        if token_id is None:
            raise TypeError(f"{what} holds {item!r}, expected integers")
        ids.append(token_id)
    if ids and min(ids) < 0:
        raise ValueError(f"{what} holds the id {min(ids)}; ids are at least 0")
    if ids and vocabulary is not None and max(ids) >= vocabulary:
        raise ValueError(
            f"{what} holds the id {max(ids)}; expected 0 to {vocabulary - 1}: were the ids made with another tokenizer?"
        )
    return ids
