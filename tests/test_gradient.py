"""A step's gradient, as the Trainer accumulates it, against one trajectory at a time in float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from lit_rl import PackedDataModule, PolicyModule, group_advantages
from lit_rl.testing import oracle_gradient, tiny_policy_model
from tests.helpers import KeepGradients, quiet_trainer, random_trajectories

MODES = ["token_mean", "sequence_mean", "group_mean", "constant", "sequence_constant"]


def weights_by_hand(mode, trajectories):
    """One weight per trajectory, written out a second time, so that the library is not compared with itself."""
    counts = [t.num_scored for t in trajectories]
    total, some = sum(counts), sum(count > 0 for count in counts)
    by_group: dict[str, int] = {}
    for t, count in zip(trajectories, counts, strict=True):
        by_group[t.group] = by_group.get(t.group, 0) + count
    groups = sum(count > 0 for count in by_group.values())
    return {
        "token_mean": [1 / total for _ in counts],
        "sequence_mean": [1 / (some * c) if c else 0.0 for c in counts],
        "group_mean": [1 / (groups * by_group[t.group]) if by_group[t.group] else 0.0 for t in trajectories],
        "constant": [1 / 50 for _ in counts],
        "sequence_constant": [1 / (some * 50) for _ in counts],
    }[mode]


def expected_gradient(model, trajectories, mode):
    advantages = group_advantages([t.reward for t in trajectories], [t.group for t in trajectories]).advantages
    weights = weights_by_hand(mode, trajectories)
    return oracle_gradient(
        model, trajectories, lambda log_probs, i: -(weights[i] * float(advantages[i]) * log_probs).sum()
    )


def accumulated_gradients(model, trajectories, *, max_tokens, trainer=None, data=None, **module):
    policy = PolicyModule(copy.deepcopy(model), objective="reinforce", learning_rate=0.0, **module)
    keep = KeepGradients()
    arguments = {"precision": "64-true", "callbacks": [keep]} | (trainer or {})
    running = quiet_trainer(**arguments)
    running.fit(policy, PackedDataModule(trajectories, max_tokens=max_tokens, **(data or {})))
    return keep.steps, policy, running


def assert_equal(actual, expected, tolerance=1e-10):
    assert expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("max_tokens", [12, 20, 1000])
@pytest.mark.parametrize("mode", MODES)
def test_any_mode_and_any_number_of_microbatches(mode, max_tokens):
    model, trajectories = tiny_policy_model(), random_trajectories(14, seed=3)
    constant = 50.0 if "constant" in mode else None
    steps, _, trainer = accumulated_gradients(
        model, trajectories, max_tokens=max_tokens, normalization=mode, constant=constant
    )
    assert len(steps) == 1
    assert_equal(steps[0], expected_gradient(model, trajectories, mode))
    assert (trainer.datamodule.iteration.plan.microbatches_per_step == 1) == (max_tokens == 1000)
    assert trainer.accumulate_grad_batches == 1  # given back after the fit
    assert math.isclose(float(trainer.callback_metrics["train/scored_tokens"]), sum(t.num_scored for t in trajectories))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("loss_on", ["live", "scored"])
def test_layouts_and_leaving_out_what_has_no_gradient(layout, loss_on):
    model, trajectories = tiny_policy_model(), random_trajectories(16, seed=1)
    dead = [
        t if t.group != "g1" else random_trajectories(16, seed=1, reward=1.0)[i] for i, t in enumerate(trajectories)
    ]
    steps, policy, _ = accumulated_gradients(model, dead, max_tokens=24, layout=layout, loss_on=loss_on)
    assert policy.policy.layout == layout
    assert policy.trainer.datamodule.iteration.dropped["zero_advantage"] == (4 if loss_on == "live" else 0)
    assert_equal(steps[0], expected_gradient(model, dead, "token_mean"))


def test_a_users_own_number_of_microbatches_is_kept():
    model, trajectories = tiny_policy_model(), random_trajectories(14, seed=3)
    steps, _, trainer = accumulated_gradients(
        model, trajectories, max_tokens=40, trainer={"accumulate_grad_batches": 5}
    )
    assert trainer.accumulate_grad_batches == 5
    assert trainer.global_step == 1
    assert_equal(steps[0], expected_gradient(model, trajectories, "token_mean"))
    with pytest.raises(ValueError, match="microbatches"):
        accumulated_gradients(model, trajectories, max_tokens=12, trainer={"accumulate_grad_batches": 2})


def test_several_steps_hold_every_trajectory_once():
    model, trajectories = tiny_policy_model(), random_trajectories(16, seed=5)
    steps, policy, _ = accumulated_gradients(model, trajectories, max_tokens=24, data={"steps_per_iteration": 3})
    plan = policy.trainer.datamodule.iteration.plan
    assert len(steps) == 3
    seen = [i for step in plan.microbatches for rank in step for microbatch in rank for i in microbatch]
    for gradient, step in zip(steps, plan.microbatches, strict=True):
        members = sorted({trajectories[i].group for rank in step for microbatch in rank for i in microbatch})
        chosen = [t for t in trajectories if t.group in members]
        assert_equal(gradient, expected_gradient(model, chosen, "token_mean"))
    assert len(seen) == len(set(seen))


def test_clipping_works_on_the_whole_gradient():
    model, trajectories = tiny_policy_model(), random_trajectories(14, seed=3)
    expected = expected_gradient(model, trajectories, "token_mean")
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    policy = PolicyModule(copy.deepcopy(model), objective="reinforce", learning_rate=1.0)
    policy.configure_optimizers = lambda: torch.optim.SGD(policy.parameters(), lr=1.0)
    limit = 0.5 * float(norm)
    trainer = quiet_trainer(precision="64-true", gradient_clip_val=limit)
    trainer.fit(policy, PackedDataModule(trajectories, max_tokens=16))
    assert float(trainer.callback_metrics["train/grad_norm"]) == pytest.approx(float(norm), rel=1e-6)
    for name, parameter in policy.policy.model.named_parameters():
        before = dict(model.named_parameters())[name].double()
        torch.testing.assert_close(parameter, before - 0.5 * expected[name], atol=1e-7, rtol=1e-5)


def test_per_microbatch_means_would_be_seen():
    """The test above can fail: the commonest mistake moves this gradient by far more than its tolerance."""
    model, trajectories = tiny_policy_model(), random_trajectories(14, seed=3)

    class MeanPerMicrobatch(PolicyModule):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch.replace(weights=batch.weights * 0 + 1 / max(batch.num_scored, 1)), 0)
            return outputs["loss"] / self.trainer.accumulate_grad_batches

    keep = KeepGradients()
    module = MeanPerMicrobatch(copy.deepcopy(model), objective="reinforce", learning_rate=0.0)
    quiet_trainer(precision="64-true", callbacks=[keep]).fit(module, PackedDataModule(trajectories, max_tokens=12))
    expected = expected_gradient(model, trajectories, "token_mean")
    with pytest.raises(AssertionError):
        assert_equal(keep.steps[0], expected, tolerance=1e-3)
