"""GPU-hours of an iteration, what a change is worth, lengths, waste, and a pilot run's log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.throughput import (
    Assumptions,
    ModelShape,
    budget_waste,
    cheapest_changes,
    dead_group_share,
    lognormal_lengths,
    measured_assumptions,
    padded_share,
    parse_lengths,
    step_gpu_hours,
)


@pytest.fixture(scope="module")
def qwen():
    return ModelShape.from_config("qwen3-8b")


def test_the_agent_run_to_its_rounding(qwen):
    step = step_gpu_hours(qwen, "h200")
    # 512 x 6000 sampled tokens / 1796 per second / 0.5 busy = 0.950 h; 12.288e6 tokens / 8053 = 0.424 h;
    # a scoring pass is a third of that, prefill of the other 9.216e6 tokens three quarters of the scoring pass
    assert step.decode == pytest.approx(512 * 6000 / 1796.488 / 0.5 / 3600, rel=1e-5)
    assert step.update == pytest.approx(512 * 24_000 * 6 * 8_190_735_360 / (0.4 * 989.4e12) / 3600)
    assert step.scoring == pytest.approx(step.update / 3)
    assert step.prefill == pytest.approx(step.scoring * 0.75)
    assert round(step.total, 1) == 1.6
    assert round(step.run(300), -1) == 490
    assert round(step.share("decode"), 2) == 0.59
    assert 0.24 < step.share("update") < 0.27
    slower = step_gpu_hours(qwen, "h200", busy_fraction=0.25)
    assert slower.total - step.total == pytest.approx(0.95, abs=0.01)


def test_a_64k_context_and_a_quarter_of_the_cache(qwen):
    base, long = step_gpu_hours(qwen, "h200"), step_gpu_hours(qwen, "h200", context=65_536)
    # 16.4 GB of weights + 64 x 65536 x 147456 = 618.5 GB against 154.6 GB: (16.4 + 618.5) / (16.4 + 154.6) = 3.71
    assert long.decode / base.decode == pytest.approx(634.857 / 171.000, rel=1e-4)
    assert (long.prefill, long.scoring, long.update) == (base.prefill, base.scoring, base.update)
    quarter = step_gpu_hours(qwen, "h200", context=65_536, cache_scale=0.25)
    assert quarter.decode == pytest.approx(base.decode)


def test_each_assumption_moves_its_phase_only(qwen):
    base = step_gpu_hours(qwen, "h200").by_phase()
    moves = {
        "decode": {"decode_batch": 32},
        "prefill": {"prefill_mfu": 0.2},
        "scoring": {"scoring_passes": 2},
        "update": {"update_passes": 2},
        "weight_sync": {"weight_sync_seconds": 10.0},
    }
    for phase, change in moves.items():
        changed = step_gpu_hours(qwen, "h200", **change).by_phase()
        assert {name for name in base if changed[name] != base[name]} == {phase}
    assert step_gpu_hours(qwen, "h200", weight_sync_seconds=10.0).weight_sync == pytest.approx(8 * 10 / 3600)


def test_counted_hours_know_attention_and_the_lengths(qwen):
    even = Assumptions(lengths=[10_000] * 8, tasks=1, context=8000)
    skewed = Assumptions(lengths=[1000] * 4 + [19_000] * 4, tasks=1, context=8000)
    hours = [step_gpu_hours(qwen, "h200", plan, counting="counted").update for plan in (even, skewed)]
    assert hours[1] > hours[0]
    hours = [step_gpu_hours(qwen, "h200", plan).update for plan in (even, skewed)]
    assert hours[1] == pytest.approx(hours[0])


def test_context_is_derived_from_the_lengths():
    # a token of a trajectory of n sees n/2 on average: (2 x 2/2 + 6 x 6/2) / 8
    assert Assumptions(lengths=[2, 6], context=None).decode_context == round(40 / 16)
    assert Assumptions(tokens=1000, context=None).decode_context == 500


def test_measured_rates_replace_what_they_contain(qwen):
    step = step_gpu_hours(qwen, "h200", rollout_rate=1000.0, scoring_rate=4000.0, update_rate=2000.0)
    tokens = 512 * 24_000
    assert step.decode == pytest.approx(tokens / 1000 / 3600)
    assert step.prefill == 0
    assert step.scoring == pytest.approx(tokens / 4000 / 3600)
    assert step.update == pytest.approx(tokens / 2000 / 3600)


def test_wrong_assumptions_are_named(qwen):
    with pytest.raises(TypeError, match=r"no assumption is called busy; there are: .*busy_fraction"):
        step_gpu_hours(qwen, "h200", busy=0.5)
    with pytest.raises(ValueError, match=r"`busy_fraction` must be in \(0, 1\], got 50"):
        step_gpu_hours(qwen, "h200", busy_fraction=50)
    with pytest.raises(ValueError, match="`tasks` must be a whole number >= 1"):
        Assumptions(tasks=0)
    with pytest.raises(ValueError, match="`lengths` must hold"):
        Assumptions(lengths=[])


def test_changes_are_worth_what_computing_them_again_says(qwen):
    step = step_gpu_hours(qwen, "h200")
    changes = cheapest_changes(qwen, "h200", step, dead_share=0.4)
    assert [change.saving for change in changes] == sorted((change.saving for change in changes), reverse=True)
    for change in changes:
        assert step.total - step_gpu_hours(qwen, "h200", **change.changes).total == pytest.approx(change.saving)
    (dead,) = [change for change in changes if "zero-advantage" in change.label]
    assert dead.saving == pytest.approx(0.4 * (step.scoring + step.update))
    (prefix,) = [change for change in changes if "prefix" in change.label]
    # 64 groups read 2000 tokens once instead of 8 times, of 9.216e6 that are read
    assert prefix.saving == pytest.approx(step.prefill * 64 * 7 * 2000 / 9_216_000)


def test_share_of_groups_without_signal():
    assert dead_group_share(0.9, 8) == pytest.approx(0.9**8 + 0.1**8)
    assert dead_group_share(1.0, 8) == dead_group_share(0.3, 1) == 1.0
    with pytest.raises(ValueError, match="pass rate"):
        dead_group_share(1.5, 8)


@given(st.floats(50, 50_000), st.floats(1.0, 3.8), st.integers(200, 800))
def test_log_normal_lengths_have_their_mean_and_percentile(mean, ratio, count):
    lengths = lognormal_lengths(mean, ratio * mean, count)
    assert lengths == sorted(lengths)
    assert sum(lengths) / count == pytest.approx(mean, rel=0.02)
    if ratio < 3:
        assert lengths[int(0.95 * count)] == pytest.approx(ratio * mean, rel=0.1)


def test_lengths_from_the_command_line(tmp_path: Path):
    file = tmp_path / "lengths.json"
    file.write_text("[5, 900, 20]")
    assert parse_lengths(str(file), 7) == [5, 900, 20]
    assert parse_lengths(str(file), 7, longest=100) == [5, 100, 20]
    assert parse_lengths("300", 2) == [300, 300]
    file.write_text("[5, -1]")
    for text, message in [
        (str(file), "positive integers"),
        ("missing.json", "no file"),
        ("many", "must be a .json file"),
        ("1,2,3", "one percentile"),
        ("100,900", "9.00 times its mean"),
        ("100,50", "mean <= p95"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_lengths(text, 4)


def test_waste_of_padding_and_of_waiting(qwen):
    assert padded_share([1, 1, 1, 5], 4) == pytest.approx(12 / 20)
    even = budget_waste(qwen, [100] * 8, 200, gpus=4)
    assert (even.microbatches, even.padding_share) == (1, 0.0)
    assert even.useful_share == pytest.approx(1.0)
    # one rank computes 1000 tokens while the other waits with 10
    uneven = budget_waste(qwen, [1000, 10], 1000, gpus=2)
    assert uneven.useful_share == pytest.approx(0.505, abs=0.002)
    with pytest.raises(ValueError, match="1000"):
        budget_waste(qwen, [1000, 10], 900, gpus=2)


def test_a_pilot_log_replaces_assumptions(tmp_path: Path):
    file = tmp_path / "metrics.csv"
    file.write_text(
        "epoch,throughput/devices,throughput/rollout_tokens_per_second,throughput/rollout_seconds,"
        "throughput/update_tokens_per_second,throughput/update_seconds,throughput/tokens_per_trajectory,"
        "throughput/policy_share,throughput/waiting_seconds,train/loss\n"
        "0,4,100,30,,0.0,500,0.5,2,\n"
        "0,,,,,,,,,0.7\n"
        "1,4,400,10,800,5,700,0.3,4,\n"
    )
    found = measured_assumptions(file)
    # (100 x 30 + 400 x 10) / 40 = 175 on 4 devices; the first iteration has no update rate
    assert found == {
        "gpus": 4,
        "rollout_rate": 175 / 4,
        "update_rate": 800 / 4,
        "scoring_passes": 0,
        "tokens": 600,
        "policy_share": 0.4,
        "weight_sync_seconds": 3,
    }
    Assumptions(**found)
    file.write_text("epoch,train/loss\n0,0.5\n")
    with pytest.raises(ValueError, match="TokenThroughputMonitor and a CSVLogger"):
        measured_assumptions(file)


def test_the_json_of_an_iteration_is_plain(qwen):
    json.dumps(step_gpu_hours(qwen, "h200").by_phase())
