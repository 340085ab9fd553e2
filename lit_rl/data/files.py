"""Trajectories from files, as `lit_rl.to_dataset` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

_ENDINGS = (".parquet", ".jsonl", ".json")


def read_dataset(path: str | Path) -> Dataset:
    """Reads a file with one trajectory per row.

    Args:
        path: Of a parquet file, or of a file with one JSON object per line.

    Returns:
        The rows; they stay on disk until they are asked for.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Its ending says nothing about how to read it.

    Example:
        >>> read_dataset("trajectories.csv")
        Traceback (most recent call last):
        ...
        ValueError: cannot read 'trajectories.csv': give a .parquet, .jsonl or .json file, or a datasets.Dataset
    """
    from datasets import Dataset

    file = Path(path)
    if file.suffix not in _ENDINGS:
        raise ValueError(f"cannot read {str(path)!r}: give a .parquet, .jsonl or .json file, or a datasets.Dataset")
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} with trajectories")
    return Dataset.from_parquet(str(file)) if file.suffix == ".parquet" else Dataset.from_json(str(file))
