"""The normalization check: right where the gradient is right, and the mistake named where it is not."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lit_rl import PackedDataModule, PolicyModule, check_normalization
from lit_rl.callbacks import GradientNormalizationCheck, PackingCheck
from lit_rl.checks.normalization import combine, relation
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories


class Regression(LightningModule):
    """A module that is not ours; `reduce` turns per-row losses into the loss of a batch."""

    def __init__(self, reduce):
        super().__init__()
        self.layer, self.reduce = nn.Linear(4, 1), reduce

    def training_step(self, batch, batch_idx):
        return self.reduce(self.layer(batch).square().sum(1))


ROWS = [torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) for rows in (2, 9, 5)]


def test_a_mean_per_microbatch_is_caught_named_and_measured():
    verdict = check_normalization(Regression(torch.mean), ROWS, torch.cat, tokens=len)
    assert not verdict.ok
    assert "each microbatch takes the mean over its own tokens" in verdict.message
    # 16 rows in 3 microbatches: 16 / (3 * 2) and 16 / (3 * 9).
    assert verdict.figures["distortion_max"] == pytest.approx(16 / 6)
    assert verdict.figures["distortion_min"] == pytest.approx(16 / 27)


def test_equal_microbatches_hide_it_and_pass():
    assert check_normalization(Regression(torch.mean), [ROWS[0], ROWS[0] + 1], torch.cat, tokens=len).ok


def test_a_sum_is_divided_once_too_often():
    verdict = check_normalization(Regression(torch.sum), ROWS, torch.cat, tokens=len)
    assert not verdict.ok
    assert "0.3333 times the gradient of the whole step" in verdict.message


def test_a_global_divisor_that_undoes_the_division_passes():
    class Right(Regression):
        def training_step(self, batch, batch_idx):
            # A third of the step's 16 rows each, undone when all 16 come at once.
            return self.layer(batch).square().sum() / 16 * (3 if len(batch) < 16 else 1)

    assert check_normalization(Right(None), ROWS, torch.cat, tokens=len).ok


def test_weights_and_gradients_are_left_alone():
    module = Regression(torch.mean)
    module.layer.weight.grad = torch.ones(1, 4)
    before = module.layer.weight.detach().clone()
    check_normalization(module, ROWS, torch.cat)
    assert torch.equal(module.layer.weight, before)
    assert module.layer.weight.grad.tolist() == [[1.0] * 4]
    assert module.layer.bias.grad is None
    with pytest.raises(ValueError, match="holds 1 microbatches"):
        check_normalization(module, ROWS[:1], torch.cat)


def test_relation_and_combine_by_hand():
    one, other = {"a": torch.tensor([3.0, 0.0])}, {"a": torch.tensor([0.0, 4.0])}
    assert relation(one, other) == pytest.approx((5 / 4, 0.0, 0.0))
    assert relation({}, {}) == (0.0, 1.0, 1.0)
    assert combine([one, other], [2.0, 0.5])["a"].tolist() == [6.0, 2.0]


def fit(module, check, *, max_tokens=16, trajectories=None, **data):
    source = PackedDataModule(
        trajectories or random_trajectories(16, seed=2, lengths=(4, 14)), max_tokens=max_tokens, **data
    )
    trainer = quiet_trainer(callbacks=[check], max_epochs=2)
    trainer.fit(module, source)
    return check.verdict


@pytest.mark.parametrize("objective", ["clipped_ratio", "reinforce", "cispo", "supervised"])
@pytest.mark.parametrize("steps", [1, 2])
def test_the_library_passes_its_own_check(objective, steps):
    check = GradientNormalizationCheck(every_n_steps=1)
    module = PolicyModule(tiny_policy_model(), objective=objective, learning_rate=1e-2, entropy_bonus=0.01)
    verdict = fit(module, check, steps_per_iteration=steps)
    assert verdict.ok
    assert verdict.figures["relative_error"] < 1e-5


def test_an_objective_may_rely_on_old_log_probs_in_the_check_too():
    class Ratio(PolicyModule):
        def objective(self, log_probs, batch):
            return -(log_probs - batch.old_log_probs).exp() * batch.advantages

    assert fit(Ratio(tiny_policy_model(), learning_rate=1e-2), GradientNormalizationCheck(every_n_steps=1)).ok


class MeanPerMicrobatch(PolicyModule):
    def training_step(self, batch, batch_idx):
        return (
            super().training_step(
                batch.replace(weights=torch.full_like(batch.weights, 1 / max(batch.num_scored, 1))), 0
            )["loss"]
            / self.trainer.accumulate_grad_batches
        )


class DividedTwice(PolicyModule):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] / self.trainer.accumulate_grad_batches


class DependsOnNeighbours(PolicyModule):
    def objective(self, log_probs, batch):
        return -(batch.advantages - batch.advantages.mean()) * log_probs


def test_planted_mistakes_stop_the_run_and_are_named():
    with pytest.raises(MisconfigurationException, match=r"each microbatch takes the mean.*a token weighs from"):
        fit(MeanPerMicrobatch(tiny_policy_model(), objective="reinforce"), GradientNormalizationCheck())
    with pytest.raises(MisconfigurationException, match=r"0\.\d+ times the gradient of the whole step"):
        fit(DividedTwice(tiny_policy_model(), objective="reinforce"), GradientNormalizationCheck())
    with pytest.raises(MisconfigurationException, match="is not that of the whole step"):
        fit(DependsOnNeighbours(tiny_policy_model()), GradientNormalizationCheck(), steps_per_iteration=1)


def test_a_warning_instead_of_a_stop():
    with pytest.warns(UserWarning, match="times the gradient of the whole step"):
        verdict = fit(
            DividedTwice(tiny_policy_model(), objective="reinforce"), GradientNormalizationCheck(action="warn")
        )
    assert not verdict.ok


def test_the_check_changes_nothing_in_the_run():
    ends = []
    for callbacks in ([], [GradientNormalizationCheck(every_n_steps=1), PackingCheck(every_n_steps=1)]):
        module = PolicyModule(tiny_policy_model(), learning_rate=1e-2)
        trainer = quiet_trainer(callbacks=callbacks, max_epochs=3)
        trainer.fit(module, PackedDataModule(random_trajectories(16), max_tokens=24, steps_per_iteration=2))
        ends.append(torch.cat([p.flatten() for p in module.policy.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("arguments", [{"every_n_steps": -1}, {"tolerance": 0.0}, {"action": "stop"}])
def test_bad_arguments(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        GradientNormalizationCheck(**arguments)
