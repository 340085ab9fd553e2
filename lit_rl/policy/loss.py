"""The loss of a step: what `PolicyModule` inherits, and what a user overrides."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from lit_rl import objectives
from lit_rl.data.batch import PackedBatch
from lit_rl.objectives import Correction, CorrectionLevel, ObjectiveName
from lit_rl.policy.loss_checks import check_losses, required

LossOn = Literal["live", "scored"]


class StepLoss:
    """Weight x (correction x `objective` + KL term - entropy bonus), token by token; `PolicyModule` has the options.

    Attributes:
        token_local: Whether each token's loss depends on its own log-probability only, as in most named objectives.
            Then loss and gradient are formed in one pass over the output layer. A class that overrides `objective` has
            to say so itself.
    """

    token_local = True

    objective_name: ObjectiveName
    clip_low: float
    clip_high: float
    entropy_bonus: float
    kl_coefficient: float
    sampler_correction: Correction
    correction_level: CorrectionLevel
    correction_limit: float

    def objective(self, log_probs: Tensor, batch: PackedBatch) -> Tensor:
        """Loss of each scored token; the one method to override for another loss.

        Args:
            log_probs: [M] log-probabilities of the scored tokens in nats, with gradient.
            batch: The microbatch; its per-scored-token fields (`advantages`, `old_log_probs`, `sampler_log_probs`,
                `scored_segments`) have the length and dtype of `log_probs`. It is one part of a step: what depends
                on statistics of the whole step belongs into the trajectories, before they are split.

        Returns:
            [M] losses, neither summed nor averaged.
        """
        advantages = required(batch.advantages, "advantages")
        if self.objective_name == "reinforce":
            return objectives.reinforce(log_probs, advantages)
        if self.objective_name == "supervised":
            return objectives.supervised(log_probs)
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        if self.objective_name == "gspo":
            return objectives.gspo(log_probs, batch.old_log_probs, advantages, batch.scored_segments, **clips)
        loss = objectives.cispo if self.objective_name == "cispo" else objectives.clipped_ratio
        return loss(log_probs, batch.old_log_probs, advantages, **clips)

    def token_metrics(self, log_probs: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
        """Numbers per scored token whose mean over the step is logged as `train/NAME`.

        Args:
            log_probs: [M] log-probabilities in nats, detached.
            batch: The microbatch, as in `objective`.

        Returns:
            Name to [M]; the same names for every microbatch, also one without scored tokens.
        """
        if batch.advantages is None:
            return {"log_prob": log_probs}
        clips = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        old, moved = batch.old_log_probs, log_probs
        if self.objective_name == "gspo" and old is not None:
            moved = old + objectives.sequence_log_ratio(log_probs, old, batch.scored_segments)
        diagnostics = objectives.ratio_diagnostics(moved, old, batch.advantages, **clips)
        return {
            "log_prob": log_probs,
            "ratio": diagnostics.ratio,
            "clip_ratio/low": diagnostics.clipped_low,
            "clip_ratio/high": diagnostics.clipped_high,
            "kl": diagnostics.kl,
        }

    @property
    def is_supervised(self) -> bool:
        """Whether the loss needs no rewards."""
        return self.objective_name == "supervised" and not self._overrides_objective()

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the objective compares with the policy before the iteration's first update."""
        by_name = self.objective_name in ("clipped_ratio", "gspo", "cispo")
        return by_name or self._overrides_objective() or self.sampler_correction != "none"

    def weighted_losses(
        self, batch: PackedBatch, log_probs: Tensor, part: slice = slice(None), *, entropy: Tensor | None = None
    ) -> Tensor:
        """What some scored tokens add to the loss of their step.

        That is weight x (correction x `objective` + KL term - entropy bonus).

        Args:
            batch: The microbatch, with weights, and passed through `with_reference`.
            log_probs: [m] log-probabilities of the scored tokens in `part`, in nats, with gradient.
            part: Which of the M scored tokens are meant.
            entropy: [m] entropies in nats, where the loss has an entropy bonus.

        Returns:
            [m] losses, to be added up.

        Raises:
            TypeError: `objective` returned no tensor.
            ValueError: It returned another shape than [m] or no gradient, or the batch lacks a field.
        """
        weights = required(batch.weights, "weights")[part]
        seen = (batch if part == slice(None) else batch.scored_slice(part)).like(log_probs)
        if seen.old_log_probs is None:
            # Before the only update of an iteration the policy is its own reference.
            seen = seen.replace(old_log_probs=log_probs.detach())
        losses = check_losses(self.objective(log_probs, seen), log_probs)
        if self.sampler_correction != "none":
            losses = losses * self._sampler_weights(seen)
        if self.kl_coefficient > 0:
            reference = required(seen.reference_log_probs, "reference_log_probs")
            losses = losses + self.kl_coefficient * objectives.reference_kl(log_probs, reference)
        if entropy is not None:
            losses = losses - self.entropy_bonus * entropy
        return weights.to(losses.dtype) * losses

    # --- private -----------------------------------------------------------------------------------------------

    def _overrides_objective(self) -> bool:
        return type(self).objective is not StepLoss.objective

    def _is_token_local(self) -> bool:
        if self.objective_name == "gspo" or (self.sampler_correction != "none" and self.correction_level == "sequence"):
            return False
        # Whoever overrides `objective` has to say it there or further down.
        last = next(kind for kind in type(self).__mro__ if {"objective", "token_local"} & vars(kind).keys())
        return bool(vars(last).get("token_local", False))

    def _default_loss_on(self) -> LossOn:
        without_advantage = self.objective_name == "supervised" or self.entropy_bonus > 0 or self.kl_coefficient > 0
        return "scored" if without_advantage or self._overrides_objective() else "live"

    def _sampler_weights(self, batch: PackedBatch) -> Tensor:
        """[m] what each token's loss is multiplied with; `batch` has old log-probabilities."""
        assert self.sampler_correction != "none"
        return objectives.importance_weights(
            required(batch.old_log_probs, "old_log_probs"),
            required(batch.sampler_log_probs, "sampler_log_probs"),
            mode=self.sampler_correction,
            level=self.correction_level,
            limit=self.correction_limit,
            segments=batch.scored_segments,
        )
