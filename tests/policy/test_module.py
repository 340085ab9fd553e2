"""`PolicyModule` under the flags of a Trainer, on every form of model, with a user's own objective."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lit_rl import PackedDataModule, PolicyModule, Trajectory, collate
from lit_rl.testing import tiny_config, tiny_policy_model
from tests.helpers import KeepGradients, quiet_trainer, random_trajectories


def fit(module=None, data=None, *, max_tokens=24, **trainer):
    module = module or PolicyModule(tiny_policy_model(), learning_rate=1e-2)
    data = data or PackedDataModule(random_trajectories(16, seed=1), max_tokens=max_tokens)
    running = quiet_trainer(**trainer)
    running.fit(module, data)
    return module, running


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.policy.model.parameters()])


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"max_steps": 2, "max_epochs": -1},
        {"accumulate_grad_batches": 6},
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"limit_train_batches": 2},
        {"limit_train_batches": 0.5},
        {"profiler": "simple"},
        {"detect_anomaly": True},
        {"max_epochs": 3, "log_every_n_steps": 1},
        {"strategy": DDPStrategy(process_group_backend="gloo")},
    ],
    ids=lambda flags: "-".join(flags) or "default",
)
def test_trainer_flags_act_as_usual(flags, tmp_path):
    model = tiny_policy_model()
    start = weights(PolicyModule(copy.deepcopy(model)))
    module, trainer = fit(PolicyModule(model, learning_rate=1e-2), default_root_dir=tmp_path, **flags)
    assert trainer.global_step == {"max_steps": 2, "max_epochs": 3}.get(next(iter(flags), ""), 1)
    assert torch.isfinite(weights(module)).all()
    assert not torch.equal(weights(module).float(), start)


def test_log_probs_are_float32_or_better_in_any_precision():
    seen = {}

    class Look(PolicyModule):
        def objective(self, log_probs, batch):
            seen["log_probs"], seen["advantages"] = log_probs.dtype, batch.advantages.dtype
            return super().objective(log_probs, batch)

    for precision, wanted in (("bf16-true", torch.float32), ("bf16-mixed", torch.float32), ("64-true", torch.float64)):
        fit(Look(tiny_policy_model(), learning_rate=1e-2), precision=precision)
        assert seen == {"log_probs": wanted, "advantages": wanted}


def test_a_path_a_config_a_model_and_an_own_network_all_train(tmp_path):
    tiny_policy_model().save_pretrained(tmp_path)

    class Own(nn.Module):
        """Embeddings, one recurrent layer, an output layer: nothing of transformers."""

        def __init__(self):
            super().__init__()
            self.embedding, self.recurrent, self.lm_head = (
                nn.Embedding(32, 8),
                nn.GRU(8, 8, batch_first=True),
                nn.Linear(8, 32),
            )

        def forward(self, input_ids, position_ids):
            return self.recurrent(self.embedding(input_ids))[0]

    for model, layout in (
        (str(tmp_path), "packed"),
        (tiny_config(), "packed"),
        (tiny_policy_model("mamba"), "padded"),
        (Own(), "padded"),
    ):
        module, trainer = fit(PolicyModule(model, learning_rate=1e-2))
        assert module.policy.layout == layout
        assert trainer.global_step == 1


def test_state_dict_keys_are_those_of_the_model():
    module = PolicyModule(tiny_policy_model())
    assert {key.removeprefix("policy.model.") for key in module.state_dict()} == set(tiny_policy_model().state_dict())


def test_own_objective_gets_aligned_fields_and_its_gradient():
    class Plain(PolicyModule):
        def objective(self, log_probs, batch):
            assert log_probs.shape == batch.advantages.shape == batch.sampler_log_probs.shape == batch.targets.shape
            return -batch.advantages * log_probs

    model, keeps = tiny_policy_model(), []
    for kind in (Plain, PolicyModule):
        keeps.append(KeepGradients())
        fit(kind(copy.deepcopy(model), objective="reinforce"), precision="64-true", callbacks=[keeps[-1]])
    for name, gradient in keeps[1].steps[0].items():
        torch.testing.assert_close(keeps[0].steps[0][name], gradient, atol=1e-12, rtol=1e-12)


def test_an_objective_that_averages_is_refused():
    class Averages(PolicyModule):
        def objective(self, log_probs, batch):
            return -(batch.advantages * log_probs).mean()

    with pytest.raises(ValueError, match="expected one loss per scored token"):
        fit(Averages(tiny_policy_model()))


def test_a_batch_without_weights_is_an_error_not_a_fallback():
    module, _ = fit()
    batch = collate(random_trajectories(2), advantages=[1.0, -1.0])
    with pytest.raises(ValueError, match="no `weights`"):
        module.training_step(batch, 0)
    with pytest.raises(MisconfigurationException, match="expected a PackedBatch"):
        module.training_step({"input_ids": batch.input_ids}, 0)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_equal_rewards_leave_weights_and_optimizer_untouched(reward):
    model = tiny_policy_model()
    start = weights(PolicyModule(copy.deepcopy(model)))
    data = PackedDataModule(random_trajectories(8, reward=reward), max_tokens=24)
    with pytest.warns(UserWarning, match="nothing to train on"):
        module, trainer = fit(PolicyModule(model, learning_rate=0.1, weight_decay=0.5), data, max_epochs=2)
    assert torch.equal(weights(module), start)
    assert len(trainer.optimizers[0].state) == 0
    assert module.steps_without_signal == 2
    assert trainer.global_step == 2
    assert trainer.callback_metrics["train/loss"] == 0.0


def test_the_same_logged_loss_for_any_number_of_microbatches():
    losses = []
    for max_tokens in (12, 24, 1000):
        module = PolicyModule(tiny_policy_model(), objective="supervised", learning_rate=0.0)
        _, trainer = fit(module, max_tokens=max_tokens, precision="64-true")
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
    assert losses[0] > 0


def test_masked_positions_are_inert_whatever_they_hold():
    def with_garbage(value):
        made = random_trajectories(8, seed=2)
        return [
            Trajectory(
                t.token_ids,
                t.action_mask,
                t.reward,
                group=t.group,
                log_probs=torch.where(t.scored, t.log_probs, torch.full_like(t.log_probs, value)),
            )
            for t in made
        ]

    results = []
    for value in (0.0, math.nan, math.inf, -math.inf, -1e10):
        module = PolicyModule(tiny_policy_model(), learning_rate=1e-2)
        module, _ = fit(module, PackedDataModule(with_garbage(value), max_tokens=24, old_log_probs="sampler"))
        results.append(weights(module))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_entropy_bonus_raises_entropy():
    entropies = []
    for bonus in (1e-9, 10.0):
        module = PolicyModule(tiny_policy_model(), learning_rate=1e-2, entropy_bonus=bonus)
        _, trainer = fit(module, max_epochs=6)
        entropies.append(float(trainer.callback_metrics["train/entropy"]))
    assert 0.0 < entropies[0] < entropies[1] <= math.log(32) + 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.0}, "`temperature` must be greater than 0"),
        ({"learning_rate": -1.0}, "`learning_rate` must be at least 0"),
        ({"clip_low": -0.1}, "`clip_low`"),
        ({"objective": "ppo"}, "`objective` must be one of"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"layout": "flat"}, "`layout`"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        PolicyModule(tiny_policy_model(), **arguments)


def test_checkpoints_load_and_export(tmp_path):
    module, trainer = fit()
    trainer.save_checkpoint(tmp_path / "policy.ckpt")
    again = PolicyModule.load_from_checkpoint(tmp_path / "policy.ckpt", model=tiny_policy_model(seed=5))
    assert torch.equal(weights(again), weights(module))
    assert again.learning_rate == 1e-2
    module.policy.model.save_pretrained(tmp_path / "exported")
    exported = PolicyModule(str(tmp_path / "exported"))
    exported.configure_model()
    assert torch.equal(weights(exported), weights(module))


class TimesAdvantage(PolicyModule):
    """A user's own objective: every trajectory is computed, whatever its advantage."""

    def objective(self, log_probs, batch):
        return -batch.advantages * log_probs


def test_a_gradient_of_zero_moves_nothing_whatever_the_objective():
    model = tiny_policy_model()
    start = weights(PolicyModule(copy.deepcopy(model)))
    module = TimesAdvantage(copy.deepcopy(model), learning_rate=0.1, weight_decay=0.5)
    assert module.loss_on == "scored"
    with pytest.warns(UserWarning, match="is exactly 0"):
        _, trainer = fit(module, PackedDataModule(random_trajectories(8, reward=1.0), max_tokens=24))
    assert torch.equal(weights(module), start)
    assert module.steps_without_signal == 1
    assert len(trainer.optimizers[0].state) == 0


def test_momentum_does_not_move_weights_in_a_step_without_gradient():
    live, dead = random_trajectories(4, seed=1), random_trajectories(4, seed=2, reward=1.0, group="dead")
    module = TimesAdvantage(tiny_policy_model(), learning_rate=0.1)
    data = PackedDataModule(live + dead, max_tokens=1000, steps_per_iteration=2)
    seen = []

    class Watch(KeepGradients):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append((pl_module.steps_without_signal, weights(pl_module).clone()))

    fit(module, data, max_epochs=3, callbacks=[Watch()])
    moved = [not torch.equal(before[1], after[1]) for before, after in itertools.pairwise(seen)]
    without = [after[0] > before[0] for before, after in itertools.pairwise(seen)]
    assert any(without)
    assert moved == [not skipped for skipped in without]


def test_a_kl_gradient_is_kept_where_the_correction_masks_every_token():
    far = [
        Trajectory(t.token_ids, t.action_mask, t.reward, group=t.group, log_probs=t.log_probs - 9.0)
        for t in random_trajectories(8, seed=2)
    ]
    module = PolicyModule(
        tiny_policy_model(), learning_rate=0.1, sampler_correction="mask", kl_coefficient=0.1, loss_on="live",
        reference=tiny_policy_model(seed=1),
    )  # fmt: skip
    start = weights(module)
    fit(module, PackedDataModule(far, max_tokens=1000))
    assert module.steps_without_signal == 0
    assert not torch.equal(weights(module), start)


def test_a_gradient_that_is_no_number_is_an_error_before_the_update():
    class Root(PolicyModule):
        def objective(self, log_probs, batch):
            return -batch.advantages * (log_probs - log_probs.detach()).abs().sqrt()

    module = Root(tiny_policy_model(), learning_rate=1e-3)
    start = weights(module)
    with pytest.raises(
        ValueError, match=r"finite, but the norm of its gradient is nan: that of `policy\..*` is the first"
    ):
        fit(module)
    assert torch.equal(weights(module), start)


def test_a_loss_that_is_no_number_says_where_it_comes_from():
    class Divides(PolicyModule):
        def objective(self, log_probs, batch):
            return -batch.advantages * log_probs / (log_probs.detach() * 0)

    with pytest.raises(ValueError, match="a division by 0 or an overflow in `objective`"):
        fit(Divides(tiny_policy_model()))


def test_held_out_likelihood_needs_no_reward_and_no_end():
    def nats(trajectories, **data):
        module = PolicyModule(tiny_policy_model())
        held_out = PackedDataModule(random_trajectories(8), max_tokens=40, validation_data=trajectories, **data)
        return quiet_trainer().validate(module, held_out, verbose=False)[0]

    whole = nats(random_trajectories(6, seed=9))["val/nats_per_token"]
    assert whole > 1.0
    for data in ({}, {"missing_rewards": "ignore"}):
        assert nats(random_trajectories(6, seed=9, reward=None), **data)["val/nats_per_token"] == whole
    cut = nats(random_trajectories(6, seed=9, truncated=True), truncated="mask")
    assert cut["val/nats_per_token"] == whole
    assert nats([Trajectory([4, 5], [0, 0], 1.0)]) == {}


def test_imitation_needs_no_rewards():
    def loss(trajectories):
        module = PolicyModule(tiny_policy_model(), objective="supervised")
        _, trainer = fit(module, PackedDataModule(trajectories, max_tokens=40))
        return float(trainer.callback_metrics["train/loss"])

    assert loss(random_trajectories(8, reward=None)) == loss(random_trajectories(8))


def test_a_model_that_cannot_be_loaded_is_named():
    with pytest.raises(ValueError, match=r"`model`='no/such/place' could not be loaded; give a folder"):
        fit(PolicyModule("no/such/place"))
    with pytest.raises(ValueError, match=r"`reference`='no/such/place' could not be loaded"):
        PolicyModule(tiny_policy_model(), kl_coefficient=0.1, reference="no/such/place")
    with pytest.raises(TypeError, match="give the model inside it"):
        PolicyModule(tiny_policy_model(), kl_coefficient=0.1, reference=PolicyModule(tiny_policy_model()))
    with pytest.raises(TypeError, match="must be a path or a torch module, got Qwen3Config"):
        PolicyModule(tiny_policy_model(), kl_coefficient=0.1, reference=tiny_config())


def test_numbers_of_other_libraries_do_not_reach_the_checkpoint(tmp_path):
    module = PolicyModule(
        tiny_policy_model(), learning_rate=np.float64(1e-3), warmup_steps=np.int64(2), clip_high=torch.tensor(0.3)
    )
    _, trainer = fit(module)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["warmup_steps"] == 2
