"""PaddingMonitor: the plan's account is that of the microbatches it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl.callbacks import PaddingMonitor
from lit_rl.callbacks.padding import count_plan
from lit_rl.data.collate import collate, filler_batch
from lit_rl.data.iteration import IterationOptions, build_iteration
from lit_rl.metrics import PaddingCounts
from tests.callbacks.stubs import StubDataModule, StubModule, attempt, group, loader
from tests.helpers import quiet_trainer, random_trajectories


def fit(data: Any, epochs: int = 1, **arguments: Any) -> dict[str, float]:
    trainer = quiet_trainer(max_epochs=epochs, callbacks=[PaddingMonitor()], **arguments)
    if isinstance(data, StubDataModule):
        trainer.fit(StubModule(), datamodule=data)
    else:
        trainer.fit(StubModule(), data)
    return {name.removeprefix("padding/"): value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("world_size", "num_steps", "loss_on"), [(1, 1, "live"), (3, 2, "scored"), (4, 1, "live")])
def test_the_plan_counts_what_its_microbatches_hold(layout: Any, world_size: int, num_steps: int, loss_on: Any) -> None:
    trajectories = random_trajectories(16, seed=1)
    options = IterationOptions(
        max_tokens=24, layout=layout, world_size=world_size, num_steps=num_steps, loss_on=loss_on
    )
    iteration = build_iteration(trajectories, 0, options)
    total: dict[str, float] = {}
    metric = PaddingCounts()
    for step in iteration.plan.microbatches:
        for indices in (indices for rank in step for indices in rank):
            metric.update(iteration.microbatch(indices))
        total = PaddingCounts.merge(total, PaddingCounts.settle_step(metric.drain()))
    planned = PaddingCounts.figures(count_plan(iteration))
    seen = PaddingCounts.figures(total)
    planned.pop("truncated"), seen.pop("truncated")
    assert planned == seen
    assert planned["positions"] > 0


def test_an_iteration_in_numbers() -> None:
    trajectories = group("a", [1.0, 0.0], length=8) + group("b", [0.0, 0.0], length=3, truncated=True)
    metrics = fit(StubDataModule(lambda epoch: trajectories, max_tokens=16))
    expected = {"positions": 16, "real": 16, "prompt": 4, "scored": 12, "live": 12, "filler": 0, "truncated": 0}
    expected |= {"share": 0.0, "fullest_share": 1.0, "padded_layout_positions": 16, "padded_layout_share": 0.0}
    expected |= {"skipped": 6, "length_min": 3, "length_mean": 5.5, "length_max": 8, "truncated_share": 0.5}
    assert metrics == pytest.approx(expected)


def test_lengths_survive_masking() -> None:
    trajectories = [attempt(1.0, length=3, group="a"), attempt(0.0, length=8, group="a", truncated=True)]
    data = StubDataModule(lambda epoch: trajectories, truncated="mask", loss_on="scored")
    metrics = fit(data)
    assert (metrics["length_min"], metrics["length_max"], metrics["length_mean"]) == (3, 8, 5.5)
    assert metrics["truncated_share"] == 0.5
    assert metrics["scored"] == 1


def test_truncated_tokens_of_what_is_computed() -> None:
    trajectories = [attempt(1.0, length=3, group="a"), attempt(0.0, length=8, group="a", truncated=True)]
    assert fit(StubDataModule(lambda epoch: trajectories))["truncated"] == 8


def test_an_own_loader_is_counted_per_epoch() -> None:
    batches = [
        collate([attempt(1.0)], rows=[[0]], row_tokens=8, max_tokens=16, advantages=[0.0]),
        collate([attempt(1.0, length=3)], advantages=[1.0]),
        filler_batch(),
    ]
    metrics = fit(loader(batches), epochs=2, accumulate_grad_batches=2)
    expected = {"positions": 12, "real": 8, "prompt": 4, "scored": 4, "live": 1, "filler": 1, "share": 1 / 3}
    expected |= {"fullest_share": 0.5, "padded_layout_positions": 10, "padded_layout_share": 0.2}
    assert metrics == pytest.approx(expected)


def test_a_loader_of_something_else_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`PaddingMonitor` reads PackedBatch .* got Tensor"):
        fit(loader([torch.zeros(2)]))


def test_what_an_interrupted_run_counted_is_not_in_the_next() -> None:
    monitor = PaddingMonitor()
    monitor._window.update(collate([attempt(1.0)]))
    monitor._counts = {"real": 5.0}
    trainer = quiet_trainer(callbacks=[monitor])
    trainer.fit(StubModule(), loader([collate([attempt(1.0, length=3)])]))
    assert trainer.callback_metrics["padding/real"].item() == 3


def test_two_accumulated_sums_survive_a_checkpoint() -> None:
    first, second = PaddingMonitor(), PaddingMonitor()
    first._window.update(collate([attempt(1.0)]))
    first._count_window()
    second.load_state_dict(first.state_dict())
    assert second._counts == first._counts
    assert second._counts["real"] == 5
