"""`lit-rl plan` as a new user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lit_rl.cli import main
from lit_rl.commands.plan_text import table
from lit_rl.testing import tiny_config


def plan(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def report(capsys, *arguments: str) -> dict:
    return json.loads(plan(capsys, *arguments, "--json"))


def line(text: str, *words: str) -> list[str]:
    (found,) = [row.split() for row in text.splitlines() if row.split()[: len(words)] == list(words)]
    return found[len(words) :]


def test_the_published_example_in_one_command(capsys):
    text = plan(capsys, "qwen3-8b", "--gpu", "h200", "--gpus", "8")
    assert "147,456 bytes of KV cache per token" in text
    assert "989.4 TFLOP/s dense bf16, 4.8 TB/s" in text
    assert line(text, "2,048", "64")[0] == "8,602"
    assert line(text, "16,384", "64")[0] == "1,796"
    assert line(text, "16,384", "256")[0] == "1,935"
    assert "Training: 8,053 first order" in text
    assert line(text, "decode")[:2] == ["0.95", "59%"]
    assert line(text, "update", "0.42")[0] == "26%"
    assert line(text, "one", "iteration")[0] == "1.62"
    assert line(text, "300", "iterations")[0] == "486"
    assert line(text, "policy_share") == ["0.25", "assumed"]
    assert line(text, "gpus") == ["8", "given"]
    assert "does not fit beside the weights on one h200: at most 45" in text


def test_a_longer_context_and_a_smaller_cache_in_one_command(capsys):
    text = plan(
        capsys, "qwen3-8b", "--gpu", "h200", "--what-if", "context=65536", "--what-if", "context=65536,cache_scale=0.25"
    )
    assert line(text, "context=65536")[:2] == ["3.53", "(x3.71)"]
    assert line(text, "context=65536")[2:8] == ["0.11", "(x1.00)", "0.14", "(x1.00)", "0.42", "(x1.00)"]
    assert line(text, "context=65536,cache_scale=0.25")[:2] == ["0.95", "(x1.00)"]


def test_a_phase_that_only_a_what_if_has_gets_its_column(capsys):
    text = plan(capsys, "qwen3-8b", "--gpu", "h200", "--what-if", "weight_sync_seconds=600")
    (header,) = [row.split() for row in text.splitlines() if row.split()[-2:] == ["weight_sync", "total"]]
    assert header == ["decode", "prefill", "scoring", "update", "weight_sync", "total"]
    assert line(text, "as", "planned")[4] == "0.00"
    assert line(text, "weight_sync_seconds=600")[8:] == ["1.33", "(new)", "2.95", "(x1.82)"]


def test_a_model_without_a_cache_has_no_limit_on_sequences(capsys, tmp_path: Path):
    tiny_config("mamba").save_pretrained(tmp_path)
    text = plan(capsys, str(tmp_path), "--gpu", "h200", "--pass-rate", "0.5")
    assert line(text, "16,384", "64")[-3:] == ["yes,", "no", "limit"]
    found = report(capsys, str(tmp_path), "--gpu", "h200")
    assert {row["sequences_that_fit"] for row in found["decode"]} == {None}
    assert "does not fit" not in "".join(found["notes"])
    assert line(plan(capsys, "qwen3-8b", "--gpu", "h200", "--cache-scale", "0.0001"), "16,384", "64")[-1] == "yes"


def test_lengths_pass_rate_and_budget(capsys):
    found = report(
        capsys,
        *("qwen3-8b", "--gpu", "h100", "--gpus", "4", "--tokens", "8000,24000", "--tasks", "16"),
        *("--pass-rate", "0.9", "--max-tokens", "65536"),
    )
    origins = {item["name"]: (item["value"], item["origin"]) for item in found["assumptions"]}
    assert origins["tokens"][0] == pytest.approx(8000, rel=0.01)
    assert (origins["tokens"][1], origins["context"][1], origins["group"][1]) == ("given", "derived", "assumed")
    waste = found["waste"]
    assert waste["zero_advantage_groups"] == pytest.approx(0.9**8 + 0.1**8)
    total = found["iteration"]["first_order"]["total"]
    assert waste["gpu_hours_on_zero_advantage"] == pytest.approx(waste["zero_advantage_groups"] * total)
    assert [budget["max_tokens"] for budget in waste["budgets"]] == [65_536, 131_072, 262_144]
    assert all(0.5 < budget["useful_share"] <= 1 for budget in waste["budgets"])
    assert 0.2 < waste["padding_share_of_padded_batches_of_8"] < 0.8
    labels = [change["label"] for change in found["changes"]]
    assert any("zero-advantage" in label for label in labels)
    first, second, third = (budget["useful_share"] for budget in waste["budgets"])
    gained = {f"budget {n:,}": other / first - 1 for n, other in ((131_072, second), (262_144, third))}
    assert [label for label in labels if label.startswith("budget")] == [
        f"{name}: {gain:+.0%} MFU" for name, gain in sorted(gained.items(), key=lambda item: -item[1]) if gain > 0.02
    ]
    assert found["memory_gb"]["microbatch_tokens"] == 65_536


def test_every_assumption_can_be_given_and_is_labelled(capsys):
    arguments = [
        "--busy-fraction",
        "0.25",
        "--parameters",
        "8.2e9",
        "--iterations",
        "10",
        "--weight-sync-seconds",
        "30",
    ]
    found = report(capsys, "qwen3-8b", "--gpu", "h200", *arguments)
    origins = {item["name"]: item["origin"] for item in found["assumptions"]}
    assert origins["busy_fraction"] == origins["parameters"] == origins["weight_sync_seconds"] == "given"
    assert set(origins.values()) == {"given", "assumed"}
    hours = found["iteration"]["first_order"]
    assert hours["run"] == pytest.approx(10 * hours["total"])
    assert hours["wall_hours_of_run"] == pytest.approx(hours["run"] / 8)
    (row,) = [row for row in found["decode"] if (row["context"], row["batch"]) == (16_384, 256)]
    assert round(row["first_order"]) == 1935


def test_a_config_of_ones_own_and_a_device_by_numbers(capsys, tmp_path: Path):
    tiny_config("qwen3").save_pretrained(tmp_path)
    numbers = ["--peak-tflops", "500", "--bandwidth-tb", "2", "--memory-gb", "64"]
    found = report(capsys, str(tmp_path), *numbers, "--tokens", "40")
    assert found["gpu"]["peak_flops"] == 500e12
    assert found["model"]["name"] == tmp_path.name
    text = plan(capsys, str(tmp_path), "--gpu", "h200", "--peak-tflops", "800")
    assert "800 TFLOP/s dense bf16, 4.8 TB/s" in text
    assert "peak_flops given" in text


def test_a_pilot_run_replaces_assumptions(capsys, tmp_path: Path):
    file = tmp_path / "metrics.csv"
    columns = ["devices", "rollout_tokens_per_second", "rollout_seconds", "tokens_per_trajectory", "policy_share"]
    file.write_text(",".join(f"throughput/{name}" for name in columns) + "\n2,1000,60,5000,0.4\n")
    found = report(capsys, "qwen3-8b", "--gpu", "h200", "--measured", str(file), "--gpus", "4")
    origins = {item["name"]: (item["value"], item["origin"]) for item in found["assumptions"]}
    assert origins["rollout_rate"] == (500, "measured")
    assert origins["tokens"] == (5000, "measured")
    assert origins["context"] == (2500, "derived")
    assert origins["gpus"] == (4, "given")
    assert found["iteration"]["first_order"]["gpu_hours"]["decode"] == pytest.approx(512 * 5000 / 500 / 3600)


def test_the_picture_is_drawn(capsys, tmp_path: Path):
    file = tmp_path / "plan.png"
    text = plan(capsys, "qwen3-0.6b", "--gpu", "l4", "--plot", str(file), "--what-if", "context=65536")
    assert file.read_bytes().startswith(b"\x89PNG")
    assert f"Figure: {file}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["qwen3-8b", "--gpu", "h2000"], "unknown accelerator 'h2000' (did you mean 'h200'?)"),
        (["qwen3-8b"], "give `--gpu NAME`, or all of `--peak-tflops`"),
        (["qwen9", "--gpu", "h200"], "no config at 'qwen9'"),
        (["qwen3-8b", "--gpu", "h200", "--tokens", "many"], "`tokens` must be a .json file"),
        (["qwen3-8b", "--gpu", "h200", "--busy-fraction", "50"], "`busy_fraction` must be in (0, 1]"),
        (["qwen3-8b", "--gpu", "h200", "--busy-fraction", "nan"], "`busy_fraction` must be a finite number"),
        (["qwen3-8b", "--gpu", "h200", "--pass-rate", "50"], "`--pass-rate` must be in [0, 1]"),
        (["qwen3-8b", "--gpu", "h200", "--iterations", "-5"], "`--iterations` must be at least 1"),
        (["qwen3-8b", "--gpu", "h200", "--max-tokens", "0"], "`--max-tokens` must be at least 1"),
        (["qwen3-8b", "--gpu", "h200", "--shards", "0"], "`--shards` must be at least 1"),
        (["qwen3-8b", "--gpu", "h200", "--parameters", "-5"], "`parameters` must be > 0"),
        (["qwen3-8b", "--gpu", "h200", "--trained-share", "3"], "`trained_share` must be in [0, 1]"),
        (["qwen3-8b", "--gpu", "h200", "--context", "0"], "`context` must be a whole number >= 1"),
        (["qwen3-8b", "--gpu", "h200", "--what-if", "gpus=0.5"], "`gpus` must be a whole number >= 1"),
        (["qwen3-8b", "--gpu", "h200", "--what-if", "share_prefix=2"], "`share_prefix` must be true or false"),
        (["qwen3-8b", "--gpu", "h200", "--what-if", "group=true"], "`group` must be a finite number"),
        (["qwen3-8b", "--gpu", "h200", "--tokens", "nan"], "got count=512, mean=nan"),
        (["qwen3-8b", "--gpu", "h200", "--tokens", "1000,inf"], "p95=inf"),
        (["qwen3-8b", "--gpu", "h200", "--tokens", "EMPTY.json"], "EMPTY.json' is no JSON"),
        (["EMPTY.json", "--gpu", "h200"], "EMPTY.json' is no JSON"),
        (["LIST.json", "--gpu", "h200"], "LIST.json' holds a JSON list"),
        (["qwen3-8b", "--gpu", "h200", "--measured", "."], "'.' is a folder; give the metrics.csv in it"),
        (["qwen3-8b", "--gpu", "h200", "--measured", "ODD.csv"], "ODD.csv' is not what a CSVLogger writes"),
        (["qwen3-8b", "--gpu", "h200", "--what-if", "size=3"], "NAME=VALUE with a name out of tasks"),
        (["qwen3-8b", "--gpu", "h200", "--what-if", "context=long"], "needs a number"),
        (["qwen3-8b", "--gpu", "h200", "--measured", "none.csv"], "none.csv"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, text in (("EMPTY.json", ""), ("LIST.json", "[1, 2]"), ("ODD.csv", "throughput/devices\nmany\n")):
        Path(name).write_text(text)
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lit-rl plan: ")
    assert message in captured.err


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nfrom lit_rl.cli import main\n"
        "try:\n    main(['plan', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'lightning', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "usage: lit-rl plan" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_pure_package_needs_no_lightning():
    script = "import sys, lit_rl.throughput\nprint(sorted({'lightning', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_tables_line_up():
    assert table(["a", "value"], [["long name", "1"], ["b", "22"]]) == (
        "  a          value\n  long name      1\n  b             22"
    )
