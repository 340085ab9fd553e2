from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.data import packing
from lit_rl.data.packing import PackingLosses, as_lengths, fit_lengths, pack_sequences


def slow_first_fit_decreasing(lengths, capacity):
    rows, room = [], []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row in range(len(rows)):
            if room[row] >= lengths[index]:
                break
        else:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 60).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_rows_are_those_of_the_plain_first_fit_decreasing(case):
    capacity, lengths = case
    assert pack_sequences(lengths, capacity) == slow_first_fit_decreasing(lengths, capacity)


@pytest.mark.parametrize("seed", range(50))
def test_nothing_is_lost_doubled_or_above_the_capacity(seed):
    lengths = np.random.default_rng(seed).integers(1, 65, size=1000)
    rows = pack_sequences(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(1000))
    assert all(row and lengths[row].sum() <= 64 for row in rows)
    assert rows == pack_sequences(lengths, 64)


def test_full_rows_and_no_rows():
    assert pack_sequences([4, 4], 4) == [[0], [1]]
    assert pack_sequences([], 4) == []
    assert pack_sequences(np.array([]), 4) == []


def test_work_grows_near_linearly(monkeypatch):
    calls = 0

    def counted(function):
        def wrapper(*arguments):
            nonlocal calls
            calls += 1
            return function(*arguments)

        return wrapper

    monkeypatch.setattr(packing, "heappush", counted(packing.heappush))
    monkeypatch.setattr(packing, "heappop", counted(packing.heappop))
    for count in (2_000, 20_000):
        calls = 0
        pack_sequences(np.random.default_rng(0).integers(1, 2049, size=count).tolist(), 8192)
        assert calls <= 4 * count


def test_a_trajectory_above_the_row_is_named():
    with pytest.raises(ValueError, match=r"trajectory 2 has 9 tokens, but `row_tokens` allows at most 8"):
        pack_sequences([5, 1, 9], 8)
    assert pack_sequences([5, 1, 8], 8) == [[2], [0, 1]]


def test_dropping_and_cutting_are_counted():
    with pytest.warns(UserWarning, match=r"dropped 1 \(9 tokens\)"):
        assert pack_sequences([5, 1, 9], 8, overlong="drop") == [[0, 1]]
    assert fit_lengths([5, 1, 9], 8, "drop").losses == PackingLosses(dropped_trajectories=1, dropped_tokens=9)
    with pytest.warns(UserWarning, match=r"cut 1 \(by 1 tokens\)"):
        assert pack_sequences([5, 1, 9], 8, overlong="truncate") == [[2], [0, 1]]
    fitted = fit_lengths([5, 1, 9], 8, "truncate")
    assert fitted.lengths.tolist() == [5, 1, 8]
    assert fitted.losses == PackingLosses(truncated_trajectories=1, truncated_tokens=1)


def test_empty_trajectories_are_named_or_skipped_and_counted():
    with pytest.raises(ValueError, match="trajectory 1 has no tokens"):
        pack_sequences([3, 0, 2], 8)
    with pytest.warns(UserWarning, match="skipped 1 without tokens"):
        assert pack_sequences([3, 0, 2], 8, empty="skip") == [[0, 2]]
    fitted = fit_lengths([3, 0, 2], 8, empty="skip")
    assert (fitted.kept.tolist(), fitted.losses.skipped_trajectories) == ([0, 2], 1)
    with pytest.warns(UserWarning, match="skipped 1"):
        assert pack_sequences([0], 8, empty="skip") == []
    with pytest.raises(ValueError, match="trajectory 0"):
        pack_sequences([0], 8)


def test_a_fit_without_losses_is_silent_and_false(recwarn):
    assert not fit_lengths([5, 1], 8).losses
    assert str(PackingLosses()) == "nothing lost"
    pack_sequences([5, 1], 8, overlong="drop", empty="skip")
    assert len(recwarn) == 0


@pytest.mark.parametrize(
    "lengths",
    [
        [5, 1, 2],
        (5, 1, 2),
        np.array([5, 1, 2], dtype=np.int32),
        torch.tensor([5, 1, 2]),
        [np.int64(5), 1, torch.tensor(2)],
    ],
)
def test_integer_sequences_are_accepted(lengths):
    assert pack_sequences(lengths, 8) == [[0, 2, 1]]


@pytest.mark.parametrize(
    "lengths",
    [
        [5, True],
        [5, 1.0],
        [5, None],
        [5, torch.tensor(True)],
        [5, np.bool_(True)],
        np.array([5.0]),
        np.array([True]),
        torch.tensor([5.0]),
        torch.tensor([True]),
        "58",
        8,
        {5: 1},
    ],
)
def test_other_lengths_are_refused(lengths):
    with pytest.raises(TypeError, match="integer"):
        pack_sequences(lengths, 8)


def test_bad_shapes_and_values_are_refused():
    with pytest.raises(ValueError, match=r"`lengths`\[1\] is -3"):
        pack_sequences([5, -3], 8)
    with pytest.raises(ValueError, match="one dimension"):
        pack_sequences(torch.ones(2, 2, dtype=torch.int64), 8)
    with pytest.raises(ValueError, match="`overlong` must be one of"):
        pack_sequences([1], 8, overlong="split")
    with pytest.raises(ValueError, match="`empty` must be one of"):
        pack_sequences([1], 8, empty="drop")


@pytest.mark.parametrize("row_tokens", [7.5, None, "8", True])
def test_capacities_of_another_type_are_refused(row_tokens):
    with pytest.raises(TypeError, match="row_tokens"):
        pack_sequences([1], row_tokens)


@pytest.mark.parametrize("row_tokens", [0, -1])
def test_capacities_below_one_are_refused(row_tokens):
    with pytest.raises(ValueError, match=f"`row_tokens` must be at least 1, got {row_tokens}"):
        pack_sequences([1], row_tokens)


@pytest.mark.parametrize("lengths", [[9, 3, 4], np.array([9, 3, 4]), torch.tensor([9, 3, 4])])
def test_lengths_are_not_changed(lengths):
    before = copy.deepcopy(lengths)
    with pytest.warns(UserWarning, match="cut 1"):
        rows = pack_sequences(lengths, 8, overlong="truncate")
    as_lengths(lengths)[0] = 1
    assert all(int(a) == int(b) for a, b in zip(lengths, before, strict=True))
    with pytest.warns(UserWarning, match="cut 1"):
        assert pack_sequences(lengths, 8, overlong="truncate") == rows
