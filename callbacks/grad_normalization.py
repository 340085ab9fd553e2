"""Proof, on your own run, that the accumulated gradient is the gradient of the whole step."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lit_rl.checks.normalization import TOLERANCE, compare, take_gradients
from lit_rl.checks.verdict import Verdict
from lit_rl.data.iteration import Iteration, iteration_of
from lit_rl.policy.module import PolicyModule


class GradientNormalizationCheck(Callback):
    """Compares a step's gradient, as the Trainer accumulates it, with the sum over its trajectories one at a time.

    The reference uses neither the microbatches nor `training_step`: it is the sum over the step's trajectories of
    weight x objective, each in a pass of its own, with weights computed once on the whole step. The other side is
    what the optimizer is about to see after K microbatches on W ranks, before clipping. It finds a mean per
    microbatch, a mean per rank, a division too many or too few, a `training_step` that rescales, and an objective
    that depends on what else is in its microbatch.

    Costs one forward and backward pass over the step's trajectories and one copy of the gradient.

    Args:
        every_n_steps: 0 checks the first step of the fit only; n also every n-th optimizer step.
        tolerance: Largest relative error of the gradient that passes.
        action: "raise" stops the run on a failure, "warn" goes on.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> GradientNormalizationCheck(action="warn").every_n_steps
        0
    """

    def __init__(
        self, every_n_steps: int = 0, tolerance: float = TOLERANCE, action: Literal["raise", "warn"] = "raise"
    ) -> None:
        if every_n_steps < 0 or tolerance <= 0:
            raise ValueError(
                f"`every_n_steps` must be at least 0 and `tolerance` above 0, got {every_n_steps} and {tolerance}"
            )
        if action not in ("raise", "warn"):
            raise ValueError(f'`action` must be "raise" or "warn", got {action!r}')
        self.every_n_steps, self.tolerance, self.action = every_n_steps, tolerance, action
        self.verdict: Verdict | None = None
        self._reference: dict[str, Tensor] | None = None
        self._step = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        per_step = trainer.accumulate_grad_batches
        due = self.verdict is None or (self.every_n_steps > 0 and trainer.global_step % self.every_n_steps == 0)
        if not isinstance(pl_module, PolicyModule):
            raise MisconfigurationException(
                f"`GradientNormalizationCheck` needs a PolicyModule, got {type(pl_module).__name__}; for other modules "
                "use `lit_rl.check_normalization`"
            )
        if batch_idx % per_step != 0 or not due or _cuts_windows(trainer):
            return
        self._step = batch_idx // per_step
        self._reference = self._gradient(trainer, pl_module, lambda rank, k: 1.0)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._reference is None:
            return
        reference, self._reference = self._reference, None
        accumulated = take_gradients(pl_module)
        self.verdict = compare(accumulated, reference, {}, tolerance=self.tolerance)
        if not self.verdict.ok:
            self.verdict = self._explain(trainer, pl_module, accumulated, reference)
        if self.verdict.ok:
            rank_zero_info(f"gradient normalization: {self.verdict.message}")
        elif self.action == "raise":
            raise MisconfigurationException(self.verdict.message)
        else:
            rank_zero_warn(self.verdict.message)

    def _explain(
        self, trainer: Trainer, module: LightningModule, accumulated: dict[str, Tensor], reference: dict[str, Tensor]
    ) -> Verdict:
        iteration = _iteration(trainer)
        step = iteration.plan.microbatches[self._step]
        counts = [[sum(iteration.scored_counts[i] for i in microbatch) for microbatch in rank] for rank in step]
        total, ranks, per_step = sum(map(sum, counts)), len(step), len(step[0])
        before = {name: parameter.grad for name, parameter in module.named_parameters()}

        def by_microbatch(rank: int, k: int) -> float:
            return total / (ranks * per_step * max(counts[rank][k], 1))

        def by_rank(rank: int, k: int) -> float:
            return total / (ranks * max(sum(counts[rank]), 1))

        candidates = {
            "each microbatch takes the mean over its own tokens": self._gradient(trainer, module, by_microbatch),
            "each rank takes the mean over its own tokens": self._gradient(trainer, module, by_rank),
        }
        for name, parameter in module.named_parameters():
            parameter.grad = before[name]
        factors = [by_microbatch(r, k) for r in range(ranks) for k in range(per_step) if counts[r][k]]
        return compare(accumulated, reference, candidates, distortion=factors, tolerance=self.tolerance)

    def _gradient(self, trainer: Trainer, module: LightningModule, factor: Any) -> dict[str, Tensor]:
        """The step's gradient, one trajectory at a time; every rank computes all of them, so none has to be sent."""
        assert isinstance(module, PolicyModule)
        assert module.policy is not None
        iteration = _iteration(trainer)
        module.zero_grad(set_to_none=True)
        old = trainer.datamodule.old_log_probs_by_trajectory  # type: ignore[attr-defined]
        for rank, microbatches in enumerate(iteration.plan.microbatches[self._step]):
            for k, microbatch in enumerate(microbatches):
                for index in microbatch:
                    batch = iteration.microbatch([index], old).to(module.device)
                    with trainer.precision_plugin.train_step_context():
                        batch = module.with_reference(batch)
                        log_probs, entropy = module.policy(batch, entropy=module.entropy_bonus > 0)
                        loss = module.weighted_losses(batch, log_probs, entropy=entropy).sum() * factor(rank, k)
                    loss.backward()
        gradient = take_gradients(module)
        module.zero_grad(set_to_none=True)
        return gradient


def _iteration(trainer: Trainer) -> Iteration:
    iteration = iteration_of(trainer)
    if iteration is None:
        raise MisconfigurationException(
            "`GradientNormalizationCheck` needs a `PackedDataModule`; elsewhere use `lit_rl.check_normalization`"
        )
    return iteration


def _cuts_windows(trainer: Trainer) -> bool:
    """`fast_dev_run` and `limit_train_batches` can end a step early; then there is nothing to compare."""
    return trainer.num_training_batches % trainer.accumulate_grad_batches != 0
