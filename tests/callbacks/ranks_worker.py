"""What each of two processes runs for `test_ranks.py`; rank 0 prints one line of JSON with both ranks' results."""

from __future__ import annotations

import json
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from lit_rl.callbacks import (
    PaddingMonitor,
    PassRateCurriculum,
    SamplerRatioMonitor,
    TokenThroughputMonitor,
    ZeroAdvantageMonitor,
)
from lit_rl.data.batch import PackedBatch
from lit_rl.data.collate import collate, filler_batch
from lit_rl.metrics import TokenMean, ZeroAdvantageCounts
from lit_rl.strategies import gather_over_ranks
from lit_rl.throughput import ModelShape
from tests.callbacks.stubs import RolloutDataModule, StubModule, attempt, loader
from tests.distributed.launch import leave
from tests.helpers import quiet_trainer


def metrics_over_ranks(rank: int) -> dict[str, float]:
    """Metrics whose ranks hold different amounts."""
    mean = TokenMean()
    mean.update(torch.full((10,), 1.0) if rank == 0 else torch.full((30,), 2.0))
    zero = ZeroAdvantageCounts()
    zero.update(
        live=[rank == 1] * 4,
        lengths=[3] * 4,
        scored_counts=[1] * 4,
        groups=[f"{rank} first", f"{rank} first", f"{rank} second", f"{rank} second"],
        rewards=[1.0, 1.0, 0.0, 0.0] if rank == 0 else [1.0, 0.0, 1.0, 0.0],
    )
    return {"entropy": mean.compute().item(), **zero.compute()}


def batches_of(rank: int) -> list[PackedBatch]:
    """Two microbatches per rank: 30 and 10 scored tokens on rank 0, 60 and none on rank 1."""
    if rank == 0:
        first = collate([attempt(1.0, length=31, prompt=1)], advantages=[0.0], max_tokens=64)
        return [first, collate([attempt(1.0, length=11, prompt=1)], advantages=[1.0], max_tokens=64)]
    return [collate([attempt(1.0, length=61, prompt=1)], advantages=[1.0], max_tokens=64), filler_batch(max_tokens=64)]


def monitors_over_ranks() -> dict[str, float]:
    """The monitors on a loader of one's own, which no rank sees the whole of."""

    class Module(StubModule):
        def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, torch.Tensor]:
            # Rank 0's tokens are off by half a nat; rank 1's agree.
            self.shift = lambda log_probs, _: log_probs - 0.5 * (self.global_rank == 0)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        max_epochs=2,
        callbacks=[PaddingMonitor(), SamplerRatioMonitor(), ZeroAdvantageMonitor()],
    )
    trainer.fit(Module(), loader(batches_of(trainer.global_rank)))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def iterations_over_ranks() -> dict[str, float]:
    """The callbacks that follow iterations, which every rank sees the whole of."""
    shape = ModelShape.decoder(hidden=8, layers=1, vocabulary=10, feed_forward=16, query_heads=2)
    trainer = quiet_trainer(
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,
        max_epochs=2,
        callbacks=[PassRateCurriculum(), TokenThroughputMonitor(shape, peak_tflops=1e-6)],
        reload_dataloaders_every_n_epochs=1,
    )
    data = RolloutDataModule(["a", "b", "c"], 2, lambda task_id, epoch: [1.0, 0.0, 0.0])
    trainer.fit(StubModule(), datamodule=data)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def main() -> None:
    """Prints the results of both ranks."""
    found: dict[str, Any] = {"monitors": monitors_over_ranks(), "iterations": iterations_over_ranks()}
    found["metrics"] = metrics_over_ranks(torch.distributed.get_rank())
    results: list[Any] = gather_over_ranks(found)
    rank = torch.distributed.get_rank()
    if rank == 0:
        print("RESULTS " + json.dumps(results), flush=True)
    leave()


if __name__ == "__main__":
    main()
