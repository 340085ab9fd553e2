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
        ({"log_probs": [None, None, None, -1, -1]}, ValueError, r"`log_probs`\[2\] is None at a scored token"),
        ({"reward": "high"}, TypeError, "`reward` must be a number"),
        ({"reward": np.str_("1.0")}, TypeError, "`reward` must be a number"),
        ({"reward": np.array([1.0, 2.0])}, TypeError, r"`reward` must be a number or None, got array\(\[1., 2.\]\)"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be finite and greater than 0"),
        ({"temperature": -1.0}, ValueError, "`temperature`"),
        ({"temperature": [1.0, 1.0]}, ValueError, "`temperature` has 2 entries"),
        ({"temperature": True}, TypeError, "`temperature` must be a flat sequence of numbers, got bool"),
        ({"group": 1.5}, TypeError, "`group` must be a string"),
        ({"group": torch.tensor(1.5)}, TypeError, "`group` must be a string"),
        ({"group": np.bool_(True)}, TypeError, "`group` must be a string"),
        ({"truncated": "yes"}, TypeError, "`truncated` must be True or False"),
        ({"truncated": 2}, TypeError, "`truncated` must be True or False, got 2"),
        ({"truncated": 1.0}, TypeError, "`truncated` must be True or False, got 1.0"),
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


@pytest.mark.parametrize("one", [1, True, np.int64(1), np.float32(1), np.array(1.0), torch.tensor(1), np.array([1.0])])
def test_a_reward_may_be_anybodys_number(one):
    assert example(reward=one).reward == 1.0


@pytest.mark.parametrize("seven", [7, np.int64(7), np.array(7), torch.tensor(7)])
def test_ids_may_be_anybodys_integers(seven):
    trajectory = example(group=seven, task=seven)
    assert (trajectory.group, trajectory.task) == ("7", "7")


@pytest.mark.parametrize("yes", [True, 1, np.bool_(True), np.int64(1), np.array(True), torch.tensor(True)])
def test_flags_may_be_anybodys(yes):
    assert example(truncated=yes).truncated is True


@pytest.mark.parametrize(
    "number", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), torch.tensor(0.5).bfloat16()]
)
def test_a_temperature_may_be_anybodys_number(number):
    assert example(temperature=number).temperature.tolist() == [0.5] * 5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int32])
def test_ids_and_masks_of_every_integer_type_are_read(dtype):
    ids, mask = torch.tensor([7, 3, 9, 4, 8]).to(dtype), torch.tensor([0, 0, 1, 1, 1]).to(dtype)
    assert_same(example(token_ids=ids, action_mask=mask), example())


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_log_probs_may_be_missing_where_they_are_ignored(missing):
    # As servers answer: nothing comes before the first token, so it has no log-probability.
    first = Trajectory([1, 2, 3], [1, 1, 1], 1.0, log_probs=[missing, -0.5, -0.25])
    assert first.log_probs.tolist() == [0.0, -0.5, -0.25]
    prompt = Trajectory([1, 2, 3], [0, 0, 1], 1.0, log_probs=np.array([None, missing, -0.25], dtype=object))
    assert prompt.log_probs.tolist() == [0.0, 0.0, -0.25]


@pytest.mark.parametrize("form", ["memory", "numpy", "torch", "parquet", "jsonl"])
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
    elif form != "memory":
        dataset = dataset.with_format(form)
    for before, after in zip(trajectories, from_dataset(dataset), strict=True):
        assert_same(before, after)


def test_parquet_is_exact_and_jsonl_keeps_ten_decimals(tmp_path):
    before = Trajectory([1, 2, 3], [0, 1, 1], 1 / 3, log_probs=[0, -1.2345678e-6, -1 / 3], temperature=0.7)
    dataset = to_dataset([before])
    dataset.to_parquet(tmp_path / "t.parquet")
    (exact,) = from_dataset(datasets.Dataset.from_parquet(str(tmp_path / "t.parquet"), cache_dir=str(tmp_path)))
    assert_same(before, exact)
    for name, decimals in (("ten", 10), ("fifteen", 15)):
        dataset.to_json(tmp_path / name, **({} if decimals == 10 else {"double_precision": decimals}))
        (near,) = from_dataset(datasets.Dataset.from_json(str(tmp_path / name), cache_dir=str(tmp_path)))
        assert near.reward != before.reward
        assert near.reward == pytest.approx(before.reward, abs=0.5 * 10**-decimals, rel=0)
        assert near.log_probs[1].item() == pytest.approx(before.log_probs[1].item(), abs=0.6 * 10**-decimals, rel=0)
        assert torch.equal(near.log_probs[2], before.log_probs[2])
        assert torch.equal(near.temperature, before.temperature)


@pytest.mark.parametrize(
    ("column", "error", "message"),
    [
        ({"truncated": ["False"]}, TypeError, "row 0: trajectory: `truncated` must be True or False, got 'False'"),
        ({"truncated": [2]}, TypeError, "row 0: trajectory: `truncated` must be True or False, got 2"),
        ({"info": ["by hand"]}, ValueError, r"row 0: `info` is the text 'by hand', which is no JSON \(Expecting value"),
        ({"info": ["[1]"]}, TypeError, "row 0: trajectory: `info` must be a dict, got list"),
    ],
)
def test_columns_that_are_no_fields_are_refused_by_row(column, error, message):
    rows = {"token_ids": [[1, 2]], "action_mask": [[0, 1]], "reward": [1.0], **column}
    with pytest.raises(error, match=message):
        from_dataset(datasets.Dataset.from_dict(rows))


@pytest.mark.parametrize("truncated", [True, False, 1, 0, None])
def test_a_column_of_flags_is_read(truncated):
    rows = {"token_ids": [[1, 2]], "action_mask": [[0, 1]], "reward": [1.0], "truncated": [truncated]}
    assert from_dataset(datasets.Dataset.from_dict(rows))[0].truncated is bool(truncated)


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
