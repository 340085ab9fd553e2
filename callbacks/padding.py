"""Accounts for every computed position: what was padding, prompt, scored, live."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from typing_extensions import override

from lit_rl.data.iteration import Iteration, iteration_of
from lit_rl.metrics import Counts, PaddingCounts
from lit_rl.monitoring import log_reduced, packed_batch


class PaddingMonitor(Callback):
    """Logs what the positions of an iteration's microbatches were spent on, over all ranks.

    With a `PackedDataModule` the plan is read, which is the same on every rank, so nothing is communicated. With a
    loader of your own that yields `PackedBatch`, the microbatches are counted and summed over ranks at every
    optimizer step; what a microbatch does not tell (marked *) is then left out.

    Logged once per iteration, in positions unless said otherwise:

    | name under `padding/` | meaning |
    |---|---|
    | `positions` | computed, by all ranks: real tokens, padding and fillers |
    | `real`, `prompt`, `scored`, `live` | real = prompt (read, not scored) + scored; live is the part of scored with \
an advantage |
    | `filler` | microbatches of one token that keep ranks in step |
    | `truncated`* | real tokens of trajectories that were cut by a limit |
    | `skipped`* | tokens of collected trajectories that were not computed, having no gradient (or being dropped) |
    | `share` | padding and fillers over positions |
    | `fullest_share` | fullest microbatch over the token budget |
    | `padded_layout_positions`, `padded_layout_share` | the same trajectories as one padded batch per step |
    | `length_min`*, `length_mean`*, `length_max`* | tokens per collected trajectory, masked ones included |
    | `truncated_share`* | share of collected trajectories cut by a limit |

    Raises:
        MisconfigurationException: A loader of your own yields something else than `PackedBatch`.

    Example:
        >>> monitor = PaddingMonitor()
    """

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._window = PaddingCounts()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # An interrupted run leaves an iteration unfinished.
        self._counts = {}
        self._window.reset()
        if trainer.world_size > 1:  # where the collectives run
            self._window.to(trainer.strategy.root_device)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if iteration_of(trainer) is None:
            self._window.update(packed_batch(batch, "PaddingMonitor"))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if iteration_of(trainer) is None:
            self._count_window()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        iteration = iteration_of(trainer)
        if iteration is None:
            self._count_window()
            figures = PaddingCounts.figures(self._counts)
            figures.pop("truncated")
        else:
            figures = PaddingCounts.figures(count_plan(iteration)) | _lengths(iteration)
        metrics = {f"padding/{name}": value for name, value in figures.items()}
        log_reduced(pl_module, metrics)
        self._counts = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"counts": dict(self._counts)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._counts = dict(state_dict["counts"])

    def _count_window(self) -> None:
        self._counts = PaddingCounts.merge(self._counts, PaddingCounts.settle_step(self._window.drain()))


def count_plan(iteration: Iteration) -> Counts:
    """Counts the positions of an iteration's plan over all steps, ranks and microbatches.

    Args:
        iteration: With its plan.

    Returns:
        The counts that `PaddingCounts.figures` reads.
    """
    live, truncated = iteration.live.tolist(), iteration.truncated.tolist()
    total: Counts = {}
    for ranks in iteration.plan.microbatches:
        step: Counts = {}
        for indices in (indices for microbatches in ranks for indices in microbatches):
            step = PaddingCounts.merge(step, _count_microbatch(iteration, indices, live, truncated))
        total = PaddingCounts.merge(total, PaddingCounts.settle_step(step))
    return total


def _count_microbatch(
    iteration: Iteration, indices: tuple[int, ...], live: list[bool], truncated: list[bool]
) -> Counts:
    budget = float(iteration.plan.max_tokens)
    if not indices:
        return {"positions": 1, "filler": 1, "fullest": 1, "budget": budget}
    lengths = [iteration.lengths[index] for index in indices]
    real, longest = sum(lengths), max(lengths)
    positions = real if iteration.layout == "packed" else longest * len(lengths)
    scored = sum(iteration.scored_counts[index] for index in indices)
    return {
        "positions": positions,
        "real": real,
        "prompt": real - scored,
        "scored": scored,
        "live": sum(iteration.scored_counts[index] for index in indices if live[index]),
        "truncated": sum(iteration.lengths[index] for index in indices if truncated[index]),
        "trajectories": len(lengths),
        "longest": longest,
        "fullest": positions,
        "budget": budget,
    }


def _lengths(iteration: Iteration) -> Counts:
    lengths, kept = iteration.lengths, set(iteration.kept)
    if not lengths:
        return {}
    return {
        "length_min": float(min(lengths)),
        "length_mean": sum(lengths) / len(lengths),
        "length_max": float(max(lengths)),
        "skipped": float(sum(length for index, length in enumerate(lengths) if index not in kept)),
        "truncated_share": float(iteration.truncated.double().mean()),
    }
