"""`lit-rl budget`: measured on this machine's own CPU, one process per microbatch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from lit_rl.cli import main
from lit_rl.commands import budget
from lit_rl.testing import tiny_config

MEGA = 1e6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model whose activations outweigh what Python and torch hold anyway."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 512}
    tiny_config("qwen3", **sizes, max_position_embeddings=8192).save_pretrained(path)
    return path


def test_the_prediction_holds_at_a_size_that_was_not_measured(capsys, folder):
    arguments = ["--model", str(folder), "--context", "512", "--tokens", "1024,2048", "--check", "4096"]
    assert main(["budget", *arguments, "--device", "cpu", "--limit-gb", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(p["tokens"], p["longest"]) for p in report["measurements"]] == [(1024, 512), (1024, 128), (2048, 512)]
    check = report["check"]
    assert abs(check["relative_error"]) < 0.1
    # Beyond what a process holds anyway the microbatch must matter, or the line above would say nothing.
    assert check["peak_bytes"] > 1.3 * report["measurements"][0]["peak_bytes"]
    advice, fit = report["recommendation"], report["fit"]
    assert fit["per_token"] * advice["max_tokens"] + fit["per_longest"] * 512 + fit["fixed"] <= 0.9 * 2e9
    assert advice["max_tokens"] % 256 == 0
    assert advice["sentence"].startswith(f"PackedDataModule(source, max_tokens={advice['max_tokens']})")


def answer(fixed=500 * MEGA, per_token=0.1 * MEGA, limit=4000 * MEGA, fails_above=None):
    """Stands in for the measuring process."""

    def probe(arguments: argparse.Namespace, tokens: int, longest: int):
        if fails_above is not None and tokens > fails_above:
            return "ended by signal 9"
        return {"peak_bytes": fixed + per_token * tokens, "limit_bytes": limit}

    return probe


def test_the_table_says_what_was_measured_and_what_to_paste(capsys, monkeypatch, folder):
    monkeypatch.setattr(budget, "_probe", answer())
    assert main(["budget", "--model", str(folder), "--context", "1000", "--check", "9000", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "peak = 0.500 GB + 100.0 kB x tokens + 0.0 kB x longest" in text
    assert "check at 9,000 tokens: predicted 1.400 GB, measured 1.400 GB (+0.0%)" in text
    # (0.9 x 4000 - 500) / 0.1 = 31000, rounded down to a multiple of 256
    assert "PackedDataModule(source, max_tokens=30976)" in text
    assert "8 times the largest microbatch that was measured" in text


def test_a_budget_far_beyond_what_was_measured_is_not_offered_for_pasting(capsys, monkeypatch, folder):
    monkeypatch.setattr(budget, "_probe", answer(limit=8000 * MEGA))
    arguments = ["budget", "--model", str(folder), "--context", "1000", "--device", "cpu"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    # (0.9 x 8000 - 500) / 0.1 = 67000, 17 times the 4000 that were measured
    assert "max_tokens = 66,816" in text
    assert "17 times the largest microbatch that was measured" in text
    assert "measure with `--tokens 8352,16704` first" in text
    assert "PackedDataModule" not in text
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recommendation"]["sentence"] is None
    # The advice leads to a line to paste.
    assert main([*arguments, "--tokens", "8352,16704"]) == 0
    assert "PackedDataModule(source, max_tokens=66816)" in capsys.readouterr().out


def test_how_long_it_takes_is_said_beforehand(capsys, monkeypatch, folder):
    monkeypatch.setattr(budget, "_probe", answer())
    arguments = ["budget", "--model", str(folder), "--context", "1000", "--device", "cpu", "--check", "9000"]
    assert main(arguments) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("6 measurements, each in a fresh process that trains 3 microbatches: about ")
    assert first.endswith(" min or a few times that; one is given up after 1800 s (`--timeout`)")
    assert not second.startswith("6 measurements")


def test_sizes_that_do_not_fit_are_left_out_and_named(capsys, monkeypatch, folder):
    monkeypatch.setattr(budget, "_probe", answer(fails_above=3000))
    arguments = ["--model", str(folder), "--context", "1000", "--device", "cpu"]
    assert main(["budget", *arguments]) == 0
    assert "4,000 tokens in segments of 1,000: not measured, ended by signal 9" in capsys.readouterr().out
    monkeypatch.setattr(budget, "_probe", answer(fails_above=2500))
    assert main(["budget", *arguments]) == 2
    assert "only 2 of the measurements came back" in capsys.readouterr().err


def test_a_broken_model_is_reported_at_once(capsys, monkeypatch, folder):
    calls = []

    def probe(arguments, tokens, longest):
        calls.append(tokens)
        return "RuntimeError: something is wrong with it"

    monkeypatch.setattr(budget, "_probe", probe)
    assert main(["budget", "--model", str(folder), "--context", "1000", "--device", "cpu"]) == 2
    assert "the first microbatch could not be trained: RuntimeError" in capsys.readouterr().err
    assert calls == [2000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nothing-here", "--context", "100"], "no config at 'nothing-here'"),
        (["--model", "qwen3-0.6b", "--context", "2"], "`--context` must be at least 4"),
        (["--model", "qwen3-0.6b", "--context", "100", "--tokens", "100"], "at least two different sizes"),
        (["--model", "qwen3-0.6b", "--context", "100", "--tokens", "1,many"], "whole numbers"),
        (["--model", "qwen3-0.6b", "--context", "100", "--margin", "1.5"], "`--margin` must be in [0, 1)"),
        (["--model", "qwen3-0.6b", "--context", "100", "--limit-gb", "0"], "`--limit-gb` must be greater than 0"),
        (["--model", "qwen3-0.6b", "--context", "100", "--check", "-3"], "`--check` must be greater than 0"),
        (["--model", "qwen3-0.6b", "--context", "100", "--check", "0"], "`--check` must be greater than 0"),
        (["--model", "qwen3-0.6b", "--context", "100", "--timeout", "nan"], "`--timeout` must be greater than 0"),
        (["--model", "qwen3-0.6b", "--context", "100", "--scored-share", "0"], "`--scored-share` must be in (0, 1]"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(["budget", *arguments, "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lit-rl budget: ")
    assert message in captured.err
