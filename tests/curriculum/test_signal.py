"""What a group of attempts says; expected values by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.curriculum import count_passes, group_signal


@pytest.mark.parametrize(
    ("rewards", "outcomes", "expected"),
    [
        ([1, 1, 1, 1], None, "all_pass"),
        ([0, 0, 0, 0], None, "all_fail"),
        ([-1.0, -1.0], None, "all_fail"),
        ([1.0, 0.0], None, "live"),
        ([0.5, 0.5, 0.5, 0.5], None, "equal_partial"),
        ([0.1, 0.0, 0.05, 0.0], None, "live"),
        ([0.1, 0.0, 0.05, 0.0], [0, 0, 0, 0], "all_fail"),
        ([0.9, 1.0, 0.95, 1.0], [1, 1, 1, 1], "all_pass"),
        ([0.5, 0.5], [True, False], "equal_partial"),
        ([0.7], None, "equal_partial"),
        ([1.00000, 1.00001], None, "live"),
        ([None, math.nan], None, "unscored"),
        ([1.0, None, 1.0], None, "all_pass"),
        ([1.0, None, 0.0], [1.0, None, 0.0], "live"),
        ([1.0, 0.5], [1.0, None], "live"),
        ([0.7, 0.5], [0.0, math.nan], "all_fail"),
    ],
)
def test_signal(rewards: list, outcomes: list | None, expected: str) -> None:
    assert group_signal(rewards, outcomes) == expected


def test_mean_inside_a_band_does_not_make_a_group_live() -> None:
    assert group_signal([0.5] * 4, threshold=0.5) == "all_pass"
    assert group_signal([0.5] * 4, threshold=0.8) == "equal_partial"


def test_unscored_attempts_are_left_out_of_the_count() -> None:
    assert count_passes([1.0, None, 0.0, math.nan]) == (1, 2)
    assert count_passes([0.4, 0.6], threshold=0.5) == (1, 2)


@pytest.mark.parametrize(
    ("rewards", "outcomes", "error", "words"),
    [
        ([], None, ValueError, "empty"),
        ([1.0, math.inf], None, ValueError, r"`rewards`\[1\] is inf"),
        ([1.0, 0.0], [1.0], ValueError, "1 entries for 2 rewards"),
        ("1.0", None, TypeError, "sequence of numbers"),
        (1.0, None, TypeError, "sequence of numbers"),
    ],
)
def test_bad_groups_are_refused(rewards: object, outcomes: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        group_signal(rewards, outcomes)  # type: ignore[arg-type]


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=8))
def test_without_outcomes_live_means_rewards_differ(rewards: list[float]) -> None:
    assert (group_signal(rewards) == "live") == (len(set(rewards)) > 1)
