"""Every second in one phase, and the three token counts of a microbatch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.throughput import ModelShape, model_flops
from lit_rl.throughput.ledger import PHASES, PhaseClock, Work, gpu_hours

SMALL = ModelShape.decoder(hidden=64, layers=2, vocabulary=1000, feed_forward=256, query_heads=4)


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.floats(0, 1e6)), min_size=1, max_size=20))
def test_phases_add_up_to_the_time_between_start_and_stop(visits):
    times = [0.0]
    for _, seconds in visits:
        times.append(times[-1] + seconds)
    ticks = iter(times)
    clock = PhaseClock(lambda: next(ticks))
    for phase, _ in visits:
        clock.enter(phase)
    clock.reassign(3.0, "waiting", "rollout")
    clock.enter(None)
    assert sum(clock.seconds.values()) == pytest.approx(times[-1])
    assert sum(clock.take().values()) == pytest.approx(times[-1])
    assert not any(clock.seconds.values())


def test_pending_time_belongs_to_the_current_phase_and_stays_pending():
    ticks = iter([0.0, 5.0, 7.0])
    clock = PhaseClock(lambda: next(ticks))
    clock.enter("update")
    assert clock.pending()["update"] == 5.0
    assert clock.pending()["update"] == 7.0
    assert clock.seconds["update"] == 0.0


def test_positions_real_tokens_and_scored_tokens_are_three_numbers():
    # a row of 8 with one segment of 5 and a prompt of 2
    work = Work.of_segments([(5, 3, 3)], 8, SMALL)
    assert (work.positions, work.tokens, work.scored) == (8, 5, 3)
    assert 1 - work.tokens / work.positions == 0.375
    assert work.flops == model_flops(SMALL, [5], scored=3).model  # from real tokens
    rates = work.rates(2.0, 4, 1e12)
    assert rates["update_positions_per_second"] == 4.0
    assert rates["update_tokens_per_second"] == 2.5
    assert rates["update_scored_tokens_per_second"] == 1.5
    assert rates["update_mfu"] == work.flops / (2.0 * 4 * 1e12)


def test_useful_work_is_that_of_live_segments():
    work = Work.of_segments([(5, 3, 3), (7, 4, 0), (0, 0, 0)], 13, SMALL)
    assert (work.segments, work.tokens, work.live) == (2, 12, 3)
    assert work.useful == model_flops(SMALL, [5], scored=3).model
    assert work.executed == work.flops + model_flops(SMALL, [5, 7], scored=7).head / 3


def test_a_scoring_pass_is_one_more_forward():
    plain = Work.of_segments([(5, 3, 3), (7, 4, 0)], 12, SMALL)
    scored = Work.of_segments([(5, 3, 3), (7, 4, 0)], 12, SMALL, scoring_passes=1)
    assert scored.flops == pytest.approx(plain.flops * 4 / 3)  # a forward pass is a third of forward and backward
    assert scored.executed - scored.flops == pytest.approx(plain.executed - plain.flops)
    assert scored.useful == plain.useful


def test_work_survives_a_reduction_over_ranks():
    work = Work.of_segments([(5, 3, 3)], 8, SMALL)
    assert Work.from_values(work.values()) == work


def test_no_time_or_no_work_is_no_rate():
    assert Work.of_segments([(5, 3, 3)], 8, SMALL).rates(0.0, 1, 1e12) == {}
    assert Work().rates(1.0, 1, 1e12) == {}
    assert "update_mfu" not in Work.of_segments([(5, 3, 3)], 8, None).rates(1.0, 1, None)


def test_gpu_hours():
    assert gpu_hours(dict.fromkeys(PHASES, 600.0))["gpu_hours"] == pytest.approx(1.0)
