"""The normalization check: right where the gradient is right, and the mistake named where it is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lit_rl import PackedDataModule, PolicyModule, Trajectory, check_normalization
from lit_rl.callbacks import GradientNormalizationCheck, PackingCheck, grad_normalization
from lit_rl.checks.gradients import combine, relation
from lit_rl.checks.normalization import Allowed, compare
from lit_rl.data.iteration import IterationOptions, build_iteration
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories


class Regression(LightningModule):
    """A module that is not ours; `reduce` turns per-row losses into the loss of a batch."""

    def __init__(self, reduce):
        super().__init__()
        torch.manual_seed(0)
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


@pytest.mark.parametrize("counts", [(40, 41), (40, 44), (40, 60)])
def test_a_mean_per_microbatch_is_named_among_nearly_equal_microbatches(counts):
    rows = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in counts]
    verdict = check_normalization(Regression(torch.mean), rows, torch.cat, tokens=len)
    assert "is not that of the whole step" in verdict.message
    assert "each microbatch takes the mean over its own tokens; a token weighs from" in verdict.message
    assert "allowed: 0.001" in verdict.message


def test_what_no_mistake_explains_is_not_given_a_name():
    def depends_on_neighbours(losses):
        return (losses - 0.5 * losses.mean()).square().mean()

    for sizes in ((40, 40), (10, 30)):
        rows = [torch.randn(n, 4, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(sizes)]
        rows[1] = rows[1] * torch.tensor([3.0, 1.0, 1.0, 1.0])
        verdict = check_normalization(Regression(depends_on_neighbours), rows, torch.cat, tokens=len)
        assert not verdict.ok
        assert "times" not in verdict.message
        assert "each microbatch" not in verdict.message


def test_numbers_that_are_none_are_said_first():
    right, bad = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, float("nan")])}
    assert compare(bad, right).message == "not finite: the accumulated gradient"
    assert "computed anew" in compare(right, {"w": torch.tensor([float("inf"), 1.0])}).message
    broken = Regression(lambda losses: losses.mean() * float("inf"))
    assert check_normalization(broken, ROWS, torch.cat).message.startswith("not finite: the accumulated gradient")


def test_summands_that_cancel_are_measured_by_their_size():
    class Signed(Regression):
        def training_step(self, batch, batch_idx):
            rows, signs = batch
            return (self.layer(rows).sin().sum(1) * signs).mean()

    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    parts = [(rows, torch.ones(64)), (rows.flip(0), -torch.ones(64))]

    def merge(batches):
        return tuple(torch.cat(tensors) for tensors in zip(*batches, strict=True))

    verdict = check_normalization(Signed(None), parts, merge)
    assert verdict.ok, verdict.message
    rounding = Allowed(1e-3, rounding=1e-6)
    assert compare({"w": torch.tensor([1e-7])}, {"w": torch.tensor([0.0])}, allowed=rounding).ok
    assert not compare({"w": torch.tensor([1e-5])}, {"w": torch.tensor([1e-6])}, allowed=rounding).ok


def test_randomness_is_told_from_a_mistake():
    class Dropped(Regression):
        def training_step(self, batch, batch_idx):
            return nn.functional.dropout(self.layer(batch), 0.5, self.training).square().mean()

    module = Dropped(None).train()
    state = torch.get_rng_state()
    equal = [ROWS[1], ROWS[1] + 1]
    verdict = check_normalization(module, equal, torch.cat, tokens=len)
    assert not verdict.ok
    assert "random in training mode: two passes over the first microbatch differ" in verdict.message
    assert torch.equal(torch.get_rng_state(), state)
    assert check_normalization(module.eval(), equal, torch.cat, tokens=len).ok


def test_a_step_without_tokens_is_judged_too():
    verdict = check_normalization(Regression(torch.mean), ROWS, torch.cat, tokens=lambda _: 0)
    assert not verdict.ok
    assert "distortion_max" not in verdict.figures


def test_buffers_are_left_alone():
    class Normed(Regression):
        def __init__(self):
            super().__init__(torch.mean)
            self.norm, self.calls = nn.BatchNorm1d(4), None
            self.register_buffer("scale", torch.ones(()))

        def training_step(self, batch, batch_idx):
            self.scale = self.scale * 2  # replaced, not changed in place
            return super().training_step(self.norm(batch) * self.scale, batch_idx)

    module = Normed()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    verdict = check_normalization(module, ROWS, torch.cat, tokens=len)
    assert "random" not in verdict.message
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def test_equal_microbatches_hide_it_and_pass():
    assert check_normalization(Regression(torch.mean), [ROWS[0], ROWS[0] + 1], torch.cat, tokens=len).ok


def test_a_sum_is_divided_once_too_often():
    verdict = check_normalization(Regression(torch.sum), ROWS, torch.cat, tokens=len)
    assert not verdict.ok
    assert "0.3333 times the gradient of the whole step" in verdict.message
    assert verdict.message.endswith("the loss is a sum, which the Trainer then divides by the number of microbatches")


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


def fit(module, check, *, max_tokens=16, trajectories=None, trainer=None, **data):
    source = PackedDataModule(
        trajectories or random_trajectories(16, seed=2, lengths=(4, 14)), max_tokens=max_tokens, **data
    )
    trainer = quiet_trainer(**({"callbacks": [check], "max_epochs": 2} | (trainer or {})))
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


def test_a_mean_per_microbatch_is_named_in_the_usual_plan():
    lengths = [10, 11, 10, 11, 10, 10, 11, 10, 12, 10, 11, 10, 10, 11, 10, 10]
    attempts = [
        Trajectory(
            [3 + (5 * i + j * j) % 28 for j in range(n)], [False] + [True] * (n - 1), i % 3 / 3, group=str(i // 4)
        )
        for i, n in enumerate(lengths)
    ]
    with pytest.raises(MisconfigurationException, match=r"allowed: 0\.001.*each microbatch takes the mean"):
        fit(
            MeanPerMicrobatch(tiny_policy_model(), objective="reinforce"),
            GradientNormalizationCheck(),
            trajectories=attempts,
            max_tokens=48,
        )


def test_with_one_microbatch_per_rank_the_ranks_are_named(monkeypatch):
    attempts = random_trajectories(8, seed=2, lengths=(4, 14))
    iteration = build_iteration(attempts, 0, IterationOptions(max_tokens=200, world_size=2))
    monkeypatch.setattr(grad_normalization, "_iteration", lambda trainer: iteration)
    step = iteration.plan.microbatches[0]
    assert [len(rank) for rank in step] == [1, 1]
    counts = [sum(iteration.scored_counts[i] for i in rank[0]) for rank in step]
    trainer = SimpleNamespace(
        precision_plugin=Precision(), datamodule=SimpleNamespace(old_log_probs_by_trajectory=None)
    )
    module, check = PolicyModule(tiny_policy_model(), objective="reinforce"), GradientNormalizationCheck()
    reference, _ = check._gradient(trainer, module, lambda rank, k: 1.0)
    wrong, _ = check._gradient(trainer, module, lambda rank, k: sum(counts) / (2 * counts[rank]))
    verdict = check._explain(trainer, module, wrong, reference, Allowed(1e-3))
    assert "each rank takes the mean over its own tokens; a token weighs from" in verdict.message


class NotANumber(PolicyModule):
    def objective(self, log_probs, batch):
        return -batch.advantages * log_probs * torch.where(torch.arange(len(log_probs)) == 0, torch.nan, 1.0)


def test_the_modules_own_error_is_not_hidden():
    with pytest.raises(ValueError, match="the loss of a step is nan"):
        fit(NotANumber(tiny_policy_model()), GradientNormalizationCheck())

    class Unchecked(NotANumber):
        def on_before_optimizer_step(self, optimizer):
            pass

    with pytest.raises(MisconfigurationException, match="not finite: the accumulated gradient and the gradient"):
        fit(Unchecked(tiny_policy_model()), GradientNormalizationCheck())


def test_a_step_that_is_skipped_for_the_scale_of_its_loss_is_not_judged():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    check = GradientNormalizationCheck()
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    fit(PolicyModule(tiny_policy_model()), check, trainer={"plugins": [precision], "max_epochs": 1})
    assert check.verdict is None


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_gradient_that_cancels_passes(precision):
    attempts = [Trajectory([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 1, 1], i % 2, group=str(i // 4)) for i in range(8)]
    check = GradientNormalizationCheck()
    verdict = fit(
        PolicyModule(tiny_policy_model(), learning_rate=1e-3),
        check,
        trajectories=attempts,
        max_tokens=18,
        trainer={"precision": precision},
    )
    assert verdict.ok
    with pytest.raises(MisconfigurationException, match="is not that of the whole step"):
        fit(DependsOnNeighbours(tiny_policy_model()), GradientNormalizationCheck(), steps_per_iteration=1)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("bf16-mixed", torch.float32), ("bf16-true", torch.float32), ("32-true", torch.bfloat16)],
)
def test_the_tolerance_follows_the_precision(precision, dtype):
    def judge(check):
        return fit(
            PolicyModule(tiny_policy_model(dtype=dtype)), check, trainer={"precision": precision, "max_epochs": 1}
        )

    verdict = judge(GradientNormalizationCheck())
    assert verdict.ok
    assert 1e-4 < verdict.figures["relative_error"] < 2e-2
    with pytest.raises(MisconfigurationException, match=r"allowed: 1e-09.*a few 1e-3 are rounding; `tolerance` sets"):
        fit(
            DividedTwice(tiny_policy_model(dtype=dtype)),
            GradientNormalizationCheck(tolerance=1e-9),
            trainer={"precision": precision, "max_epochs": 1},
        )


def test_a_module_that_does_not_repeat_itself_is_called_random():
    class Random(PolicyModule):
        def objective(self, log_probs, batch):
            return -batch.advantages * log_probs * torch.rand(())

    with pytest.raises(MisconfigurationException, match="random in training mode: two passes over the step differ"):
        fit(Random(tiny_policy_model()), GradientNormalizationCheck())


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
