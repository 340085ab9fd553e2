"""`lit-rl fit` with YAML files as a user writes them."""

from __future__ import annotations

import csv
import sys
import warnings
from pathlib import Path

import pytest

from lit_rl import to_dataset
from lit_rl.cli import main
from lit_rl.commands import training
from lit_rl.testing import tiny_policy_model
from tests.helpers import random_trajectories

ROOT = Path(__file__).parents[2]
TRAINER = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: ., name: logs}}
  enable_checkpointing: false
model:
  class_path: lit_rl.PolicyModule
  init_args: {model: ./model, learning_rate: 1.0e-3}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to call the command in, with a model; what the command adds to `sys.path` goes away again."""
    tiny_policy_model("qwen3").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return tmp_path


def logged(folder: Path) -> list[dict[str, str]]:
    (file,) = folder.rglob("metrics.csv")
    with file.open() as rows:
        return list(csv.DictReader(rows))


def test_the_example_runs_as_it_is(folder):
    arguments = ["--model.init_args.model.init_args.number=64", "--trainer.max_epochs=2"]
    arguments += ["--trainer.check_val_every_n_epoch=2"]
    assert main(["fit", "--config", str(ROOT / "examples" / "fit.yaml"), *arguments]) == 0
    names = {name for row in logged(folder) for name, value in row.items() if value}
    assert {"val/reward", "rollout/reward", "zero_advantage/groups", "padding/share", "curriculum/pool_size"} <= names


def test_a_reward_function_of_ones_own_module(folder):
    (folder / "own_rewards_of_this_test.py").write_text(
        "def reward(completions, wanted, **columns):\n"
        "    return [sum(i == w for i in ids) / len(ids) for ids, w in zip(completions, wanted)]\n"
    )
    (folder / "run.yaml").write_text(
        TRAINER
        + """
data:
  class_path: lit_rl.PackedDataModule
  init_args:
    max_tokens: 128
    source:
      class_path: lit_rl.Rollouts
      init_args:
        environment: {class_path: lit_rl.SingleTurn, init_args: {rewards: own_rewards_of_this_test.reward}}
        tasks: [{id: a, prompt: [1, 5], wanted: 5}, {id: b, prompt: [1, 6], wanted: 6}]
        tasks_per_iteration: 2
        group_size: 4
        max_new_tokens: 5
"""
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["fit", "--config", "run.yaml"]) == 0
    assert not [w for w in caught if "args parameter" in str(w.message) or "serialize" in str(w.message)]
    assert any(row.get("rollout/reward") for row in logged(folder))


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_of_trajectories(folder, ending):
    dataset = to_dataset(random_trajectories(8, temperature=1.0))
    dataset.to_json("data.jsonl") if ending == "jsonl" else dataset.to_parquet("data.parquet")
    data = f"data: {{class_path: lit_rl.PackedDataModule, init_args: {{max_tokens: 64, source: data.{ending}}}}}\n"
    (folder / "run.yaml").write_text(TRAINER + data)
    assert main(["fit", "--config", "run.yaml"]) == 0


def test_a_file_that_is_not_there_is_named(folder, capsys):
    data = "data: {class_path: lit_rl.PackedDataModule, init_args: {max_tokens: 64, source: nothing.jsonl}}\n"
    (folder / "run.yaml").write_text(TRAINER + data)
    with pytest.raises(SystemExit) as stopped:
        sys.exit(main(["fit", "--config", "run.yaml"]))
    assert stopped.value.code == 2
    assert "there is no file 'nothing.jsonl' with trajectories" in capsys.readouterr().err


def test_help_names_the_example_and_only_what_there_is(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "lit-rl fit --config examples/fit.yaml" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert capsys.readouterr().out.startswith("usage: lit-rl ")
    with pytest.raises(SystemExit):
        training.run(["test"])
    assert "{fit,validate,predict}" in capsys.readouterr().err
