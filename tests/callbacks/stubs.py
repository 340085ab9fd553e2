"""The smallest modules and data modules that callbacks can be attached to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lit_rl.curriculum import TaskSampler
from lit_rl.data.batch import PackedBatch
from lit_rl.data.collate import collate
from lit_rl.data.iteration import Iteration, IterationOptions, build_iteration
from lit_rl.trajectory import Trajectory


class StubModule(LightningModule):
    """One weight; log-probabilities are the sampler's, changed by `shift`."""

    def __init__(self, shift: Callable[[Tensor, PackedBatch], Tensor] = lambda log_probs, batch: log_probs) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.shift = shift

    def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        result = {"loss": self.weight.sum()}
        if batch.sampler_log_probs is not None:
            result["log_probs"] = self.shift(batch.sampler_log_probs.clone(), batch)
        return result

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class StubDataModule(LightningDataModule):
    """Plans an iteration per epoch from `make(epoch)`, like `PackedDataModule` but for one process."""

    def __init__(self, make: Callable[[int], Sequence[Trajectory]], **options: Any) -> None:
        super().__init__()
        self.make = make
        self.options = IterationOptions(**({"max_tokens": 16} | options))
        self.iteration: Iteration | None = None

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        self.iteration = build_iteration(self.make(epoch), epoch, self.options)
        plan = self.iteration.plan
        self.trainer.accumulate_grad_batches = plan.microbatches_per_step
        return loader([self.iteration.microbatch(indices) for indices in plan.for_rank(0)])


class RolloutDataModule(LightningDataModule):
    """Draws and observes tasks in `train_dataloader`, and does it again only for an iteration it has not made."""

    def __init__(self, task_ids: Sequence[str], count: int, rewards: Callable[[str, int], list[float]]) -> None:
        super().__init__()
        self.rollouts = SimpleNamespace(task_sampler=TaskSampler(task_ids), group_size=4, dynamic_sampling=None)
        self.count, self.rewards = count, rewards
        self.drawn: dict[int, list[str]] = {}
        self.made = -1

    def train_dataloader(self) -> DataLoader:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        if epoch > self.made:
            self.made = epoch
            self.drawn[epoch] = self.rollouts.task_sampler.sample(self.count, iteration=epoch)
            for task_id in self.drawn[epoch]:
                self.rollouts.task_sampler.observe(task_id, self.rewards(task_id, epoch))
        return loader([collate([attempt(1.0)]) for _ in range(4)])

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = state_dict["made"]


def attempt(reward: float | None, *, length: int = 5, prompt: int = 2, **fields: Any) -> Any:
    """A trajectory whose tokens after the prompt are scored; sampled with log-probability -1 each."""
    mask = [position >= prompt for position in range(length)]
    return Trajectory(list(range(1, length + 1)), mask, reward, log_probs=[-1.0] * length, **fields)


def group(name: str, rewards: Sequence[float | None], **fields: Any) -> list[Trajectory]:
    """A whole group of attempts."""
    return [attempt(reward, group=name, task=name, **fields) for reward in rewards]


def loader(batches: Sequence[Any]) -> DataLoader:
    """Yields the given objects one by one."""
    return DataLoader(list(batches), batch_size=None, shuffle=False)  # type: ignore[arg-type]
