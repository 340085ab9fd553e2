"""Reward functions as they are: what they ask for, and what they may return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lit_rl.options import as_number

RewardFunction = Callable[..., Sequence[float | None]]


class RewardCountError(ValueError):
    """A reward function returned another number of values than there are completions."""


def rewards_by_name(rewards: Any) -> dict[str, RewardFunction]:
    """Reward functions by name, at least one.

    Args:
        rewards: One function, several, or several by name.

    Returns:
        Name to function; a name that comes again gets a number.

    Raises:
        TypeError: One cannot be called, or does not say what arguments it takes.
        ValueError: There is none.

    Example:
        >>> list(rewards_by_name([len, len]))
        ['len', 'len#2']
    """
    if isinstance(rewards, Mapping):
        named = dict(rewards)
    else:
        if not callable(rewards) and not isinstance(rewards, Iterable):
            raise TypeError(f"`rewards` is {rewards!r}, expected a function, several, or several by name")
        functions = [rewards] if callable(rewards) else list(rewards)
        named = {}
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            copies = sum(other.split("#")[0] == name for other in named)
            named[f"{name}#{copies + 1}" if copies else name] = function
    if not named:
        raise ValueError("`rewards` is empty; give at least one reward function")
    for name, function in named.items():
        if not callable(function):
            raise TypeError(f"reward {name!r} is {function!r}, expected a function `reward(prompts, completions, ...)`")
        try:
            inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"reward {name!r} is {function!r}, which does not say what arguments it takes; wrap it in a function "
                "`def reward(completions, **columns)`"
            ) from error
    return named


def weights_of(weights: Any, count: int) -> list[float]:
    """One finite weight per reward function.

    Args:
        weights: A flat sequence of numbers, or `None` for 1 each.
        count: The number of reward functions.

    Returns:
        The weights.

    Raises:
        TypeError: They are no sequence, or no numbers.
        ValueError: There are more or fewer, or one is not finite.

    Example:
        >>> weights_of([0.7, 0.3], 2)
        [0.7, 0.3]
    """
    if weights is None:
        return [1.0] * count
    items = weights.tolist() if hasattr(weights, "tolist") else weights
    if isinstance(items, (str, bytes)) or not isinstance(items, Sequence):
        raise TypeError(
            f"`weights` is {weights!r}; expected a list with one number per reward function, in their order"
        )
    numbers = [_weight(item, index) for index, item in enumerate(items)]
    if len(numbers) != count:
        raise ValueError(f"`weights` has {len(numbers)} entries for {count} reward functions; give one for each")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"`weights` must be finite, got {numbers}")
    return numbers


def _weight(item: Any, index: int) -> float:
    number = as_number(item)
    if number is None:
        raise TypeError(f"`weights`[{index}] is {item!r}, expected a number")
    return number


def call_reward(
    name: str, function: RewardFunction, columns: Mapping[str, list[Any]], count: int
) -> list[float | None]:
    """Calls one reward function with what it asks for, and checks what it returns.

    Args:
        name: Of the function, for messages.
        function: Asks for columns by name; arguments that are positional only are given by position.
        columns: Name to one value per completion.
        count: The number of completions.

    Returns:
        One number per completion, or `None` where the function does not apply.

    Raises:
        TypeError: It returned something else than a list of numbers.
        ValueError: It asks for a column that there is not, or returned an infinite number.
        RewardCountError: It returned more or fewer values.

    Example:
        >>> call_reward("lengths", lambda completions: [len(ids) for ids in completions], {"completions": [[5, 2]]}, 1)
        [2.0]
    """
    by_position, by_name = _arguments(name, function, columns)
    result = function(*by_position, **by_name)
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"reward {name!r} returned {result!r}, expected a list with one number or None per completion")
    if len(values) != count:
        raise RewardCountError(
            f"reward {name!r} returned {len(values)} values for {count} completions; return one for each"
        )
    return [_number(name, value) for value in values]


def _arguments(
    name: str, function: RewardFunction, columns: Mapping[str, list[Any]]
) -> tuple[list[list[Any]], dict[str, list[Any]]]:
    """What a function asks for, by position where it cannot be given by name."""
    parameters = inspect.signature(function).parameters.values()
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.name not in columns and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if missing:
        raise ValueError(f"reward {name!r} asks for {missing}, but the tasks only give {sorted(columns)}")
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    # One that has its default ends what can be given by position.
    first = first[: next((number for number, key in enumerate(first) if key not in columns), len(first))]
    by_name = {k: list(v) for k, v in columns.items() if k not in first and (takes_all or k in named)}
    return [list(columns[key]) for key in first], by_name


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number = as_number(value)
    if number is None:
        raise TypeError(f"reward {name!r} returned {value!r}, expected a number or None")
    if math.isinf(number):
        raise ValueError(f"reward {name!r} returned {number}; expected a finite number, or None where it cannot score")
    return None if math.isnan(number) else number
