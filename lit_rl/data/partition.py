"""Which trajectories are trained together in a step: a seeded random partition."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lit_rl.data.packing import as_count
from lit_rl.options import as_integer

Partition = Literal["groups", "trajectories"]
Seed = int | Sequence[int] | None
Groups = Sequence[Hashable] | npt.NDArray[Any] | Tensor
Integers = npt.NDArray[np.int64]


def partition_steps(count: int, num_steps: int, *, groups: Groups | None = None, seed: Seed = None) -> list[list[int]]:
    """Divides trajectories at random into steps.

    With groups, whole groups are divided, so that a group's trajectories (whose advantages sum to zero) meet in one
    step. Steps get the same number of groups (else of trajectories), give or take one; where there are fewer than
    steps, some steps stay empty.

    Args:
        count: Number of trajectories.
        num_steps: Number of steps.
        groups: [count] group id of each trajectory, or `None` to divide single trajectories.
        seed: The same seed gives the same steps; `None` is seed 0, as all ranks have to agree.

    Returns:
        Ascending indices of the trajectories of each step.

    Raises:
        TypeError: `num_steps` is not an integer.
        ValueError: `num_steps` is below 1, or `groups` has another length.

    Example:
        >>> partition_steps(6, 2, groups=["a", "b", "a", "c", "b", "d"], seed=1)
        [[0, 1, 2, 4], [3, 5]]
    """
    num_steps = as_count(num_steps, "num_steps")
    generator = seeded_generator(seed, "steps")
    if groups is None:
        return [np.sort(part).tolist() for part in np.array_split(generator.permutation(count), num_steps)]
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids(groups, count)):
        members.setdefault(group, []).append(index)
    units = list(members.values())
    parts = np.array_split(generator.permutation(len(units)), num_steps)
    return [sorted(index for unit in part.tolist() for index in units[unit]) for part in parts]


def seeded_generator(seed: Seed, use: Literal["steps", "order"]) -> np.random.Generator:
    """A generator for one of the two uses of a plan's seed, so that they do not draw the same numbers.

    Args:
        seed: A number of at least 0, several of them, or `None` for 0.
        use: "steps" for the partition, "order" for the order of microbatches.

    Returns:
        The generator.

    Example:
        >>> bool(seeded_generator(3, "order").integers(99) == seeded_generator((3,), "order").integers(99))
        True
    """
    one = 0 if seed is None else as_integer(seed)
    # NumPy takes its own integers and Python's, no other library's.
    parts = [operator.index(part) for part in seed] if one is None else [one]  # type: ignore[union-attr]
    return np.random.default_rng([*parts, ("steps", "order").index(use)])


def group_ids(groups: Groups, count: int) -> list[Hashable]:
    """Group ids as a new list, checked for their number.

    Args:
        groups: [n] ids.
        count: The number of trajectories, n.

    Returns:
        The ids.

    Raises:
        ValueError: There are not `count` of them.

    Example:
        >>> group_ids(np.array([4, 4]), 2)
        [4, 4]
    """
    ids = groups.tolist() if isinstance(groups, (Tensor, np.ndarray)) else list(groups)
    if len(ids) != count:
        raise ValueError(f"`groups` has {len(ids)} entries for {count} trajectories; give one group id for each")
    return ids


def canonical_order(lengths: Integers, groups: list[Hashable] | None) -> Integers:
    """Indices in an order that the caller's own does not change (up to exchanging equal lengths).

    Args:
        lengths: int64 [n].
        groups: [n] ids, or `None`.

    Returns:
        int64 [n]: trajectories from long to short; with groups, a group's trajectories together, groups in the
        order of their lengths, whatever they are called.

    Example:
        >>> canonical_order(np.array([3, 9, 5, 1]), ["a", "b", "a", "b"]).tolist()
        [1, 3, 2, 0]
    """
    order = np.argsort(-lengths, kind="stable")
    if groups is None:
        return order
    members: dict[Hashable, list[int]] = {}
    for index in order.tolist():
        members.setdefault(groups[index], []).append(index)
    units = sorted(members.values(), key=lambda unit: [-int(lengths[index]) for index in unit])
    return np.array([index for unit in units for index in unit], dtype=np.int64)
