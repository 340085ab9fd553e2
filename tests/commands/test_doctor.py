"""`lit-rl doctor` and `lit-rl fit` as a user runs them."""

from __future__ import annotations

import argparse

import pytest
import torch

from lit_rl import to_dataset
from lit_rl.checks import head, packing
from lit_rl.cli import main
from lit_rl.commands import doctor
from lit_rl.testing import tiny_policy_model
from tests.helpers import random_trajectories


@pytest.fixture
def saved(tmp_path):
    def save(architecture="qwen3"):
        folder = tmp_path / architecture
        tiny_policy_model(architecture).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "mamba"])
def test_a_healthy_model_passes(saved, architecture, capsys):
    assert main(["doctor", "--model", str(saved(architecture))]) == 0
    output = capsys.readouterr().out
    assert output.count("PASS") == 4
    assert "FAIL" not in output


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_every_check_runs_in_the_precision_of_the_run(saved, precision, capsys, monkeypatch):
    seen = {}

    def watched(name, check):
        def run(policy, *arguments, **options):
            dtype = next(policy.parameters()).dtype
            seen[name] = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else dtype
            return check(policy, *arguments, **options)

        return run

    monkeypatch.setattr(head, "check_head", watched("head", head.check_head))
    monkeypatch.setattr(packing, "check_packing", watched("packing", packing.check_packing))
    scored = doctor._sampler_ratio
    ratio = watched("ratio", lambda policy, module, *rest: scored(module, *rest))
    monkeypatch.setattr(doctor, "_sampler_ratio", lambda module, *rest: ratio(module.policy, module, *rest))
    assert main(["doctor", "--model", str(saved()), "--precision", precision]) == 0
    assert seen == dict.fromkeys(("head", "packing", "ratio"), torch.bfloat16)
    output = capsys.readouterr().out
    assert f"precision {precision}" in output
    assert output.count("PASS") == 4


def test_own_trajectories_and_a_bare_config(saved, tmp_path, capsys):
    to_dataset(random_trajectories(12)).to_parquet(tmp_path / "t.parquet")
    config = saved("llama") / "config.json"
    assert main(["doctor", "--model", str(config), "--data", str(tmp_path / "t.parquet"), "--max-tokens", "32"]) == 1
    output = capsys.readouterr().out
    # The stored log-probabilities are made up, so this one has to fail, and only this one.
    assert [line.split()[1:3] for line in output.splitlines() if "FAIL" in line] == [["sampler", "ratio"]]


def test_a_forgotten_logit_scale_is_found(saved):
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    arguments = parser.parse_args(["--model", str(saved("granite"))])
    module = doctor.load_module(arguments.model, "auto")
    module.policy.head.logit_scale = 1.0
    verdicts = dict(doctor.examine(module, doctor.load_trajectories(arguments, module), arguments))
    assert not verdicts["head"].ok


def test_what_is_not_there_is_said(capsys, saved):
    assert main(["doctor", "--model", "/nowhere"]) == 2
    assert "`--model` is '/nowhere', which does not exist" in capsys.readouterr().err
    assert main(["doctor", "--model", str(saved()), "--data", "/nowhere.parquet"]) == 2
    assert "`--data` is '/nowhere.parquet'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "-3"], "`--max-tokens` must be at least 1, got -3"),
        (["--trajectories", "0"], "`--trajectories` must be at least 2, got 0"),
        (["--precision", "half"], "Precision 'half' is invalid"),
        (["--accelerator", "abacus"], "abacus"),
    ],
)
def test_options_that_cannot_work_are_refused(saved, capsys, options, message):
    assert main(["doctor", "--model", str(saved()), *options]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read_are_refused(saved, tmp_path, capsys):
    for name, text in (("broken.json", "{"), ("empty.json", ""), ("list.json", "[1, 2]"), ("object.json", "{}")):
        (tmp_path / name).write_text(text)
        assert main(["doctor", "--model", str(tmp_path / name)]) == 2, name
        assert f"{name}', which cannot be read" in capsys.readouterr().err
    model = str(saved())
    for name, text in (
        ("empty.jsonl", ""),
        ("broken.jsonl", "{"),
        ("other.jsonl", '{"a": 1}\n'),
        ("blank.jsonl", "\n"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["doctor", "--model", model, "--data", str(tmp_path / name)]) == 2, name
        assert f"`--data` is '{tmp_path / name}'" in capsys.readouterr().err
    to_dataset(random_trajectories(1)).to_parquet(tmp_path / "one.parquet")
    assert main(["doctor", "--model", model, "--data", str(tmp_path / "one.parquet")]) == 2
    assert "with 1 trajectories; at least 2 are needed" in capsys.readouterr().err


def test_fit_from_a_yaml_file_with_all_callbacks(saved, tmp_path, monkeypatch):
    names = ["PassRateCurriculum", "ZeroAdvantageMonitor", "PaddingMonitor", "SamplerRatioMonitor", "PackingCheck"]
    names += ["GradientNormalizationCheck", "TokenThroughputMonitor"]
    callbacks = "".join(f"\n    - class_path: lit_rl.callbacks.{name}" for name in names)
    (tmp_path / "run.yaml").write_text(f"""
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 2
  log_every_n_steps: 1
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {tmp_path}, name: logs}}}}
  callbacks:{callbacks}
model:
  class_path: lit_rl.PolicyModule
  init_args: {{model: {saved()}, learning_rate: 1.0e-3}}
data:
  class_path: lit_rl.PackedDataModule
  init_args:
    max_tokens: 256
    source:
      class_path: lit_rl.Rollouts
      init_args:
        environment: tests.rollout.toys.Dialogue
        tasks: [{{id: a, number: 3}}, {{id: b, number: 4}}, {{id: c, number: 5}}]
        tasks_per_iteration: 2
        group_size: 3
        end_ids: [2]
        max_new_tokens: 4
""")
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", str(tmp_path / "run.yaml")]) == 0
    (log,) = tmp_path.rglob("metrics.csv")
    header = log.read_text().splitlines()[0]
    for prefix in ("train/", "rollout/", "curriculum/", "zero_advantage/", "padding/", "sampler_ratio/", "throughput/"):
        assert prefix in header, prefix
