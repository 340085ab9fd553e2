from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lit_rl import options
from lit_rl.curriculum import TaskSampler
from lit_rl.data.packing import as_count
from lit_rl.policy.head_inputs import check_count
from lit_rl.rollout.validation import check_end_ids, check_integer, check_temperature


@pytest.mark.parametrize("three", [3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)])
def test_integers_of_every_kind_are_integers_everywhere(three):
    options.check_at_least(3, some=three)
    check_count("some", three)
    for read in (as_count(three, "some"), check_integer("some", three, 3), *check_end_ids([three])):
        assert (read, type(read)) == (3, int)
    assert len(TaskSampler(["a", "b", "c", "d"], seed=three).sample(three, iteration=0)) == 3


@pytest.mark.parametrize(
    "other", [True, np.bool_(True), torch.tensor(True), 3.0, np.float64(3), torch.tensor(3.5), "3"]
)
def test_what_is_no_integer_is_refused_everywhere(other):
    for check in (
        lambda: options.check_at_least(1, some=other),
        lambda: check_count("some", other),
        lambda: as_count(other, "some"),
        lambda: check_integer("some", other, 1),
        lambda: check_end_ids([other]),
        lambda: TaskSampler(["a"], seed=other),
    ):
        with pytest.raises(TypeError, match=r"integer|whole number"):
            check()


def test_an_integer_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="`some` must be at least 1, got 0"):
        options.check_at_least(1, some=np.int64(0))


@pytest.mark.parametrize("half", [0.5, np.float32(0.5), np.array([0.5]), torch.tensor(0.5)])
def test_real_numbers_of_every_kind(half):
    options.check_real(0, some=half)
    options.check_above(0, some=half)
    assert check_temperature(half) == options.as_number(half) == 0.5


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (math.inf, ValueError, r"`some` must be (at least|greater than) 0 and finite, got"),
        (math.nan, ValueError, r"`some` must be (at least|greater than) 0 and finite, got"),
        (-1, ValueError, r"`some` must be (at least|greater than) 0, got -1"),
        ("0.5", TypeError, "`some` must be a number, got '0.5'"),
        (np.array([1.0, 2.0]), TypeError, "`some` must be a number"),
        (1j, TypeError, "`some` must be a number"),
    ],
)
def test_what_is_no_finite_number_is_refused(value, error, message):
    for check in (options.check_real, options.check_above):
        with pytest.raises(error, match=message):
            check(0, some=value)
