"""ZeroAdvantageMonitor with a planned iteration, and with a loader of the user's own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl.callbacks import ZeroAdvantageMonitor
from lit_rl.data.collate import collate, filler_batch
from tests.callbacks.stubs import StubDataModule, StubModule, attempt, group, loader
from tests.helpers import quiet_trainer

DEAD = group("a", [1.0, 1.0]) + group("b", [0.0, 0.0])
MIXED = DEAD + group("c", [1.0, 0.0]) + group("d", [0.5, 0.5])


def fit(monitor: ZeroAdvantageMonitor, make: Any, epochs: int = 1, **arguments: Any) -> dict[str, float]:
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[monitor, *arguments.pop("callbacks", [])], **arguments)
    trainer.reload_dataloaders_every_n_epochs = 1
    options = {"loss_on": "scored", "missing_rewards": "ignore"}
    trainer.fit(StubModule(), datamodule=StubDataModule(make, **options))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_shares_and_reasons() -> None:
    metrics = fit(ZeroAdvantageMonitor(), lambda epoch: MIXED)
    expected = {"groups": 0.75, "all_pass": 0.25, "all_fail": 0.25, "equal_partial": 0.25, "unscored": 0.0}
    expected |= {"trajectories": 0.75, "scored_tokens": 0.75, "positions": 0.75, "episodes_wasted": 6.0}
    expected |= {"truncated": 0.0, "masked": 0.0}
    assert metrics == pytest.approx({f"zero_advantage/{name}": value for name, value in expected.items()})


def test_all_equal_rewards_are_a_share_of_one() -> None:
    metrics = fit(ZeroAdvantageMonitor(), lambda epoch: group("a", [1.0] * 4) + group("b", [0.0] * 4))
    assert metrics["zero_advantage/groups"] == metrics["zero_advantage/trajectories"] == 1.0


def test_unscored_groups_are_wasted_too() -> None:
    metrics = fit(ZeroAdvantageMonitor(), lambda epoch: group("a", [None, None]) + group("b", [1.0, 0.0]))
    assert metrics["zero_advantage/unscored"] == 0.5
    assert metrics["zero_advantage/episodes_wasted"] == 2.0


def test_a_group_of_one_is_without_signal() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = fit(ZeroAdvantageMonitor(), lambda epoch: group("a", [0.7]) + group("b", [1.0, 0.0]))
    assert metrics["zero_advantage/groups"] == 0.5
    assert metrics["zero_advantage/equal_partial"] == 0.5


def warnings_of(monitor: ZeroAdvantageMonitor, make: Any, epochs: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(monitor, make, epochs)
    return [str(warning.message) for warning in caught if "zero advantage" in str(warning.message)]


def test_one_warning_when_the_share_stays_high() -> None:
    messages = warnings_of(ZeroAdvantageMonitor(share=0.7, patience=3), lambda epoch: MIXED, 8)
    assert len(messages) == 1
    assert "in each of the last 3 iterations (now 75%)" in messages[0]
    assert warnings_of(ZeroAdvantageMonitor(share=0.75, patience=3), lambda epoch: MIXED, 8) == []


def test_the_share_has_to_stay_high_in_a_row() -> None:
    live = group("a", [1.0, 0.0])
    assert warnings_of(ZeroAdvantageMonitor(patience=3), lambda epoch: live if epoch % 3 == 2 else DEAD, 8) == []


@pytest.mark.parametrize(
    ("rewards", "truncated", "words"),
    [
        ([0.0, 0.0], True, "length limit"),
        ([0.0, 0.0], False, "easier tasks"),
        ([1.0, 1.0], False, "PassRateCurriculum"),
        ([0.5, 0.5], False, "rewards differ"),
    ],
)
def test_the_warning_says_what_to_do(rewards: list[float], truncated: bool, words: str) -> None:
    make = lambda epoch: group("a", rewards, truncated=truncated) * 2  # noqa: E731
    (message,) = warnings_of(ZeroAdvantageMonitor(patience=20), make, 20)
    assert words in message


def test_all_truncated_is_logged() -> None:
    metrics = fit(ZeroAdvantageMonitor(), lambda epoch: group("a", [0.0] * 4, truncated=True))
    assert metrics["zero_advantage/groups"] == metrics["zero_advantage/truncated"] == 1.0


@pytest.mark.parametrize("cadence", [{"every_n_train_steps": 1}, {"every_n_epochs": 1}])
def test_wasted_episodes_are_counted_once_over_any_stop(cadence: dict, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", save_top_k=-1, **cadence)
    through = ZeroAdvantageMonitor(patience=4)
    options = {"loss_on": "scored", "num_steps": 2}

    def run(monitor: ZeroAdvantageMonitor, callbacks: list, **arguments: Any) -> None:
        trainer = quiet_trainer(max_epochs=4, callbacks=[monitor, *callbacks], enable_checkpointing=True)
        trainer.reload_dataloaders_every_n_epochs = 1
        trainer.fit(StubModule(), datamodule=StubDataModule(lambda epoch: MIXED * 2, **options), **arguments)

    run(through, [saver])
    saved = sorted(tmp_path.glob("*.ckpt"))
    assert len(saved) >= 4
    for path in saved:
        resumed = ZeroAdvantageMonitor(patience=4)
        run(resumed, [ModelCheckpoint(tmp_path / "other")], ckpt_path=path)
        assert resumed.episodes_wasted == through.episodes_wasted == 4 * 12, path.name


def test_shaped_groups_that_fail_by_outcome_are_counted_apart() -> None:
    def shaped(name: str, rewards: list[float], outcomes: list[float | None]) -> list[Any]:
        found = zip(rewards, outcomes, strict=True)
        return [attempt(r, group=name, task=name, info={} if o is None else {"outcome": o}) for r, o in found]

    groups = shaped("a", [0.1, 0.0], [0.0, None]) + shaped("b", [0.9, 1.0], [1.0, 1.0])
    groups += shaped("c", [0.3, 0.3], [0.0, 0.0]) + shaped("d", [0.3, 1.0], [0.0, 1.0]) + group("e", [1.0, 0.0])
    metrics = fit(ZeroAdvantageMonitor(), lambda epoch: groups)
    shares = {name.removeprefix("zero_advantage/"): value for name, value in metrics.items()}
    assert shares["all_fail_by_outcome"] == shares["all_pass_by_outcome"] == pytest.approx(0.2)
    # Those are trained; only the group of equal rewards is not, and its outcomes say why.
    assert shares["groups"] == shares["all_fail"] == pytest.approx(0.2)
    assert shares["all_pass"] == shares["equal_partial"] == shares["masked"] == 0.0


def test_a_loader_of_something_else_is_refused() -> None:
    class Module(StubModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.weight.sum()

    with pytest.raises(MisconfigurationException, match=r"`ZeroAdvantageMonitor` reads PackedBatch .* got Tensor"):
        quiet_trainer(callbacks=[ZeroAdvantageMonitor()]).fit(Module(), loader([torch.zeros(2)]))


def test_an_own_loader_is_counted_by_trajectory() -> None:
    batches = [
        collate([attempt(1.0), attempt(0.0, length=3)], advantages=[0.0, 0.5]),
        collate([attempt(1.0, length=2)], advantages=[0.0]),
        filler_batch(),
    ]
    monitor = ZeroAdvantageMonitor()
    trainer = quiet_trainer(max_epochs=2, callbacks=[monitor], accumulate_grad_batches=2)
    trainer.fit(StubModule(), loader(batches))
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    expected = {"trajectories": 2 / 3, "scored_tokens": 3 / 4, "positions": 0.7, "episodes_wasted": 4.0}
    assert metrics == pytest.approx({f"zero_advantage/{name}": value for name, value in expected.items()})


def test_an_own_loader_is_counted_anew_in_every_epoch() -> None:
    class Module(StubModule):
        def train_dataloader(self) -> Any:
            advantage = float(self.trainer.current_epoch)  # 0 in the first epoch, 1 in the second
            return loader([collate([attempt(1.0)], advantages=[advantage])])

    monitor = ZeroAdvantageMonitor()
    trainer = quiet_trainer(max_epochs=2, callbacks=[monitor], reload_dataloaders_every_n_epochs=1)
    trainer.fit(Module())
    assert trainer.callback_metrics["zero_advantage/trajectories"].item() == 0.0
    assert monitor.episodes_wasted == 1


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`share`"):
        ZeroAdvantageMonitor(share=1.5)
    with pytest.raises(ValueError, match="`patience`"):
        ZeroAdvantageMonitor(patience=0)
