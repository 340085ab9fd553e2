"""Refusing options that name nothing, at construction and by their own name."""

from __future__ import annotations

import math
from typing import Any, get_args


def check_choices(**options: tuple[Any, Any]) -> None:
    """Checks options that are one of a few words.

    Args:
        options: Name of the option to (value given, the `Literal` it has to be of).

    Raises:
        ValueError: A value is none of the words; the message lists them.

    Example:
        >>> from typing import Literal
        >>> check_choices(layout=("flat", Literal["packed", "padded"]))
        Traceback (most recent call last):
        ...
        ValueError: `layout` must be one of ('packed', 'padded'), got 'flat'
    """
    for name, (value, literal) in options.items():
        if value not in get_args(literal):
            raise ValueError(f"`{name}` must be one of {get_args(literal)}, got {value!r}")


def check_at_least(least: int, **options: int | None) -> None:
    """Checks options that are whole numbers; `None` passes.

    Args:
        least: The smallest that works.
        options: Name to value.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A value is too small.

    Example:
        >>> check_at_least(1, validation_attempts=0)
        Traceback (most recent call last):
        ...
        ValueError: `validation_attempts` must be at least 1, got 0
    """
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{name}` must be an integer of at least {least}, got {value!r}")
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")


def check_real(least: float, **options: float | None) -> None:
    """Checks options that are real numbers of at least some size; `None` passes.

    Args:
        least: The smallest that works.
        options: Name to value.

    Raises:
        ValueError: A value is too small, infinite or no number.

    Example:
        >>> check_real(0, learning_rate=-1.0)
        Traceback (most recent call last):
        ...
        ValueError: `learning_rate` must be at least 0, got -1.0
    """
    for name, value in options.items():
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")


def check_above(bound: float, **options: float) -> None:
    """Checks options that are real numbers above a bound.

    Args:
        bound: What does not work any more.
        options: Name to value.

    Raises:
        ValueError: A value is too small, infinite or no number.

    Example:
        >>> check_above(0, temperature=0.0)
        Traceback (most recent call last):
        ...
        ValueError: `temperature` must be greater than 0, got 0.0
    """
    for name, value in options.items():
        if not bound < value < math.inf:
            raise ValueError(f"`{name}` must be greater than {bound}, got {value}")
