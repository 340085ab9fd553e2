from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl import Environment, PackedDataModule, PolicyModule, Trajectory, Turn, rollouts, to_dataset
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories

END = 2


class Parity(Environment):
    def reset(self, task):
        return [5, task["number"]]

    def step(self, token_ids):
        return Turn(done=True, reward=float(sum(token_ids) % 2))


class Keep(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.epochs.append([])
        self.epochs[-1].append(batch)


def fit(data, module=None, **trainer):
    keep = Keep()
    running = quiet_trainer(callbacks=[keep], **trainer)
    running.fit(module or PolicyModule(tiny_policy_model(), learning_rate=1e-3, loss_on="scored"), data)
    return keep.epochs, running


def online(**arguments):
    tasks = [{"id": f"task {number}", "number": number} for number in range(8, 14)]
    options = {"tasks_per_iteration": 3, "group_size": 4, "end_ids": [END], "max_new_tokens": 4}
    return rollouts(Parity, tasks, **(options | arguments))


def order(epoch):
    return [batch.trajectory_index.tolist() for batch in epoch]


def test_every_trajectory_once_an_epoch_in_an_order_that_changes():
    trajectories = random_trajectories(24, seed=3, lengths=(4, 10))
    epochs, _ = fit(PackedDataModule(to_dataset(trajectories), max_tokens=24), max_epochs=3)
    with_scores = [i for i, t in enumerate(trajectories) if t.num_scored]
    for epoch in epochs:
        assert sorted(i for batch in order(epoch) for i in batch) == with_scores
        assert all(batch.num_positions <= 24 for batch in epoch)
    assert order(epochs[0]) != order(epochs[1]) != order(epochs[2])
    again, _ = fit(PackedDataModule(trajectories, max_tokens=24), max_epochs=3)
    assert [order(epoch) for epoch in again] == [order(epoch) for epoch in epochs]


def test_one_epoch_is_one_rollout_of_the_current_policy():
    data = PackedDataModule(online(), max_tokens=32)
    groups = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            groups.append(set(trainer.datamodule.iteration.groups))

    trainer = quiet_trainer(max_epochs=3, callbacks=[Look()])
    trainer.fit(PolicyModule(tiny_policy_model(), learning_rate=1e-3), data)
    assert trainer.reload_dataloaders_every_n_epochs == 0  # given back after the fit
    assert all(len(g) == 3 for g in groups)
    assert groups[0].isdisjoint(groups[1])
    assert groups[1].isdisjoint(groups[2])
    assert {"reward", "pass_rate", "truncated", "dropped/zero_advantage"} <= data.rollout_statistics.keys()


def test_accumulation_is_the_smallest_that_fits_and_follows_the_data():
    seen = []

    class Look(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            seen.append((trainer.accumulate_grad_batches, trainer.datamodule.iteration.plan.microbatches_per_step))

    trainer = quiet_trainer(max_epochs=2, callbacks=[Look()])
    trainer.fit(
        PolicyModule(tiny_policy_model(), loss_on="scored"), PackedDataModule(random_trajectories(16), max_tokens=30)
    )
    total = sum(len(t) for t in random_trajectories(16) if t.num_scored)
    assert all(ours == planned for ours, planned in seen)
    assert -(-total // 30) <= seen[0][0] <= -(-total // 30) + 1


@pytest.mark.parametrize(("overlong", "kept", "truncated"), [("drop", 2, 0), ("truncate", 3, 1)])
def test_longer_than_the_budget(overlong, kept, truncated):
    made = [
        Trajectory([3] * length, [0] + [1] * (length - 1), float(i), group="g", log_probs=[-1.0] * length)
        for i, length in enumerate((5, 2, 9))
    ]
    with pytest.raises(ValueError, match=r"(?s)2.*9.*8"):
        fit(PackedDataModule(made, max_tokens=8))
    epochs, trainer = fit(PackedDataModule(made, max_tokens=8, overlong=overlong))
    lengths = [length for batch in epochs[0] for length in batch.segment_lengths.tolist()]
    assert len(lengths) == kept
    assert max(lengths) == (8 if truncated else 5)
    assert trainer.datamodule.rollout_statistics["dropped/overlong"] == 3 - kept


def test_truncated_trajectories_can_be_masked_while_their_reward_counts():
    made = [
        Trajectory([3, 4, 5], [0, 1, 1], float(i % 2), group="g", truncated=i == 3, log_probs=[0.0, -1.0, -1.0])
        for i in range(4)
    ]
    for choice, scored in (("keep", 8), ("mask", 6)):
        epochs, trainer = fit(PackedDataModule(made, max_tokens=64, truncated=choice))
        assert sum(batch.num_scored for batch in epochs[0]) == scored
        assert trainer.datamodule.iteration.advantages.tolist() == pytest.approx(
            [-0.866, 0.866, -0.866, 0.866], abs=1e-3
        )
        assert trainer.datamodule.rollout_statistics == trainer.datamodule.rollout_statistics
        assert trainer.datamodule.iteration.lengths == [3, 3, 3, 3]


def test_unscored_trajectories_are_named_or_left_out():
    made = [Trajectory([3, 4, 5], [0, 1, 1], r, group="g", task="t") for r in (1.0, None, 0.0, 1.0)]
    with pytest.raises(ValueError, match=r"trajectory 1 \(task 't', group 'g'\) has no reward"):
        fit(PackedDataModule(made, max_tokens=64))
    epochs, trainer = fit(PackedDataModule(made, max_tokens=64, missing_rewards="ignore"))
    assert sum(batch.num_scored for batch in epochs[0]) == 6
    assert trainer.datamodule.rollout_statistics["dropped/unscored"] == 1


@pytest.mark.parametrize("budget", [0, -1])
def test_impossible_budgets_are_refused_at_construction(budget):
    with pytest.raises(ValueError, match=f"`max_tokens` must be at least 1, got {budget}"):
        PackedDataModule(random_trajectories(4), max_tokens=budget)


@pytest.mark.parametrize("budget", [7.5, None, "8", True])
def test_budgets_of_another_type_are_refused_at_construction(budget):
    with pytest.raises(TypeError, match="`max_tokens` must be an integer of at least 1"):
        PackedDataModule(random_trajectories(4), max_tokens=budget)


def test_unusable_settings_are_explained():
    with pytest.raises(TypeError, match="the source is a list"):
        PackedDataModule([1, 2], max_tokens=8)
    with pytest.raises(ValueError, match="`validation_tasks` need"):
        PackedDataModule(random_trajectories(4), max_tokens=8, validation_tasks=[{"id": "a"}])
    with pytest.raises(MisconfigurationException, match="reload_dataloaders_every_n_epochs=3"):
        fit(PackedDataModule(random_trajectories(4), max_tokens=24), reload_dataloaders_every_n_epochs=3)
    with pytest.raises(MisconfigurationException, match="overfit_batches"):
        fit(PackedDataModule(random_trajectories(4), max_tokens=24), overfit_batches=1)
    with pytest.raises(ValueError, match=r"trajectory 0 has `log_probs` but trajectory 1 has none"):
        fit(PackedDataModule([random_trajectories(1)[0], Trajectory([1, 2], [0, 1], 1.0)], max_tokens=24))


@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ([{"number": 3}], ValueError, r"`validation_tasks`: task 0 has no 'id' \(found \['number'\]\)"),
        ([{"id": "a"}, {"id": 7}], TypeError, "`validation_tasks`: task 1 has the id 7, expected a string"),
        ([{"id": "a"}, {"id": "a"}], ValueError, "`validation_tasks`: tasks 0 and 1 both have the id 'a'"),
        ([], ValueError, "`validation_tasks` is empty"),
        ({"id": "a"}, TypeError, "`validation_tasks` must be a sequence of mappings, got dict"),
    ],
)
def test_held_out_tasks_are_checked_at_construction(tasks, error, message):
    with pytest.raises(error, match=message):
        PackedDataModule(online(), max_tokens=40, validation_tasks=tasks)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_numbers_may_be_numpys_or_torchs(kind, tmp_path):
    numbers = {"max_tokens": 24, "steps_per_iteration": 2, "seed": 3, "num_workers": 0, "validation_attempts": 1}
    plain = PackedDataModule(random_trajectories(24), **numbers)
    quiet_trainer().fit(PolicyModule(tiny_policy_model()), plain)
    data = PackedDataModule(random_trajectories(24), **{name: kind(value) for name, value in numbers.items()})
    trainer = quiet_trainer()
    trainer.fit(PolicyModule(tiny_policy_model()), data)
    trainer.save_checkpoint(tmp_path / "numbers.ckpt")
    torch.load(tmp_path / "numbers.ckpt", weights_only=True)
    assert data.iteration.plan.steps == plain.iteration.plan.steps


def test_rewards_are_advantages_without_a_baseline():
    equal = [Trajectory([3, 4, 5], [0, 1, 1], 1.0, task="a") for _ in range(3)]
    data = PackedDataModule(equal, max_tokens=16, baseline="none")
    quiet_trainer().fit(PolicyModule(tiny_policy_model()), data)
    assert data.iteration.advantages.tolist() == [1.0, 1.0, 1.0]


def test_ratio_before_the_first_of_several_updates_is_exactly_one():
    ratios = []

    class Look(PolicyModule):
        def objective(self, log_probs, batch):
            ratios.append((log_probs.detach() - batch.old_log_probs).abs().max().item() if batch.num_scored else 0.0)
            return super().objective(log_probs, batch)

    data = PackedDataModule(random_trajectories(24, seed=4), max_tokens=24, steps_per_iteration=3)
    module = Look(tiny_policy_model(attention_dropout=0.1), learning_rate=1e-2, loss_on="live")
    trainer = quiet_trainer()
    trainer.fit(module, data)
    per_step = trainer.accumulate_grad_batches
    assert ratios[:per_step] == [0.0] * per_step
    assert max(ratios[per_step:]) > 1e-4


def test_validation_on_held_out_tasks_and_on_held_out_trajectories():
    held_out = [{"id": "new", "number": 20}, {"id": "newer", "number": 21}]
    data = PackedDataModule(online(), max_tokens=32, validation_tasks=held_out, validation_attempts=3)
    trainer = quiet_trainer()
    (metrics,) = trainer.validate(PolicyModule(tiny_policy_model()), data, verbose=False)
    assert metrics["val/trajectories"] == 6.0
    assert 0.0 <= metrics["val/pass_rate"] <= 1.0
    predictions = quiet_trainer().predict(PolicyModule(tiny_policy_model()), data)
    assert [len(p) for p in predictions] == [3, 3]
    assert isinstance(predictions[0][0], Trajectory)

    trajectories = random_trajectories(10, seed=2, temperature=1.0)
    data = PackedDataModule(random_trajectories(4), max_tokens=24, validation_data=trajectories)
    model = tiny_policy_model()
    (metrics,) = quiet_trainer().validate(PolicyModule(model), data, verbose=False)
    with torch.no_grad():
        nats = [
            -torch.log_softmax(model(t.token_ids[None]).logits[0, :-1].double(), -1).gather(1, t.token_ids[1:, None])[
                t.scored[1:]
            ]
            for t in trajectories
        ]
    assert metrics["val/nats_per_token"] == pytest.approx(float(torch.cat(nats).mean()), rel=1e-5)


def test_sampler_log_probs_are_cut_with_their_trajectories():
    data = PackedDataModule(
        random_trajectories(8), max_tokens=7, overlong="truncate", old_log_probs="sampler", steps_per_iteration=2
    )
    with pytest.warns(UserWarning, match="were cut"):
        quiet_trainer().fit(PolicyModule(tiny_policy_model()), data)
    assert [len(old) for old in data.old_log_probs_by_trajectory] == data.iteration.lengths


def test_what_was_cut_to_the_budget_counts_as_truncated():
    long = [Trajectory([3] * n, [0] + [1] * (n - 1), float(n % 2), group="g") for n in (12, 7)]
    for truncated, counts in (("keep", [7, 6]), ("mask", [0, 6])):
        data = PackedDataModule(long, max_tokens=8, overlong="truncate", truncated=truncated)
        with pytest.warns(UserWarning, match="were cut"):
            quiet_trainer().fit(PolicyModule(tiny_policy_model()), data)
        assert data.iteration.truncated.tolist() == [True, False]
        assert data.iteration.scored_counts == counts


def test_groups_of_one_are_named_as_the_reason_and_only_once():
    alone = [Trajectory([3, 4, 5], [0, 1, 1], float(i % 2)) for i in range(6)]
    with pytest.warns(UserWarning, match="every trajectory is a group of its own") as caught:
        quiet_trainer(max_epochs=3).fit(PolicyModule(tiny_policy_model()), PackedDataModule(alone, max_tokens=8))
    assert sum("nothing to train on" in str(warning.message) for warning in caught) == 1


def test_arguments_that_contradict_each_other():
    held_out = {"validation_tasks": [{"id": "a", "number": 9}], "validation_data": random_trajectories(2)}
    with pytest.raises(ValueError, match="exclude each other"):
        PackedDataModule(online(), max_tokens=40, **held_out)
    limited = online(max_trajectory_tokens=64)
    with pytest.raises(ValueError, match=r"`max_tokens` \(8\) is below the rollouts' `max_trajectory_tokens` \(64\)"):
        PackedDataModule(limited, max_tokens=8)
    PackedDataModule(limited, max_tokens=8, overlong="drop")
    with pytest.raises(MisconfigurationException, match="nothing to validate on"):
        quiet_trainer().validate(
            PolicyModule(tiny_policy_model()), PackedDataModule(random_trajectories(2), max_tokens=40)
        )


def test_longer_than_the_model_was_made_for_is_said():
    long = [Trajectory([3] * 80, [0] + [1] * 79, float(i), group="g") for i in range(2)]
    with pytest.warns(UserWarning, match="80 tokens, but the model's configuration says `max_position_embeddings`=64"):
        quiet_trainer().fit(PolicyModule(tiny_policy_model()), PackedDataModule(long, max_tokens=200))
