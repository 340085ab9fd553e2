"""Trajectories by the path of their file, and what is said where a source is none."""

from __future__ import annotations

import pytest
from datasets import DatasetDict

from lit_rl import PackedDataModule, to_dataset
from lit_rl.data.summary import as_trajectories
from tests.helpers import random_trajectories


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["text", "path"])
def test_a_path_is_read(tmp_path, ending, kind):
    given = random_trajectories(8)
    path, dataset = tmp_path / f"data.{ending}", to_dataset(given)
    dataset.to_parquet(path) if ending == "parquet" else dataset.to_json(path)
    read = as_trajectories(kind(path))
    assert [t.token_ids.tolist() for t in read] == [t.token_ids.tolist() for t in given]
    assert [t.reward for t in read] == pytest.approx([t.reward for t in given])  # JSON has ten digits
    module = PackedDataModule(kind(path), max_tokens=64, validation_data=kind(path))
    assert module.rollouts is None


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*data.jsonl"):
        PackedDataModule(str(tmp_path / "data.jsonl"), max_tokens=64)
    with pytest.raises(ValueError, match=r"give a .parquet, .jsonl or .json file"):
        PackedDataModule("user/data", max_tokens=64)
    splits = DatasetDict(train=to_dataset(random_trajectories(4)))
    with pytest.raises(
        TypeError, match=r"DatasetDict of the splits \['train'\]; pass one, for example `ds\['train'\]`"
    ):
        PackedDataModule(splits, max_tokens=64)
