"""A run that is stopped and resumed ends with the weights, bit for bit, of one that was not."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl import Environment, PackedDataModule, PolicyModule, Turn, rollouts, to_dataset
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories

END = 2


class Parity(Environment):
    """Rewards an answer by the parity of its ids, so that groups are mixed; two turns."""

    def reset(self, task):
        self.turns = 0
        return [5, task["number"]]

    def step(self, token_ids):
        self.turns += 1
        return Turn([7], done=self.turns == 2, reward=float(sum(token_ids) % 2))


class Stop(Callback):
    """Ends the process's training abruptly after some microbatches, the way a kill does."""

    def __init__(self, microbatches: int) -> None:
        self.left = microbatches

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("stopped here")


def online():
    tasks = [{"id": f"task {number}", "number": number} for number in range(8, 14)]
    return rollouts(Parity, tasks, tasks_per_iteration=3, group_size=4, end_ids=[END], max_new_tokens=4, max_turns=2)


SOURCES = {
    "online": lambda: online(),
    "data set": lambda: to_dataset(random_trajectories(24, seed=5)),
    "list": lambda: random_trajectories(24, seed=5),
}


def run(model, source, folder, *, stop_after=None, checkpoint=None, workers=0, epochs=3, module_class=PolicyModule):
    module = module_class(copy.deepcopy(model), learning_rate=1e-2, weight_decay=0.1, warmup_steps=5)
    data = PackedDataModule(SOURCES[source](), max_tokens=20, steps_per_iteration=3, num_workers=workers)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    callbacks = [saver] if stop_after is None else [saver, Stop(stop_after)]
    trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stopped = pytest.raises(RuntimeError, match="stopped here") if stop_after is not None else nullcontext()
        with stopped:
            trainer.fit(module, data, ckpt_path=checkpoint)
    state = trainer.optimizers[0].state_dict()["state"] if trainer.optimizers else {}
    return {
        "weights": {name: value.detach().clone() for name, value in module.policy.model.state_dict().items()},
        "moments": {f"{key}.{name}": value for key, moments in state.items() for name, value in moments.items()},
        "steps": trainer.global_step,
        "without_signal": module.steps_without_signal,
    }


def latest(folder):
    return max(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1].split("-")[0]))


def assert_identical(left, right):
    assert left["steps"] == right["steps"]
    assert left["without_signal"] == right["without_signal"]
    for kind in ("weights", "moments"):
        assert left[kind].keys() == right[kind].keys()
        for name, value in left[kind].items():
            assert torch.equal(value, right[kind][name]), (kind, name)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The uninterrupted run of each source."""
    model = tiny_policy_model()
    return {name: run(model, name, tmp_path_factory.mktemp("whole")) for name in SOURCES}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("stop_after", [7, 9, 13, 17])
def test_stop_anywhere_and_resume(source, stop_after, reference, tmp_path):
    model = tiny_policy_model()
    run(model, source, tmp_path, stop_after=stop_after)
    resumed = run(model, source, tmp_path / "again", checkpoint=latest(tmp_path))
    assert_identical(resumed, reference[source])


def test_worker_processes_do_not_move_the_position(reference, tmp_path):
    model = tiny_policy_model()
    run(model, "list", tmp_path, stop_after=10, workers=2)
    resumed = run(model, "list", tmp_path / "again", checkpoint=latest(tmp_path), workers=2)
    assert_identical(resumed, reference["list"])


def test_resuming_from_the_end_of_an_iteration_makes_new_rollouts(reference, tmp_path):
    model = tiny_policy_model()
    run(model, "online", tmp_path, epochs=2)
    resumed = run(model, "online", tmp_path / "again", checkpoint=latest(tmp_path))
    assert_identical(resumed, reference["online"])


@pytest.mark.parametrize("source", ["online", "list"])
@pytest.mark.parametrize("stops", [[12, 12], [13, 12], [8, 4, 4, 8, 4], [7, 6, 9, 5, 4, 6]])
def test_stopped_again_and_again(source, stops, reference, tmp_path):
    model, checkpoint = tiny_policy_model(), None
    for number, stop_after in enumerate(stops):
        folder = tmp_path / str(number)
        run(model, source, folder, stop_after=stop_after, checkpoint=checkpoint)
        checkpoint = latest(folder) if list(folder.glob("*.ckpt")) else checkpoint
    assert_identical(run(model, source, tmp_path / "end", checkpoint=checkpoint), reference[source])
