"""Trains with a default two-process Trainer and writes down what each rank and epoch saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lit_rl.data.sampler import TokenBudgetSampler

LENGTHS = [8, 3, 5, 8, 1, 2, 7, 4, 6, 8, 8]


class Indices(Dataset):
    """One microbatch per item: the indices themselves, -1 alone for a filler."""

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices or [-1])

    def __len__(self) -> int:
        return len(LENGTHS)


class Recorder(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder, self.seen = folder, []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append([self.current_epoch, batch.tolist()])
        return self.layer(batch[:, None].float()).sum()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Indices(), sampler=TokenBudgetSampler(LENGTHS, max_tokens=8), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_train_end(self) -> None:
        length = len(self.trainer.train_dataloader)
        report = {"seen": self.seen, "length": length, "steps": self.trainer.global_step}
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    pl.Trainer(devices=2, accelerator="cpu", strategy="ddp_fork", max_epochs=2, default_root_dir=target).fit(
        Recorder(target)
    )
