"""SamplerRatioMonitor: the first step only, all its microbatches, one warning."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lit_rl.callbacks import SamplerRatioMonitor
from lit_rl.data.batch import PackedBatch
from lit_rl.data.collate import collate, filler_batch
from lit_rl.trajectory import Trajectory
from tests.callbacks.stubs import StubDataModule, StubModule, attempt, group, loader
from tests.helpers import quiet_trainer

# 100 scored tokens in one microbatch, then 300 in a second one
BATCHES = [
    collate([attempt(1.0, length=101, prompt=1)], advantages=[1.0]),
    collate([attempt(1.0, length=151, prompt=1)] * 2, advantages=[1.0, 1.0]),
]


def fit(module: StubModule, batches: Any = BATCHES, epochs: int = 1, **arguments: Any) -> tuple[dict, list[str]]:
    monitor = arguments.pop("monitor", None) or SamplerRatioMonitor()
    settings = {"max_epochs": epochs, "callbacks": [monitor], "accumulate_grad_batches": 2} | arguments
    trainer = quiet_trainer(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(batches, StubDataModule):
            trainer.fit(module, datamodule=batches)
        else:
            trainer.fit(module, loader(batches))
    metrics = {name.removeprefix("sampler_ratio/"): value.item() for name, value in trainer.callback_metrics.items()}
    return metrics, [str(w.message) for w in caught if "trainer/sampler ratio" in str(w.message)]


def off(share: float, by: float = 1.0) -> Any:
    """Moves the log-probabilities of the first `share` of each microbatch's tokens."""

    def shift(log_probs: Tensor, batch: PackedBatch) -> Tensor:
        log_probs[: round(share * log_probs.numel())] -= by
        return log_probs

    return shift


def test_agreement_gives_zero_and_no_warning() -> None:
    metrics, messages = fit(StubModule())
    assert messages == []
    assert (metrics["outside_20_percent"], metrics["max"], metrics["kl"], metrics["tokens"]) == (0, 0, 0, 400)


def test_all_microbatches_of_the_step_weigh_by_their_tokens() -> None:
    # 8% of 100 and of 300 tokens
    metrics, messages = fit(StubModule(off(0.08)))
    assert metrics["outside_20_percent"] == pytest.approx(32 / 400)
    assert metrics["max"] == 1.0
    assert metrics["kl"] == pytest.approx(0.08 * (math.exp(-1) - 1 + 1), rel=1e-5)
    assert len(messages) == 1
    assert messages[0].index("packing leak") < messages[0].index("temperature") < messages[0].index("precision")


def test_only_the_first_step_is_measured() -> None:
    # the policy moves with every step, as it should
    class Moving(StubModule):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
            self.shift = off(1.0, by=float(self.trainer.global_step))
            return super().training_step(batch, batch_idx)

    metrics, messages = fit(Moving(), BATCHES * 3)
    assert metrics["tokens"] == 400
    assert metrics["outside_20_percent"] == 0.0
    assert messages == []


def test_one_warning_per_run() -> None:
    data = StubDataModule(lambda epoch: group("a", [1.0, 0.0]))
    data.rollouts = SimpleNamespace()  # type: ignore[attr-defined]
    _, messages = fit(StubModule(off(1.0)), data, epochs=5)
    assert len(messages) == 1


def test_a_fixed_data_set_is_judged_in_its_first_iteration_only() -> None:
    class Later(StubModule):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
            self.shift = off(1.0 if self.trainer.current_epoch > 0 else 0.0)
            return super().training_step(batch, batch_idx)

    metrics, messages = fit(Later(), epochs=2)
    assert metrics["outside_20_percent"] == 1.0
    assert messages == []
    data = StubDataModule(lambda epoch: group("a", [1.0, 0.0]))
    data.rollouts = SimpleNamespace()  # type: ignore[attr-defined]
    assert len(fit(Later(), data, epochs=2, reload_dataloaders_every_n_epochs=1)[1]) == 1


def test_a_leak_is_told_by_the_place_in_the_row() -> None:
    def leak(log_probs: Tensor, batch: PackedBatch) -> Tensor:
        return torch.where(batch.segment_starts[batch.scored_segments] == 0, log_probs, log_probs - 1.0)

    metrics, messages = fit(StubModule(leak))
    assert (metrics["outside_first"], metrics["outside_later"]) == (0.0, 1.0)
    assert "likely here" in messages[0]


def test_a_cut_distribution_is_warned_about() -> None:
    # What top-p 0.95 does to the sampler's log-probabilities.
    metrics, messages = fit(StubModule(lambda log_probs, batch: log_probs + math.log(0.95)))
    assert metrics["outside_20_percent"] == 0.0
    assert metrics["mean_ratio"] == pytest.approx(0.95)
    assert "(1) cut distribution (top-p, top-k)" in messages[0]


def test_fillers_and_unscored_microbatches_are_fine() -> None:
    metrics, _ = fit(StubModule(), [BATCHES[0], filler_batch()])
    assert metrics["tokens"] == 100
    metrics, _ = fit(StubModule(), [filler_batch(), filler_batch()])
    assert metrics["tokens"] == 0


def test_a_resumed_iteration_is_not_measured_after_its_first_step(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(callbacks=[SamplerRatioMonitor(), saver], enable_checkpointing=True)
    trainer.fit(StubModule(off(1.0)), loader(BATCHES * 2))
    resumed = quiet_trainer(callbacks=[SamplerRatioMonitor()], max_epochs=1)
    resumed.fit(StubModule(off(1.0)), loader(BATCHES * 2), ckpt_path=tmp_path / "step=1.ckpt")
    assert not [name for name in resumed.callback_metrics if name.startswith("sampler_ratio")]


def test_what_is_missing_is_named() -> None:
    class Bare(StubModule):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:  # type: ignore[override]
            return self.weight.sum()

    with pytest.raises(MisconfigurationException, match=r'return `\{"loss": loss, "log_probs"'):
        fit(Bare())
    without = collate([Trajectory([1, 2, 3], [0, 1, 1], 1.0)])

    class Given(StubModule):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
            return {"loss": self.weight.sum(), "log_probs": torch.zeros(2)}

    with pytest.raises(MisconfigurationException, match="trajectories have no `log_probs`"):
        fit(Given(), [without])
    with pytest.raises(ValueError, match="allowed_share"):
        SamplerRatioMonitor(allowed_share=-0.1)
