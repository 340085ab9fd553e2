"""Metrics and monitors on two processes: the same exact numbers on both."""

from __future__ import annotations

import json
import math

import pytest

from tests.distributed.launch import launch


@pytest.fixture(scope="module")
def printed() -> str:
    return launch("tests.callbacks.ranks_worker", [], processes=2)


@pytest.fixture(scope="module")
def results(printed: str) -> list[dict[str, dict[str, float]]]:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


def test_metrics_are_weighted_by_what_they_average(results: list) -> None:
    for result in results:
        metrics = result["metrics"]
        assert metrics["entropy"] == 1.75  # 10 tokens of 1.0 and 30 of 2.0
        assert metrics["groups"] == 0.5  # 2 of 2 on rank 0, 0 of 2 on rank 1
        assert (metrics["all_pass"], metrics["all_fail"]) == (0.25, 0.25)


def test_zero_advantage_is_counted_over_ranks(results: list) -> None:
    for result in results:
        monitors = result["monitors"]
        assert monitors["zero_advantage/trajectories"] == pytest.approx(1 / 3)
        assert monitors["zero_advantage/scored_tokens"] == pytest.approx(30 / 100)
        assert monitors["zero_advantage/episodes_wasted"] == 2.0  # one in each of two epochs


def test_padding_is_counted_over_ranks(results: list) -> None:
    expected = {"positions": 104, "real": 103, "prompt": 3, "scored": 100, "live": 70, "filler": 1}
    expected |= {"fullest_share": 61 / 64, "padded_layout_positions": 3 * 61}
    for result in results:
        for name, value in expected.items():
            assert result["monitors"][f"padding/{name}"] == pytest.approx(value), name


def test_the_sampler_ratio_is_measured_over_ranks(results: list) -> None:
    for result in results:
        monitors = result["monitors"]
        assert monitors["sampler_ratio/tokens"] == 100
        assert monitors["sampler_ratio/outside_20_percent"] == pytest.approx(0.4)
        assert monitors["sampler_ratio/max"] == pytest.approx(0.5)
        assert monitors["sampler_ratio/mean"] == pytest.approx(-0.2)
        # 40 of 100 tokens at exp(-0.5), on one of the ranks
        ratio = math.exp(-0.5)
        assert monitors["sampler_ratio/mean_ratio"] == pytest.approx(0.6 + 0.4 * ratio)
        spread = math.sqrt(0.4 * 0.6) * (1 - ratio)
        assert monitors["sampler_ratio/mean_ratio_error"] == pytest.approx(spread / 10)


def test_lightning_recommends_no_further_reduction(printed: str, results: list) -> None:
    assert {name.split("/")[0] for name in results[0]["monitors"]} == {"padding", "sampler_ratio", "zero_advantage"}
    assert {name.split("/")[0] for name in results[0]["iterations"]} == {"curriculum", "throughput"}
    assert "sync_dist" not in printed


def test_numbers_are_logged_as_they_were_counted(results: list) -> None:
    for result in results:
        assert result["iterations"]["curriculum/observed_live_share"] == 1.0
        assert result["iterations"]["curriculum/estimates/25_to_50"] == 1.0
        assert result["monitors"]["zero_advantage/trajectories"] == 1 / 3  # as a Python float, not rounded to 32 bits
