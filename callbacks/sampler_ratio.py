"""Compares trainer and sampler before the first update of each iteration, when they must agree."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lit_rl.checks.sampler_ratio import ALLOWED_SHARE, ratio_verdict
from lit_rl.log_ratio import LogRatioCounts
from lit_rl.monitoring import log_reduced, packed_batch


class SamplerRatioMonitor(Callback):
    """Logs how far the trainer's log-probabilities are from the sampler's, and warns once when they disagree.

    Measured on the microbatches of an iteration's first optimizer step, over all ranks: there the policy is still
    the one that sampled, so every ratio is 1 up to numerical noise, and a clip fraction, an importance correction or
    a mismatch term would only hide an error. Reads `outputs["log_probs"]` of the training step (`PolicyModule` gives
    it) and `batch.sampler_log_probs`.

    Logged once per iteration:

    | name under `sampler_ratio/` | meaning |
    |---|---|
    | `outside_20_percent` | share of tokens with a ratio more than 20% from 1 |
    | `above_20_percent` | share of tokens with a ratio above 1.2 |
    | `mean_ratio`, `mean_ratio_error` | mean ratio, and its standard error: 1, or the share of the distribution that \
the sampler kept when it cut (top-p, top-k) |
    | `max` | largest absolute log-ratio, nats |
    | `mean` | mean log-ratio, nats |
    | `kl` | estimate of KL(sampler, trainer), nats per token |
    | `tokens`, `non_finite` | tokens compared, and tokens left out because a log-probability is not finite |
    | `outside_first`, `outside_later` | the first share for segments that stand first in their row, and behind \
another one |

    The warning names the likely causes in order, the likeliest first (see `check_sampler_ratio`). It is given for
    trajectories that this policy sampled; a fixed data set was sampled by another one, so only its first iteration is
    judged.

    Args:
        allowed_share: Warn when a larger share of tokens has a ratio more than 20% from 1.

    Raises:
        ValueError: `allowed_share` is not in [0, 1].
        MisconfigurationException: The training step gives no `log_probs`, or the trajectories have none.

    Example:
        >>> monitor = SamplerRatioMonitor(allowed_share=0.02)
    """

    def __init__(self, allowed_share: float = ALLOWED_SHARE) -> None:
        if not 0.0 <= allowed_share <= 1.0:
            raise ValueError(f"`allowed_share` must lie in [0, 1], got {allowed_share!r}")
        self.allowed_share = allowed_share
        self._counts = LogRatioCounts()
        self._first_step: int | None = None
        self._warned = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._first_step = None
        if trainer.world_size > 1:  # where the collective runs
            self._counts.to(trainer.strategy.root_device)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not at the epoch's start: Lightning leaves that hook out when it resumes.
        if batch_idx == 0:
            self._first_step = trainer.global_step
            self._counts.reset()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._first_step is None:
            return
        self._add(outputs, batch)
        if trainer.global_step > self._first_step:
            self._first_step = None
            self._report(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"warned": self._warned}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._warned = state_dict["warned"]

    def _add(self, outputs: Any, batch: Any) -> None:
        batch = packed_batch(batch, "SamplerRatioMonitor")
        log_probs = outputs.get("log_probs") if isinstance(outputs, dict) else None
        if not isinstance(log_probs, Tensor):
            raise MisconfigurationException(
                "`SamplerRatioMonitor` needs the log-probabilities of the training step; return "
                '`{"loss": loss, "log_probs": log_probs.detach()}` from `training_step`'
            )
        if batch.sampler_log_probs is None:
            raise MisconfigurationException(
                "`SamplerRatioMonitor` compares with the sampler's log-probabilities, but the trajectories have no "
                "`log_probs`; record them when sampling, or remove the callback"
            )
        first_segment = batch.segment_starts % batch.input_ids.shape[1] == 0
        self._counts.update(log_probs, batch.sampler_log_probs, first_segment[batch.scored_segments])

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        figures = LogRatioCounts.figures(self._counts.drain())
        metrics = {f"sampler_ratio/{name}": value for name, value in figures.items()}
        log_reduced(pl_module, metrics)
        verdict = ratio_verdict(figures, allowed_share=self.allowed_share)
        sampled_here = getattr(getattr(trainer, "datamodule", None), "rollouts", None) is not None
        if not verdict.ok and not self._warned and (sampled_here or trainer.current_epoch == 0):
            self._warned = True
            rank_zero_warn(verdict.message)
