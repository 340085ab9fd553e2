"""Refusing options that name nothing, at construction and by their own name.

What counts as a number, an integer or a flag is decided here for the whole package: Python's own, and those of NumPy,
torch and everything else that behaves like them.
"""

from __future__ import annotations

import math
import operator
from typing import Any, get_args


def as_integer(value: Any) -> int | None:
    """Reads an integer, whoever made it.

    Args:
        value: Python's, NumPy's or torch's, or anything else with `__index__`.

    Returns:
        Python's own integer, or `None` for anything else; booleans and floats are no integers.

    Example:
        >>> import numpy as np
        >>> as_integer(np.int64(3)), as_integer(3.0), as_integer(True)
        (3, None, None)
    """
    if as_flag(value) is not None:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_number(value: Any) -> float | None:
    """Reads a real number, whoever made it.

    Args:
        value: Python's (booleans included), NumPy's or torch's, or an array of one element.

    Returns:
        Python's own float, perhaps NaN or infinite, or `None` for anything else; text is never a number.

    Example:
        >>> import torch
        >>> as_number(torch.tensor([0.5])), as_number(True), as_number("1.0")
        (0.5, 1.0, None)
    """
    if hasattr(value, "item") and hasattr(value, "shape"):
        if math.prod(value.shape) != 1:
            return None
        value = value.item()
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def as_flag(value: Any) -> bool | None:
    """Reads a boolean, whoever made it.

    Args:
        value: Python's, NumPy's or torch's.

    Returns:
        Python's own boolean, or `None` for anything else, 0 and 1 included.

    Example:
        >>> import numpy as np
        >>> as_flag(np.bool_(True)), as_flag(1), as_flag("False")
        (True, None, None)
    """
    if hasattr(value, "item") and hasattr(value, "shape") and math.prod(value.shape) == 1:
        value = value.item()
    return value if isinstance(value, bool) else None


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
        options: Name to value; integers of NumPy and torch will do.

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
        number = as_integer(value)
        if number is None:
            raise TypeError(f"`{name}` must be an integer of at least {least}, got {value!r}")
        if number < least:
            raise ValueError(f"`{name}` must be at least {least}, got {value}")


def check_real(least: float, **options: float | None) -> None:
    """Checks options that are real numbers of at least some size; `None` passes.

    Args:
        least: The smallest that works.
        options: Name to value.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is too small, infinite or NaN.

    Example:
        >>> check_real(0, learning_rate=-1.0)
        Traceback (most recent call last):
        ...
        ValueError: `learning_rate` must be at least 0, got -1.0
    """
    for name, value in options.items():
        if value is not None and not least <= _real(name, value) < math.inf:
            raise ValueError(f"`{name}` must be at least {least}{_finite(value)}, got {value}")


def check_above(bound: float, **options: float) -> None:
    """Checks options that are real numbers above a bound.

    Args:
        bound: What does not work any more.
        options: Name to value.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is too small, infinite or NaN.

    Example:
        >>> check_above(0, temperature=0.0)
        Traceback (most recent call last):
        ...
        ValueError: `temperature` must be greater than 0, got 0.0
    """
    for name, value in options.items():
        if not bound < _real(name, value) < math.inf:
            raise ValueError(f"`{name}` must be greater than {bound}{_finite(value)}, got {value}")


def _real(name: str, value: Any) -> float:
    number = as_number(value)
    if number is None:
        raise TypeError(f"`{name}` must be a number, got {value!r}")
    return number


def _finite(value: float) -> str:
    """A word more where the size is not what is wrong."""
    return "" if math.isfinite(value) else " and finite"
