"""PassRateCurriculum: installs its sampler in time, keeps it in the checkpoint, logs what it does."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl.callbacks import PassRateCurriculum
from lit_rl.curriculum import BetaPosterior, DynamicSampling, Interval, LiveProbability, MeanOfLast, Thompson
from tests.callbacks.stubs import RolloutDataModule, StubDataModule, StubModule, group
from tests.helpers import quiet_trainer

IDS = [f"task-{number}" for number in range(12)]


def rewards_of(task_id: str, iteration: int) -> list[float]:
    return [float((int(task_id.split("-")[1]) * 5 + iteration + attempt) % 4 < 2) for attempt in range(4)]


def always_solved(task_id: str, iteration: int) -> list[float]:
    return [1.0] * 4


def fit(
    curriculum: PassRateCurriculum, data: LightningDataModule, epochs: int = 6, **arguments: Any
) -> dict[str, float]:
    ckpt_path = arguments.pop("ckpt_path", None)
    callbacks = [curriculum, *arguments.pop("callbacks", [])]
    trainer = quiet_trainer(max_epochs=epochs, callbacks=callbacks, reload_dataloaders_every_n_epochs=1, **arguments)
    trainer.fit(StubModule(), datamodule=data, ckpt_path=ckpt_path)
    return {name.removeprefix("curriculum/"): value.item() for name, value in trainer.callback_metrics.items()}


def test_it_decides_from_the_first_rollout_on() -> None:
    data = RolloutDataModule(IDS, 6, lambda task_id, _: [1.0] * 4 if task_id < "task-5" else [1.0, 0.0, 0.0, 0.0])
    curriculum = PassRateCurriculum(revisit=0)
    fit(curriculum, data)
    assert data.rollouts.task_sampler is curriculum.sampler
    solved = {task_id for task_id in IDS if task_id < "task-5"}
    assert set(data.drawn[0]) | set(data.drawn[1]) == set(IDS)  # the first pass
    for epoch in range(2, 6):
        assert not solved & set(data.drawn[epoch])


def test_what_is_logged() -> None:
    data = RolloutDataModule(IDS, 6, always_solved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = fit(PassRateCurriculum(), data, epochs=4)
    # two iterations of 6 see all 12 tasks; then the pool is empty: 1 revisit and 1 that stands in
    assert metrics["pool_size"] == 0
    assert (metrics["excluded_easy"], metrics["excluded_hard"]) == (12, 0)
    assert (metrics["revisits"], metrics["stand_ins"], metrics["tasks_drawn"]) == (1, 1, 2)
    assert metrics["episodes"] == 8
    assert metrics["episodes_sampled"] == 2 * 24 + 2 * 8
    assert metrics["episodes_saved"] == 2 * 16
    assert metrics["predicted_live_share"] == metrics["observed_live_share"] == 0.0
    assert metrics["estimates/one"] == 1.0


def test_starving_warns_once() -> None:
    data = RolloutDataModule(IDS, 6, always_solved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(PassRateCurriculum(), data, epochs=8)
    messages = [str(w.message) for w in caught if "are in the pool" in str(w.message)]
    assert len(messages) == 1
    assert "12 excluded as easy" in messages[0]


def test_fractions_that_never_reach_the_threshold_do_not_starve_the_training() -> None:
    def sixths(task_id: str, iteration: int) -> list[float]:
        return [((int(task_id.split("-")[1]) + iteration + attempt) % 6) / 6 for attempt in range(4)]

    with pytest.warns(UserWarning, match=r"no attempt of iteration 0 reached threshold=1") as caught:
        metrics = fit(PassRateCurriculum(), RolloutDataModule(IDS, 6, sixths))
    assert len([w for w in caught if "threshold" in str(w.message)]) == 1
    assert (metrics["pool_size"], metrics["tasks_drawn"], metrics["observed_live_share"]) == (12, 6, 1.0)


CONFIGURATIONS = [
    {},
    {"low": 0.1, "high": 0.9, "estimator": "beta_posterior", "revisit": 2},
    {"estimator": "mean_of_last", "rule": "variance"},
    {"estimator": "beta_posterior", "rule": "thompson"},
    {"estimator": "exponential_average", "rule": "live_probability", "refill": "full"},
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=repr)
@pytest.mark.parametrize("cadence", [{"every_n_train_steps": 3}, {"every_n_epochs": 1}], ids=repr)
def test_a_resumed_run_draws_the_same_tasks(configuration: dict, cadence: dict, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, **cadence)
    through = RolloutDataModule(IDS, 5, rewards_of)
    curriculum = PassRateCurriculum(**configuration)
    metrics = fit(curriculum, through, callbacks=[saver], enable_checkpointing=True)
    saved = sorted(tmp_path.glob("*.ckpt"))
    assert len(saved) >= 4
    for path in saved[:3]:
        resumed, again = RolloutDataModule(IDS, 5, rewards_of), PassRateCurriculum(**configuration)
        assert fit(again, resumed, ckpt_path=path) == metrics
        assert resumed.drawn == {epoch: through.drawn[epoch] for epoch in resumed.drawn}
        assert again.sampler is not None
        assert curriculum.sampler is not None
        assert again.sampler.estimates() == curriculum.sampler.estimates()


def test_the_state_loads_with_weights_only(tmp_path: Path) -> None:
    curriculum = PassRateCurriculum()
    fit(curriculum, RolloutDataModule(IDS, 6, rewards_of), epochs=2)
    torch.save(curriculum.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    early = PassRateCurriculum()
    early.load_state_dict(state)  # before setup: it waits
    data = RolloutDataModule(IDS, 6, rewards_of)
    early.setup(SimpleNamespace(datamodule=data), StubModule(), "fit")  # type: ignore[arg-type]
    assert early.sampler is not None
    assert curriculum.sampler is not None
    assert early.sampler.estimates() == curriculum.sampler.estimates()


def test_state_is_restored_between_setup_and_the_first_rollout(tmp_path: Path) -> None:
    order: list[str] = []

    class Spy(PassRateCurriculum):
        def setup(self, *arguments: Any, **keywords: Any) -> None:
            order.append("setup")
            super().setup(*arguments, **keywords)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            order.append("load")
            super().load_state_dict(state_dict)

    class SpyData(RolloutDataModule):
        def train_dataloader(self) -> Any:
            order.append("rollout")
            return super().train_dataloader()

    saver = ModelCheckpoint(tmp_path, filename="last", every_n_epochs=1)
    fit(Spy(), SpyData(IDS, 6, rewards_of), 1, callbacks=[saver], enable_checkpointing=True)
    order.clear()
    fit(Spy(), SpyData(IDS, 6, rewards_of), 2, ckpt_path=tmp_path / "last.ckpt")
    assert order[:3] == ["setup", "load", "rollout"]


def test_a_second_fit_keeps_the_estimates_and_takes_the_new_tasks() -> None:
    curriculum = PassRateCurriculum()
    fit(curriculum, RolloutDataModule(IDS[:6], 6, always_solved), epochs=1)
    data = RolloutDataModule(IDS[3:9], 3, rewards_of)
    fit(curriculum, data, epochs=1)
    assert curriculum.sampler is not None
    assert curriculum.sampler.task_ids == sorted(IDS[3:9])
    assert len(set(data.drawn[0]) & set(IDS[6:9])) == 2  # 1 place of 3 is a revisit of a solved task


@pytest.mark.parametrize("same_trainer", [False, True])
def test_a_second_fit_begins_an_iteration_of_its_own(same_trainer: bool) -> None:
    curriculum = PassRateCurriculum(refill="full")
    trainer = quiet_trainer(callbacks=[curriculum], reload_dataloaders_every_n_epochs=1)
    trainer.fit(StubModule(), datamodule=RolloutDataModule(IDS, 3, rewards_of))
    if same_trainer:
        trainer.fit_loop.max_epochs = 2
    else:
        trainer = quiet_trainer(callbacks=[curriculum], reload_dataloaders_every_n_epochs=1)
    trainer.fit(StubModule(), datamodule=RolloutDataModule(IDS, 3, rewards_of))
    metrics = {name.removeprefix("curriculum/"): value.item() for name, value in trainer.callback_metrics.items()}
    assert (metrics["tasks_drawn"], metrics["episodes"]) == (3, 12)
    assert (metrics["episodes_sampled"], metrics["episodes_saved"]) == (24, 0)
    assert curriculum.sampler is not None
    assert curriculum.sampler.clock == 1


def test_a_second_fit_takes_the_new_group_size() -> None:
    curriculum = PassRateCurriculum(rule="live_probability", estimator="beta_posterior")
    fit(curriculum, RolloutDataModule(IDS, 3, rewards_of), epochs=1)
    data = RolloutDataModule(IDS, 3, rewards_of)
    data.rollouts.group_size = 8
    fit(curriculum, data, epochs=1)
    assert curriculum.sampler is not None
    assert curriculum.sampler.rule == LiveProbability(group_size=8)


def test_without_rollouts_it_says_what_to_do() -> None:
    with pytest.raises(MisconfigurationException, match=r"PackedDataModule\(rollouts\(environment, tasks\)"):
        fit(PassRateCurriculum(), StubDataModule(lambda epoch: group("a", [1.0, 0.0])))


def test_validation_alone_needs_no_rollouts() -> None:
    PassRateCurriculum().setup(SimpleNamespace(datamodule=None), StubModule(), "validate")  # type: ignore[arg-type]


def test_dynamic_sampling_is_handed_to_the_rollouts() -> None:
    data = RolloutDataModule(IDS, 6, rewards_of)
    fit(PassRateCurriculum(dynamic_limit=3, dynamic_exhausted="raise"), data, epochs=1)
    assert data.rollouts.dynamic_sampling == DynamicSampling(3, "raise")
    del data.rollouts.dynamic_sampling
    with pytest.raises(MisconfigurationException, match="dynamic_limit"):
        fit(PassRateCurriculum(dynamic_limit=3), data, epochs=1)


def test_the_group_size_of_the_rollouts_reaches_the_rule() -> None:
    curriculum = PassRateCurriculum(rule="live_probability")
    fit(curriculum, RolloutDataModule(IDS, 6, rewards_of), epochs=1)
    assert curriculum.sampler is not None
    assert curriculum.sampler.rule == LiveProbability(group_size=4)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"low": 0.8, "high": 0.2}, ValueError, "`low` must be less"),
        ({"low": 0.1, "rule": "variance"}, ValueError, "belong to rule='interval'"),
        ({"estimator": "beta"}, ValueError, "`estimator` must be one of"),
        ({"rule": "band"}, ValueError, "`rule` must be one of"),
        ({"rule": "thompson"}, ValueError, "BetaPosterior"),
        ({"revisit": -1}, ValueError, "`revisit`"),
        ({"floor": 0}, ValueError, "`floor`"),
        ({"dynamic_limit": 0}, ValueError, "`limit`"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PassRateCurriculum(**arguments)


@pytest.mark.parametrize(
    ("init_args", "estimator", "rule"),
    [
        ({"low": 0.1, "high": 0.9, "estimator": "mean_of_last"}, MeanOfLast(), Interval(0.1, 0.9)),
        (
            {
                "estimator": {"class_path": "lit_rl.curriculum.BetaPosterior", "init_args": {"memory": 0.8}},
                "rule": {"class_path": "lit_rl.curriculum.Thompson"},
            },
            BetaPosterior(0.8),
            Thompson(),
        ),
    ],
)
def test_it_can_be_written_in_yaml(init_args: dict, estimator: Any, rule: Any) -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(Callback, "callback")
    config = parser.parse_object(
        {"callback": {"class_path": "lit_rl.callbacks.PassRateCurriculum", "init_args": init_args}}
    )
    curriculum = parser.instantiate(config).callback
    fit(curriculum, RolloutDataModule(IDS, 6, rewards_of), epochs=1)
    assert curriculum.sampler.estimator == estimator
    assert curriculum.sampler.rule == rule
