"""What the monitors share: logging numbers that every rank already has, and the kind of batch they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from lit_rl.data.batch import PackedBatch


class ReducedNumber(Metric):
    """A number that is the same on every rank already.

    Lightning reduces plain numbers itself, or recommends on every epoch that it should; a metric it leaves alone. The
    number stays a Python float, so nothing is rounded or moved to a device.

    Example:
        >>> number = ReducedNumber()
        >>> number.update(0.1)
        >>> number.compute().item()
        0.1
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.number = float("nan")

    def update(self, number: float) -> None:
        """Takes the number."""
        self.number = float(number)

    def compute(self) -> Tensor:
        """The number as a float64 scalar."""
        return torch.tensor(self.number, dtype=torch.float64)


def log_reduced(module: LightningModule, metrics: Mapping[str, float]) -> None:
    """Logs numbers of an iteration that are equal on all ranks, without a collective.

    Args:
        module: Whose `log` is called; inside a hook that allows `on_epoch`.
        metrics: Name to number.
    """
    for name, value in metrics.items():
        number = ReducedNumber()
        number.update(value)
        module.log(name, number, on_step=False, on_epoch=True, batch_size=1, metric_attribute=name)


def packed_batch(batch: Any, reader: str) -> PackedBatch:
    """The batch, where it is one that a monitor can read.

    Args:
        batch: What the loader gave.
        reader: Name of the callback, for the message.

    Returns:
        The same object.

    Raises:
        MisconfigurationException: It is something else.

    Example:
        >>> packed_batch([1, 2], "PaddingMonitor")
        Traceback (most recent call last):
        ...
        lightning.fabric.utilities.exceptions.MisconfigurationException: `PaddingMonitor` reads PackedBatch \
microbatches, got list; use `PackedDataModule`, or build your batches with `lit_rl.collate`
    """
    if not isinstance(batch, PackedBatch):
        raise MisconfigurationException(
            f"`{reader}` reads PackedBatch microbatches, got {type(batch).__name__}; use `PackedDataModule`, or build "
            "your batches with `lit_rl.collate`"
        )
    return batch
