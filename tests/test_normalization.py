from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.normalization import loss_weights


def step_loss(losses: list[list[float]], **options) -> float:
    weights = loss_weights([len(tokens) for tokens in losses], **options)
    return sum(float(weight) * sum(tokens) for weight, tokens in zip(weights, losses, strict=True))


def test_modes_mean_what_they_say():
    losses = [[1.0, 1.0], [4.0]]
    assert step_loss(losses) == pytest.approx(2.0)  # 6 / 3 tokens
    assert step_loss(losses, mode="sequence_mean") == pytest.approx(2.5)  # (1 + 4) / 2
    assert step_loss(losses, mode="sequence_constant", constant=4) == pytest.approx(0.75)  # (2/4 + 4/4) / 2
    assert step_loss(losses, mode="constant", constant=12) == pytest.approx(0.5)  # 6 / 12
    # Groups {a: 1 1 4} and {b: 10}: (2 + 10) / 2.
    assert step_loss([*losses, [10.0]], groups=["a", "a", "b"], mode="group_mean") == pytest.approx(6.0)


def test_tokens_weigh_the_same_wherever_they_stand():
    # 100 tokens at 0.5 and 900 at 0.3: 0.32; 9 tokens at 1 and 3 trajectories of one token at 5: 24 / 12.
    assert step_loss([[0.5] * 100, [0.3] * 900]) == pytest.approx(0.32)
    assert step_loss([[1.0] * 9, [5.0], [5.0], [5.0]]) == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "group_mean", "sequence_constant"])
def test_trajectories_without_scored_tokens_change_nothing(mode):
    options = {"constant": 3.0} if mode == "sequence_constant" else {}
    with_empty = loss_weights([2, 0, 1], ["a", "b", "c"], mode=mode, **options)
    without = loss_weights([2, 1], ["a", "c"], mode=mode, **options)
    assert with_empty[[0, 2]].tolist() == without.tolist()
    assert float(with_empty[1]) == 0.0


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "group_mean", "constant", "sequence_constant"])
def test_a_step_without_scored_tokens_has_weights_of_zero(mode):
    options = {"constant": 5.0} if "constant" in mode else {}
    assert loss_weights([0, 0], ["a", "b"], mode=mode, **options).tolist() == [0.0, 0.0]


def test_live_denominator_leaves_dead_tokens_out():
    assert loss_weights([2, 6], live=[True, False], denominator="live").tolist() == [0.5, 0.0]
    assert loss_weights([2, 6], live=[True, False]).tolist() == [0.125, 0.125]
    assert loss_weights([2, 6], live=[False, False], denominator="live").tolist() == [0.0, 0.0]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_means_are_means(counts):
    tokens = torch.tensor(counts, dtype=torch.float64)
    total = 1.0 if sum(counts) else 0.0
    for mode in ("token_mean", "sequence_mean"):
        assert float((loss_weights(counts, mode=mode) * tokens).sum()) == pytest.approx(total)
    groups = [index % 3 for index in range(len(counts))]
    assert float((loss_weights(counts, groups, mode="group_mean") * tokens).sum()) == pytest.approx(total)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"counts": [1], "mode": "mean"}, "`mode` must be one of"),
        ({"counts": [-1]}, "at least 0"),
        ({"counts": [1], "mode": "constant"}, "needs `constant`, a finite number greater than 0, got None"),
        ({"counts": [1], "mode": "constant", "constant": float("inf")}, "greater than 0, got inf"),
        ({"counts": [1], "mode": "sequence_constant", "constant": float("nan")}, "greater than 0, got nan"),
        ({"counts": [1], "mode": "constant", "constant": "4"}, "greater than 0, got '4'"),
        ({"counts": [1.0, float("inf")]}, "`counts` must be a flat list of finite numbers"),
        ({"counts": [1], "mode": "constant", "constant": 0}, "greater than 0, got 0"),
        ({"counts": [1], "constant": 4}, "takes none"),
        ({"counts": [1, 2], "mode": "group_mean"}, "one entry of `groups` for each of 2 counts, got none"),
        ({"counts": [1, 2], "mode": "group_mean", "groups": ["a"]}, "got 1"),
        ({"counts": [1], "denominator": "live"}, "needs `live`"),
        ({"counts": [1], "denominator": "some"}, "`denominator` must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        loss_weights(**arguments)
