"""Says how much of what was collected can give no gradient, and why."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lit_rl.curriculum.signal import outcome_of
from lit_rl.data.iteration import Iteration, iteration_of
from lit_rl.metrics import Counts, ZeroAdvantageCounts
from lit_rl.monitoring import log_reduced, packed_batch


class ZeroAdvantageMonitor(Callback):
    """Logs the shares with zero advantage, counts wasted episodes, and warns once when most rollouts teach nothing.

    With a `PackedDataModule`, whose iterations are the same on every rank, nothing is communicated. With a loader of
    your own that yields `PackedBatch`, the microbatches are counted and summed over ranks at every optimizer step;
    groups are then unknown, and a wasted episode is a trajectory with zero advantage.

    Logged once per iteration:

    | name under `zero_advantage/` | meaning |
    |---|---|
    | `groups` | share of groups without a live trajectory |
    | `trajectories`, `scored_tokens`, `positions` | shares that belong to trajectories which are not live |
    | `all_pass`, `all_fail`, `equal_partial` | share of groups not live because every reward is at least `threshold`, \
at most 0, or equal in between |
    | `all_pass_by_outcome`, `all_fail_by_outcome` | share of groups that are trained, because their shaped rewards \
differ, although every attempt passed or failed by `info["outcome"]`; only where outcomes are given |
    | `unscored`, `masked` | share of groups not live because no reward is known, or no token enters the loss |
    | `truncated` | share of the trajectories that are not live which were cut by a length limit |
    | `episodes_wasted` | trajectories in groups that are not live, since the start |

    An on-policy loss of 0 is normal: advantages of a group sum to 0. It is these shares that tell a dead run.

    Args:
        share: Warn when the zero-advantage share of groups stays above this, in [0, 1].
        patience: For this many iterations in a row, at least 1.
        threshold: Reward, or `info["outcome"]` where an environment gives it, from which an attempt counts as passed.

    Raises:
        ValueError: `share` or `patience` is out of range.
        MisconfigurationException: A loader of your own yields something else than `PackedBatch`.

    Example:
        >>> monitor = ZeroAdvantageMonitor(share=0.9, patience=20)
    """

    def __init__(self, share: float = 0.8, patience: int = 10, threshold: float = 1.0) -> None:
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"`share` must lie in [0, 1], got {share!r}")
        if patience < 1:
            raise ValueError(f"`patience` must be at least 1 iteration, got {patience!r}")
        self.share, self.patience, self.threshold = share, patience, threshold
        self.episodes_wasted = 0
        self._counted = -1
        self._streak = 0
        self._warned = False
        self._counts: Counts = {}
        self._window = ZeroAdvantageCounts()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._counted = -1
        self._counts = {}
        self._window.reset()
        if trainer.world_size > 1:  # where the collectives run
            self._window.to(trainer.strategy.root_device)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        iteration = iteration_of(trainer)
        if iteration is not None:
            self._count_iteration(iteration)
        else:
            self._window.update_batch(packed_batch(batch, "ZeroAdvantageMonitor"))

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if iteration_of(trainer) is None:
            self._count_window()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        iteration = iteration_of(trainer)
        if iteration is None:
            self._count_window()
        else:
            self._count_iteration(iteration)
        shares = ZeroAdvantageCounts.figures(self._counts)
        self._warn(shares)
        metrics = {f"zero_advantage/{name}": value for name, value in shares.items()}
        metrics["zero_advantage/episodes_wasted"] = float(self.episodes_wasted)
        log_reduced(pl_module, metrics)
        if iteration is None:
            self._counts = {}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "episodes_wasted": self.episodes_wasted,
            "counted": self._counted,
            "streak": self._streak,
            "warned": self._warned,
            "counts": dict(self._counts),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.episodes_wasted = state_dict["episodes_wasted"]
        self._counted, self._streak = state_dict["counted"], state_dict["streak"]
        self._warned, self._counts = state_dict["warned"], dict(state_dict["counts"])

    def _count_iteration(self, iteration: Iteration) -> None:
        # By index: a resumed epoch has been counted before it was saved, and may not begin or end with a hook.
        if iteration.index == self._counted:
            return
        self._counted = iteration.index
        metric = ZeroAdvantageCounts(sync_on_compute=False)
        metric.update(
            live=iteration.live.tolist(),
            lengths=iteration.lengths,
            scored_counts=iteration.scored_counts,
            groups=iteration.groups,
            rewards=iteration.rewards.tolist(),
            outcomes=[outcome_of(trajectory.info) for trajectory in iteration.trajectories],
            truncated=iteration.truncated.tolist(),
            threshold=self.threshold,
        )
        self._counts = metric.drain()
        living = {group for group, live in zip(iteration.groups, iteration.live.tolist(), strict=True) if live}
        self.episodes_wasted += sum(group not in living for group in iteration.groups)

    def _count_window(self) -> None:
        drained = self._window.drain()
        self.episodes_wasted += int(drained["dead_trajectories"])
        self._counts = ZeroAdvantageCounts.merge(self._counts, drained)

    def _warn(self, shares: Counts) -> None:
        share = shares.get("groups", shares.get("trajectories", 0.0))
        self._streak = self._streak + 1 if share > self.share else 0
        if self._streak < self.patience or self._warned:
            return
        self._warned = True
        rank_zero_warn(
            f"more than {self.share:.0%} of the groups had zero advantage in each of the last {self._streak} "
            f"iterations (now {share:.0%}): their rollouts give no gradient. {_advice(shares)}"
        )


def _advice(shares: Counts) -> str:
    if shares.get("truncated", 0.0) > 0.5:
        return (
            f"{shares['truncated']:.0%} of these trajectories were cut by a length limit before they could earn a "
            "reward: raise `max_new_tokens` (or the limits of turns and trajectory tokens), or shorten the prompts"
        )
    if shares.get("all_fail", 0.0) > shares.get("all_pass", 0.0):
        return (
            f"{shares['all_fail']:.0%} of the groups failed in every attempt: give easier tasks, larger groups or "
            "partial credit, or check the reward; `PassRateCurriculum` stops sampling hopeless tasks"
        )
    if shares.get("all_pass", 0.0) > 0:
        return (
            f"{shares['all_pass']:.0%} of the groups passed in every attempt: give harder tasks, or add "
            "`PassRateCurriculum`, which stops sampling solved ones"
        )
    return "Check that rewards differ within a group"
