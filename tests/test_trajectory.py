from __future__ import annotations

import copy
import pickle

import datasets
import numpy as np
import pytest
import torch

from lit_rl.data.state import trajectories_from_state, trajectories_to_state
from lit_rl.trajectory import Trajectory, from_dataset, to_dataset

FIELDS = ("token_ids", "action_mask", "temperature", "log_probs")


def example(**changes):
    values = {
        "token_ids": [7, 3, 9, 4, 8],
        "action_mask": [0, 0, 1, 1, 1],
        "reward": 0.5,
        "log_probs": [float("nan"), float("inf"), -0.25, -1.5, -3.0],
        "group": "0:add",
        "task": "add",
        "truncated": True,
        "temperature": 0.7,
        "info": {"turns": 2, "parts": {"tests": 0.5}},
    }
    return Trajectory(**(values | changes))


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for name in FIELDS:
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other), name
    for name in ("reward", "group", "task", "truncated", "info"):
        one, other = getattr(left, name), getattr(right, name)
        assert one == other or (one != one and other != other), name


def test_lists_arrays_and_tensors_make_the_same_record():
    arrays = example(token_ids=np.array([7, 3, 9, 4, 8]), action_mask=np.array([False, False, True, True, True]))
    tensors = example(
        token_ids=torch.tensor([7, 3, 9, 4, 8], dtype=torch.int32), action_mask=torch.tensor([0, 0, 1, 1, 1])
    )
    assert_same(arrays, example())
    assert_same(tensors, example())


def test_token_zero_is_never_scored():
    assert Trajectory([1, 2], [1, 1], 0.0).scored.tolist() == [False, True]
    assert Trajectory([1], [1], 0.0).num_scored == 0


def test_every_answer_token_is_scored_first_and_last_included():
    trajectory = Trajectory([5, 1, 2, 3, 4], [0, 1, 1, 1, 1], 1.0)
    assert trajectory.scored.nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_log_probs_are_kept_where_scored_and_inert_elsewhere():
    assert example().log_probs.tolist() == [0.0, 0.0, -0.25, -1.5, -3.0]


def test_record_is_immutable_and_keeps_no_reference_to_its_inputs():
    ids = torch.tensor([1, 2, 3])
    trajectory = Trajectory(ids, [0, 1, 1], 1.0)
    ids[0] = 99
    assert trajectory.token_ids.tolist() == [1, 2, 3]
    with pytest.raises(AttributeError):
        trajectory.reward = 2.0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"token_ids": []}, ValueError, "`token_ids` is empty"),
        ({"token_ids": "fix it"}, TypeError, "`token_ids` is text"),
        ({"token_ids": [1.5, 2, 3, 4, 5]}, TypeError, "`token_ids` has dtype"),
        ({"token_ids": [1, 2, -1, 4, 5]}, ValueError, r"`token_ids`\[2\] is -1"),
        ({"token_ids": [[1, 2], [3, 4]]}, ValueError, r"shape \[2, 2\]"),
        ({"action_mask": [0, 1]}, ValueError, "`action_mask` has 2 entries but `token_ids` has 5"),
        ({"action_mask": [0, 0, 2, 1, 1]}, ValueError, "other than 0 and 1"),
        ({"log_probs": [-1.0] * 4}, ValueError, "`log_probs` has 4 entries"),
        ({"log_probs": [0, 0, float("nan"), -1, -1]}, ValueError, r"`log_probs`\[2\] is nan"),
        ({"log_probs": [0, 0, -1, float("-inf"), -1]}, ValueError, r"`log_probs`\[3\] is -inf"),
        ({"log_probs": [0, 0, -1, -1, 2.0]}, ValueError, r"`log_probs`\[4\] is 2.0"),
        ({"reward": float("inf")}, ValueError, "`reward` is inf"),
        ({"reward": "high"}, TypeError, "`reward` must be a number"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be finite and greater than 0"),
        ({"temperature": -1.0}, ValueError, "`temperature`"),
        ({"temperature": [1.0, 1.0]}, ValueError, "`temperature` has 2 entries"),
        ({"group": 1.5}, TypeError, "`group` must be a string"),
        ({"truncated": "yes"}, TypeError, "`truncated` must be True or False"),
        ({"info": {"object": object()}}, TypeError, "`info` must hold JSON-like"),
        ({"info": [1]}, TypeError, "`info` must be a dict"),
    ],
)
def test_errors_name_the_trajectory_and_the_field(changes, error, message):
    with pytest.raises(error, match=message) as caught:
        example(**changes)
    assert str(caught.value).startswith("trajectory (task 'add')")


def test_a_reward_nobody_could_give_is_unscored():
    assert not Trajectory([1, 2], [0, 1], None).is_rewarded
    assert not Trajectory([1, 2], [0, 1], float("nan")).is_rewarded
    assert Trajectory([1, 2], [0, 1], 0).is_rewarded


@pytest.mark.parametrize("form", ["memory", "parquet", "jsonl"])
def test_round_trip_through_a_data_set(form, tmp_path):
    trajectories = [
        example(),
        example(log_probs=[-1.0] * 5, temperature=[1.0, 1.0, 0.5, 0.5, 0.25], info={"other": [1, 2]}),
        Trajectory([1, 2, 3], [0, 1, 1], None, log_probs=[0, -0.1, -0.2]),
    ]
    dataset = to_dataset(trajectories)
    if form == "parquet":
        dataset.to_parquet(tmp_path / "t.parquet")
        dataset = datasets.Dataset.from_parquet(str(tmp_path / "t.parquet"), cache_dir=str(tmp_path))
    elif form == "jsonl":
        dataset.to_json(tmp_path / "t.jsonl")
        dataset = datasets.Dataset.from_json(str(tmp_path / "t.jsonl"), cache_dir=str(tmp_path))
    for before, after in zip(trajectories, from_dataset(dataset), strict=True):
        assert_same(before, after)


def test_reading_names_the_missing_column_and_the_bad_row():
    with pytest.raises(ValueError, match=r"no column \['reward'\]"):
        from_dataset(datasets.Dataset.from_dict({"token_ids": [[1]], "action_mask": [[0]]}))
    rows = {"token_ids": [[1, 2], [3, 4]], "action_mask": [[0, 1], [1]], "reward": [1.0, 1.0]}
    with pytest.raises(ValueError, match="row 1: trajectory: `action_mask` has 1 entries"):
        from_dataset(datasets.Dataset.from_dict(rows))


def test_only_the_required_columns_are_needed():
    rows = {"token_ids": [[1, 2]], "action_mask": [[0, 1]], "reward": [1.0]}
    assert from_dataset(datasets.Dataset.from_dict(rows))[0].log_probs is None


def test_copies_and_pickles_are_equal():
    assert_same(pickle.loads(pickle.dumps(example())), example())
    assert_same(copy.deepcopy(example()), example())


def test_checkpoint_state_is_exact_and_safe_to_load(tmp_path):
    trajectories = [example(), example(reward=None, truncated=False)]
    torch.save(trajectories_to_state(trajectories), tmp_path / "state.pt")
    loaded = trajectories_from_state(torch.load(tmp_path / "state.pt", weights_only=True))
    for before, after in zip(trajectories, loaded, strict=True):
        assert_same(before, after)
    assert trajectories_from_state(trajectories_to_state([])) == []
