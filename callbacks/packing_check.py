"""Proof, on your own model, that packed segments do not see each other."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lit_rl.checks.packing import check_packing
from lit_rl.checks.verdict import Verdict
from lit_rl.policy.module import PolicyModule


class PackingCheck(Callback):
    """Runs `check_packing` when the fit starts, and again every n optimizer steps if asked.

    It packs a few short random segments, replaces the tokens of one, and looks whether log-probabilities or
    gradients of any other move, in the precision of the run. A failure names the first module whose output changed.

    Args:
        every_n_steps: 0 checks at the start only; n also every n-th optimizer step.
        action: "raise" stops the run on a failure, "warn" goes on.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> PackingCheck().action
        'raise'
    """

    def __init__(self, every_n_steps: int = 0, action: Literal["raise", "warn"] = "raise") -> None:
        if every_n_steps < 0:
            raise ValueError(f"`every_n_steps` must be at least 0, got {every_n_steps}")
        if action not in ("raise", "warn"):
            raise ValueError(f'`action` must be "raise" or "warn", got {action!r}')
        self.every_n_steps, self.action = every_n_steps, action
        self.verdict: Verdict | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, pl_module)

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: object) -> None:
        if self.every_n_steps > 0 and trainer.global_step > 0 and trainer.global_step % self.every_n_steps == 0:
            self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        if not isinstance(module, PolicyModule) or module.policy is None:
            raise MisconfigurationException(
                f"`PackingCheck` needs a PolicyModule, got {type(module).__name__}; for other modules call "
                "`lit_rl.check_packing` on the language model"
            )
        # In the run's precision, whose kernels may be others than those the layout was settled with.
        with trainer.precision_plugin.forward_context():
            self.verdict = check_packing(module.policy)
        if self.verdict.ok:
            rank_zero_info(f"packing: {self.verdict.message}")
        elif self.action == "raise":
            raise MisconfigurationException(self.verdict.message)
        else:
            rank_zero_warn(self.verdict.message)
