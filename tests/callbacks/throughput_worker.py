"""What one or two processes run for `test_throughput.py`; rank 0 prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys

from lightning.pytorch.strategies import DDPStrategy

from lit_rl.callbacks.throughput import TokenThroughputMonitor
from lit_rl.data.batch import collate
from tests.callbacks.stubs import StubModule, attempt, loader
from tests.callbacks.test_throughput import SHAPE, Ticks
from tests.helpers import quiet_trainer


def run(accumulate: int, world_size: int) -> dict[str, float]:
    """The same load on every rank: eight microbatches of 30 tokens, after a first step that is left out."""
    strategy = DDPStrategy(process_group_backend="gloo") if world_size > 1 else "auto"
    batches = [collate([attempt(1.0, length=30, prompt=10)], advantages=[1.0]) for _ in range(8 + accumulate)]
    ticks = Ticks()

    class Module(StubModule):
        def training_step(self, batch, batch_idx):
            ticks.pass_by(0.5)
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(
        devices=world_size,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        callbacks=[TokenThroughputMonitor(SHAPE, peak_tflops=1e-6, clock=ticks)],
    )
    trainer.fit(Module(), loader(batches))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def main() -> None:
    """Prints the metrics of rank 0."""
    metrics = run(int(sys.argv[1]), int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        print("RESULTS " + json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main()
