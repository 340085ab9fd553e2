from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.advantages import group_advantages

NAN = math.nan


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e9, -0.3])
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_equal_rewards_give_exactly_zero(reward, size, baseline):
    advantages, live = group_advantages([reward] * size, ["a"] * size, baseline=baseline)
    assert advantages.tolist() == [0.0] * size
    assert not live.any()


def test_membership_is_by_id_not_by_position():
    # Groups {1, 0} and {0, 0}: mean 0.5, sample deviation sqrt(0.5) = 0.70711, so 0.5 / 0.707107 = 0.70711.
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0], [0, 1, 0, 1]).advantages
    torch.testing.assert_close(
        advantages, torch.tensor([0.7071, 0, -0.7071, 0], dtype=torch.float64), atol=1e-4, rtol=0
    )


def test_ragged_groups_use_their_own_size():
    # Group 0 is {1, 0, 0}: mean 1/3, sample deviation 0.57735; group 1 is {1, 0}.
    advantages = group_advantages([1.0, 0, 0, 1, 0], [0, 0, 0, 1, 1]).advantages.tolist()
    assert advantages == pytest.approx([1.1547, -0.57735, -0.57735, 0.70711, -0.70711], abs=1e-4)
    with pytest.raises(ValueError, match="group 1 has 2 trajectories, expected 3"):
        group_advantages([1.0, 0, 0, 1, 0], [0, 0, 0, 1, 1], group_size=3)


def test_group_of_one_is_zero_with_one_warning():
    with pytest.warns(UserWarning, match=r"1 of 1 groups have a single trajectory \(first: 7\)") as caught:
        advantages, live = group_advantages([0.7], [7])
    assert advantages.tolist() == [0.0]
    assert not live.any()
    assert len(caught) == 1


def test_missing_reward_is_named_or_left_out():
    rewards, groups = [1, NAN, 0, 1, 1, 0, 0, 1], ["a"] * 4 + ["b"] * 4
    with pytest.raises(ValueError, match=r"`rewards`\[1\] \(group 'a'\) is missing"):
        group_advantages(rewards, groups)
    advantages = group_advantages(rewards, groups, missing="ignore").advantages.tolist()
    # {1, 0, 1}: mean 2/3, deviation 0.57735 -> 0.57735, -1.1547; {1, 0, 0, 1}: deviation 0.57735 -> 0.8660.
    assert advantages == pytest.approx([0.5773, 0, -1.1547, 0.5773, 0.8660, -0.8660, -0.8660, 0.8660], abs=1e-4)
    assert advantages[1] == 0.0


def test_small_but_real_differences_survive():
    # Difference 1e-5, sample deviation 7.071e-6: 5e-6 / (7.071e-6 + 1e-6) = 0.6195.
    advantages = group_advantages(torch.tensor([1.0, 1.00001], dtype=torch.float64), [0, 0]).advantages.tolist()
    assert advantages == pytest.approx([-0.6195, 0.6195], abs=1e-4)


def test_leave_one_out_and_unscaled():
    # r minus the mean of the other two: 1 - 0.5, 0 - 0.5 - ..., by hand.
    result = group_advantages([1.0, 0.0, 1.0], ["g"] * 3, baseline="leave_one_out", scale="none").advantages
    assert result.tolist() == [0.5, -1.0, 0.5]
    assert group_advantages([1.0, 0.0], ["g"] * 2, scale="none").advantages.tolist() == [0.5, -0.5]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_without_baseline_the_reward_is_the_advantage(scale):
    rewards, groups = [1.0, 1.0, 1.0, 1.0, 0.0, -0.5, NAN], ["a", "a", "a", "b", "b", "c", "c"]
    found = group_advantages(rewards, groups, baseline="none", scale=scale, missing="ignore")
    assert found.advantages.tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, -0.5, 0.0]
    assert found.live.tolist() == [True, True, True, True, False, True, False]


@pytest.mark.parametrize(
    ("eps", "error", "message"),
    [
        (math.inf, ValueError, "`eps` must be at least 0 and finite, got inf"),
        (NAN, ValueError, "`eps` must be at least 0 and finite, got nan"),
        (-1e-6, ValueError, "`eps` must be at least 0, got -1e-06"),
        ("small", TypeError, "`eps` must be a number, got 'small'"),
    ],
)
def test_an_eps_that_is_no_small_number_is_refused(eps, error, message):
    with pytest.raises(error, match=message):
        group_advantages([1.0, 0.0], ["a", "a"], eps=eps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], ["a", "b"]), "give one of each"),
        (([math.inf, 1.0], ["a", "a"]), "is inf"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)
    with pytest.raises(ValueError, match="`baseline` must be one of"):
        group_advantages([1.0, 0.0], ["a", "a"], baseline="median")


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=24), st.randoms())
def test_order_never_matters_and_inputs_are_untouched(pairs, random):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    before = copy.deepcopy((groups, rewards))
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        advantages = group_advantages(rewards, groups).advantages
        order = list(range(len(pairs)))
        random.shuffle(order)
        shuffled = group_advantages([rewards[i] for i in order], [groups[i] for i in order]).advantages
    assert (groups, rewards) == before
    torch.testing.assert_close(shuffled, advantages[order], atol=1e-9, rtol=1e-9)
    for group in set(groups):
        members = [i for i, g in enumerate(groups) if g == group]
        assert abs(float(advantages[members].sum())) < 1e-6
