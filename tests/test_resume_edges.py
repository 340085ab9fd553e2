"""Stops and resumptions that are not a plain kill: limits, early ends, other plans, a Trainer that is used again."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl import PackedDataModule, PolicyModule
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories
from tests.test_resume import online

TRAJECTORIES = random_trajectories(24, seed=5)
MODEL = tiny_policy_model()


class ShouldStop(Callback):
    """Asks the Trainer to end, as early stopping does, after some microbatches."""

    def __init__(self, microbatches: int) -> None:
        self.left = microbatches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.should_stop = True


class Boom(Callback):
    """Fails after some microbatches."""

    def __init__(self, microbatches: int = 1) -> None:
        self.left = microbatches

    def on_train_batch_end(self, *arguments) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("boom")


def fit(checkpoint=None, source=None, data=None, save=None, **trainer):
    module = PolicyModule(copy.deepcopy(MODEL), learning_rate=1e-2)
    arguments = {"max_tokens": 20, "steps_per_iteration": 3} | (data or {})
    running = quiet_trainer(**({"max_epochs": 3} | trainer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running.fit(module, PackedDataModule(source or TRAJECTORIES, **arguments), ckpt_path=checkpoint)
    if save is not None:
        running.save_checkpoint(save)
    return module, running


def assert_same(one, other):
    assert one[1].global_step == other[1].global_step
    for name, value in one[0].state_dict().items():
        assert torch.equal(value, other[0].state_dict()[name]), name


@pytest.mark.parametrize("kind", ["list", "online"])
@pytest.mark.parametrize(
    "stop",
    [
        {"max_steps": 1},
        {"max_steps": 2},
        {"max_steps": 3},
        {"max_steps": 5},
        {"callbacks": 3},
        {"callbacks": 4},
        {"callbacks": 7},
    ],
    ids=str,
)
def test_a_run_that_ended_inside_an_iteration_continues_it(kind, stop, tmp_path):
    def source():
        return online() if kind == "online" else TRAJECTORIES

    flags = {"callbacks": [ShouldStop(stop["callbacks"])]} if "callbacks" in stop else stop
    fit(source=source(), save=tmp_path / "stopped.ckpt", **flags)
    assert_same(fit(source=source(), checkpoint=tmp_path / "stopped.ckpt"), fit(source=source()))


@pytest.mark.parametrize("limit", [3, 5, 8, 10, 0.5])
@pytest.mark.parametrize("own", [{}, {"accumulate_grad_batches": 8}], ids=["automatic", "own_k"])
def test_every_checkpoint_of_a_limited_run(limit, own, tmp_path):
    flags = {"max_epochs": 2, "limit_train_batches": limit} | own
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(enable_checkpointing=True, callbacks=[saver], **flags)
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == whole[1].global_step
    for checkpoint in checkpoints:
        assert_same(fit(checkpoint=checkpoint, **flags), whole)


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"partition": "trajectories"}, {"source": TRAJECTORIES[::-1]}], ids=str
)
def test_another_plan_in_the_middle_of_an_iteration_is_refused(changed, tmp_path):
    own = {"accumulate_grad_batches": 8}
    fit(save=tmp_path / "one.ckpt", max_steps=1, **own)
    source = changed.get("source")
    data = {name: value for name, value in changed.items() if name != "source"}
    with pytest.raises(ValueError, match="another plan"):
        fit(checkpoint=tmp_path / "one.ckpt", source=source, data=data, **own)
    # At an iteration's end there is no position in a plan to lose.
    fit(save=tmp_path / "end.ckpt", max_epochs=1, **own)
    fit(checkpoint=tmp_path / "end.ckpt", source=source, data=data, **own)


def test_validating_a_checkpoint_leaves_nothing_behind(tmp_path):
    def data():
        tasks = [{"id": "new", "number": 9}]
        return PackedDataModule(online(), max_tokens=20, steps_per_iteration=3, validation_tasks=tasks)

    def module():
        return PolicyModule(copy.deepcopy(MODEL), learning_rate=1e-2)

    first, trainer = module(), quiet_trainer(max_steps=2)
    trainer.fit(first, data())
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    fresh, used = module(), data()
    quiet_trainer().validate(fresh, used, ckpt_path=tmp_path / "stopped.ckpt", verbose=False)
    collected = []
    collect = used.rollouts.collect
    used.rollouts.collect = lambda *arguments, **named: collected.append(named) or collect(*arguments, **named)
    quiet_trainer().fit(fresh, used)
    assert [call["iteration"] for call in collected] == [0]


def test_a_trainer_is_given_back_after_an_exception():
    trainer = quiet_trainer(callbacks=[Boom()])
    module = PolicyModule(copy.deepcopy(MODEL))
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(module, PackedDataModule(TRAJECTORIES, max_tokens=40))
    assert (trainer.accumulate_grad_batches, trainer.reload_dataloaders_every_n_epochs) == (1, 0)
    trainer.callbacks = []
    trainer.fit(module, PackedDataModule(TRAJECTORIES, max_tokens=14))
    assert (trainer.accumulate_grad_batches, trainer.reload_dataloaders_every_n_epochs) == (1, 0)


def test_a_broken_off_step_leaves_no_numbers_behind():
    def figures(module):
        trainer = quiet_trainer()
        trainer.fit(module, PackedDataModule(TRAJECTORIES, max_tokens=20))
        return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}

    module = PolicyModule(copy.deepcopy(MODEL), learning_rate=0.0)
    with pytest.raises(RuntimeError, match="boom"):
        quiet_trainer(callbacks=[Boom(2)]).fit(module, PackedDataModule(TRAJECTORIES, max_tokens=20))
    assert figures(module) == figures(PolicyModule(copy.deepcopy(MODEL), learning_rate=0.0))
