from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning_utilities.core.apply_func import apply_to_collection

from lit_rl.data.collate import collate, filler_batch
from lit_rl.trajectory import Trajectory


def trajectory(ids, prompt=1, **fields):
    return Trajectory(ids, [index >= prompt for index in range(len(ids))], 1.0, **fields)


def test_no_target_crosses_a_seam():
    batch = collate([trajectory([10, 11, 12]), trajectory([20, 21])])
    assert batch.targets.tolist() == [11, 12, 21]
    assert batch.predictors.tolist() == [0, 1, 3]
    assert batch.scored.tolist() == [1, 2, 4]
    assert batch.num_scored == 3


def test_positions_restart_and_lengths_accumulate():
    batch = collate([trajectory([1, 2, 3]), trajectory([4, 5]), trajectory([6, 7, 8])])
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.cu_seqlens.dtype == torch.int32


def test_one_token_trajectories_score_nothing_and_one_token_answers_score_one():
    batch = collate([Trajectory([1], [1], 0.0), Trajectory([2], [1], 0.0), trajectory([3, 4, 5, 6])])
    assert batch.targets.tolist() == [4, 5, 6]
    assert collate([trajectory([1, 2, 9], prompt=2)]).targets.tolist() == [9]


def test_trailing_padding_is_no_segment():
    batch = collate([trajectory([1, 2, 3, 4, 5])], rows=[[0]], row_tokens=8)
    assert batch.segment_ids.tolist() == [[0] * 5 + [-1] * 3]
    assert batch.segment_lengths.tolist() == [5]
    assert (batch.num_positions, batch.num_tokens) == (8, 5)


def test_every_field_has_the_length_of_the_row():
    pair = [trajectory([1] * 6), trajectory([2] * 7)]
    batch = collate(pair, rows=[[0, 1]], row_tokens=16, advantages=[1.0, 2.0], weights=[0.5, 0.25])
    for values in (batch.input_ids, batch.position_ids, batch.segment_ids, batch.grid(batch.advantages)):
        assert values.shape == (1, 16)
    # 5 and 6 scored tokens; the three added slots carry nothing.
    assert batch.grid(batch.weights)[0].tolist() == [0.0, *[0.5] * 5, 0.0, *[0.25] * 6, 0.0, 0.0, 0.0]


def test_rows_of_several_segments_and_the_padded_layout():
    three = [trajectory([1, 2, 3]), trajectory([4, 5]), trajectory([6, 7, 8, 9])]
    batch = collate(three, rows=[[2], [0, 1]], row_tokens=6)
    assert batch.input_ids.tolist() == [[6, 7, 8, 9, 0, 0], [1, 2, 3, 4, 5, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, -1, -1], [0, 0, 0, 1, 1, -1]]
    assert batch.trajectory_index.tolist() == [2, 0, 1]
    assert batch.segment_starts.tolist() == [0, 6, 9]
    assert batch.targets.tolist() == [7, 8, 9, 2, 3, 5]
    padded = collate(three, layout="padded")
    assert padded.input_ids.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert padded.targets.tolist() == [2, 3, 5, 7, 8, 9]


def test_sampler_log_probs_and_temperature_follow_their_tokens():
    one = trajectory([1, 2, 3], log_probs=[float("nan"), -0.5, -1.0], temperature=[1.0, 0.5, 0.25])
    batch = collate([trajectory([7, 8], log_probs=[0.0, -2.0]), one])
    assert batch.sampler_log_probs.tolist() == [-2.0, -0.5, -1.0]
    assert batch.temperature.tolist() == [1.0, 0.5, 0.25]
    assert batch.scored_segments.tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"segment 1 \(task 'b'\) has no `log_probs`"):
        collate([one, trajectory([1, 2], task="b")])


def test_old_log_probs_are_aligned_with_token_ids():
    old = [torch.tensor([0.0, -0.25, -0.5]), torch.tensor([0.0, -4.0])]
    batch = collate([trajectory([1, 2, 3]), trajectory([4, 5])], old_log_probs=old)
    assert batch.old_log_probs.tolist() == [-0.25, -0.5, -4.0]


def test_filler_has_nothing_to_learn_from():
    filler = filler_batch(max_tokens=8)
    assert filler.is_filler
    assert (filler.num_scored, filler.num_positions) == (0, 1)
    assert filler.weights.numel() == filler.advantages.numel() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trajectories": []}, "`trajectories` is empty"),
        ({"layout": "ragged"}, '`layout` must be "packed" or "padded"'),
        ({"rows": [[0]]}, "each of the 2 trajectories once"),
        ({"rows": [[0, 1], []]}, "no empty row"),
        ({"rows": [[0], [1]], "layout": "padded"}, "`rows` belongs to"),
        ({"row_tokens": 4}, "row 0 holds 5 tokens, but `row_tokens` allows at most 4"),
        ({"weights": [1.0]}, "`weights` has 1 entries for 2 trajectories"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        collate(**({"trajectories": [trajectory([1, 2, 3]), trajectory([4, 5])]} | arguments))


def test_a_row_of_exactly_the_width_is_accepted():
    assert collate([trajectory([1] * 8)], row_tokens=8).num_positions == 8


def test_precision_plugins_cannot_rebuild_a_batch():
    batch = collate([trajectory([1, 2])], advantages=[1 / 3], weights=[1 / 7])
    same = apply_to_collection(batch, torch.Tensor, lambda tensor: tensor.to(torch.bfloat16))
    assert same is batch
    assert same.advantages.dtype == torch.float64


def test_a_batch_is_immutable_moves_and_copies():
    batch = collate([trajectory([1, 2])], weights=[1.0])
    with pytest.raises(AttributeError, match=r"batch.replace\(weights=...\)"):
        batch.weights = None
    assert batch.to("cpu").weights.tolist() == batch.weights.tolist()
    assert batch.to("meta").input_ids.device.type == "meta"
    assert batch.replace(weights=None).weights is None
    assert copy.deepcopy(batch).targets.tolist() == [2]


def test_slices_and_dtypes_for_objectives():
    batch = collate([trajectory([1, 2, 3, 4])], advantages=[0.1], weights=[0.2])
    part = batch.scored_slice(slice(1, 3))
    assert part.targets.tolist() == [3, 4]
    assert part.input_ids is batch.input_ids
    assert batch.like(torch.zeros(3)).advantages.dtype == torch.float32
    assert batch.like(torch.zeros(3)).scored.dtype == torch.int64


def test_wrong_lengths_are_refused_by_name():
    batch = collate([trajectory([1, 2, 3])])
    with pytest.raises(ValueError, match=r"`advantages` has shape \[5\], expected \[2\]"):
        batch.replace(advantages=torch.zeros(5))
    with pytest.raises(ValueError, match=r"`position_ids` has shape \[1, 2\], expected \[1, 3\]"):
        batch.replace(position_ids=torch.zeros(1, 2))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.randoms())
def test_any_rows_hold_the_same_scored_tokens(lengths, random):
    made = [trajectory([100 * i + j for j in range(length)], task=str(i)) for i, length in enumerate(lengths)]
    order = list(range(len(made)))
    random.shuffle(order)
    seams = sorted({0, len(order), *(random.randrange(len(order)) for _ in range(3))})
    rows = [order[a:b] for a, b in itertools.pairwise(seams)]
    width = max(sum(lengths[i] for i in row) for row in rows) + random.randrange(4)
    packed = collate(made, rows=rows, row_tokens=width)
    wanted = sorted(int(i) for t in made for i in t.token_ids[1:])
    assert sorted(packed.targets.tolist()) == wanted
    before = packed.input_ids.flatten()[packed.predictors]
    assert (packed.targets - before == 1).all()  # each predictor is the token before, of the same trajectory
    real = packed.segment_ids >= 0
    assert int(real.sum()) == sum(lengths)
    assert (packed.position_ids[real] == packed.input_ids[real] % 100).all()
