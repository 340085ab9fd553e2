"""Proof, on your own run, that the accumulated gradient is the gradient of the whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lit_rl.checks.gradients import Gradient, relation, take_gradients, whole
from lit_rl.checks.normalization import MICROBATCH_MEAN, Allowed, Mistake, allowed_error, compare, random_verdict
from lit_rl.checks.verdict import Verdict
from lit_rl.data.batch import PackedBatch
from lit_rl.data.iteration import Iteration, iteration_of
from lit_rl.policy.module import PolicyModule
from lit_rl.strategies import gradient_norm, scales_gradients


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
        tolerance: Largest relative error of the gradient that passes; `None` chooses 1e-3, or 2e-2 where the Trainer's
            precision or a parameter has 16 bits. What rounding of single trajectories' gradients explains passes too.
        action: "raise" stops the run on a failure, "warn" goes on.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> GradientNormalizationCheck(action="warn").every_n_steps
        0
    """

    def __init__(
        self, every_n_steps: int = 0, tolerance: float | None = None, action: Literal["raise", "warn"] = "raise"
    ) -> None:
        if every_n_steps < 0 or (tolerance is not None and not tolerance > 0):
            raise ValueError(
                f"`every_n_steps` must be at least 0 and `tolerance` above 0, got {every_n_steps} and {tolerance}"
            )
        if action not in ("raise", "warn"):
            raise ValueError(f'`action` must be "raise" or "warn", got {action!r}')
        self.every_n_steps, self.tolerance, self.action = every_n_steps, tolerance, action
        self.verdict: Verdict | None = None
        self._reference: dict[str, Tensor] | None = None
        self._sizes: list[float] = []
        self._pending = False
        self._step = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._pending = False
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
        self._reference, self._sizes = self._gradient(trainer, pl_module, lambda rank, k: 1.0)

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._reference is None:
            return
        reference, self._reference = self._reference, None
        accumulated = take_gradients(pl_module)
        with trainer.precision_plugin.train_step_context():
            allowed = allowed_error(pl_module, self.tolerance, self._sizes)
        verdict = compare(accumulated, reference, allowed=allowed)
        finite = bool(verdict.figures["finite"])
        if not finite and scales_gradients(trainer):
            return  # The scale of the loss was too large: this step is skipped, and the next one is checked.
        if not verdict.ok and finite:
            verdict = self._explain(trainer, pl_module, accumulated, reference, allowed)
        self.verdict = verdict
        # The module knows more about a number that is none, and says it after this hook.
        self._pending = not finite
        if finite:
            self._report(verdict)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._pending and self.verdict is not None:
            self._pending = False
            self._report(self.verdict)

    def _report(self, verdict: Verdict) -> None:
        if verdict.ok:
            rank_zero_info(f"gradient normalization: {verdict.message}")
        elif self.action == "raise":
            raise MisconfigurationException(verdict.message)
        else:
            rank_zero_warn(verdict.message)

    def _explain(
        self,
        trainer: Trainer,
        module: LightningModule,
        accumulated: Gradient,
        reference: Gradient,
        allowed: Allowed,
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

        mistakes = []
        if per_step > 1:  # With one microbatch per rank it is the same as a mean per rank.
            factors = [by_microbatch(r, k) for r in range(ranks) for k in range(per_step) if counts[r][k]]
            wrong, _ = self._gradient(trainer, module, by_microbatch)
            mistakes.append(Mistake(MICROBATCH_MEAN, accumulated, wrong, factors))
        if ranks > 1:
            factors = [by_rank(r, 0) for r in range(ranks) if sum(counts[r])]
            wrong, _ = self._gradient(trainer, module, by_rank)
            mistakes.append(Mistake("each rank takes the mean over its own tokens", accumulated, wrong, factors))
        again, _ = self._gradient(trainer, module, lambda rank, k: 1.0)
        for name, parameter in module.named_parameters():
            parameter.grad = before[name]
        if not compare(again, reference, allowed=allowed).ok:
            return random_verdict(relation(again, reference)[0], "the step")
        return compare(accumulated, reference, mistakes, allowed=allowed)

    def _gradient(
        self, trainer: Trainer, module: LightningModule, factor: Callable[[int, int], float]
    ) -> tuple[dict[str, Tensor], list[float]]:
        """The step's gradient and the norm of each trajectory's part.

        Every rank computes all of them, one trajectory at a time, so none has to be sent.
        """
        iteration = _iteration(trainer)
        old = trainer.datamodule.old_log_probs_by_trajectory  # type: ignore[attr-defined]
        total: dict[str, Tensor] = {}
        sizes = []
        for rank, microbatches in enumerate(iteration.plan.microbatches[self._step]):
            for k, microbatch in enumerate(microbatches):
                for index in microbatch:
                    batch = iteration.microbatch([index], old).to(module.device)
                    _backward(trainer, module, batch, factor(rank, k))
                    sizes.append(gradient_norm(module.parameters()))
                    for name, parameter in module.named_parameters():
                        if parameter.grad is not None:
                            total[name] = total[name].add_(parameter.grad) if name in total else parameter.grad
        module.zero_grad(set_to_none=True)
        return {name: whole(gradient).detach() for name, gradient in total.items()}, sizes


def _backward(trainer: Trainer, module: LightningModule, batch: PackedBatch, factor: float) -> None:
    """Leaves the gradient of one microbatch's loss in the parameters."""
    assert isinstance(module, PolicyModule)
    assert module.policy is not None
    module.zero_grad(set_to_none=True)
    with trainer.precision_plugin.train_step_context():
        batch = module.with_reference(batch)
        log_probs, entropy = module.policy(batch, entropy=module.entropy_bonus > 0)
        loss = module.weighted_losses(batch, log_probs, entropy=entropy).sum() * factor
    loss.backward()


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
