"""The LightningModule: one microbatch in, its share of the step's loss out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from typing_extensions import override

from lit_rl import objectives, strategies
from lit_rl.checks.head import check_head
from lit_rl.data.batch import PackedBatch
from lit_rl.data.evaluation import EvaluationRequest, reward_statistics
from lit_rl.data.progress import settle_progress
from lit_rl.normalization import Denominator, Normalization, loss_weights
from lit_rl.objectives import DEFAULT_CLIPS, Correction, CorrectionLevel, ObjectiveName
from lit_rl.options import check_above, check_at_least, check_choices, check_real
from lit_rl.policy.backbone import load_causal_lm
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.policy.loss import LossOn, StepLoss
from lit_rl.policy.loss_checks import explain_gradient, explain_loss, required
from lit_rl.policy.reference import build_reference, match_layout, score_reference
from lit_rl.policy.step_metrics import StepSums, with_prefix
from lit_rl.trajectory import Trajectory


class PolicyModule(StepLoss, LightningModule):
    """A language model trained by reinforcement, one packed microbatch at a time.

    Subclass it and override `objective` for another loss, or `configure_optimizers` for another optimizer. The loss
    of a step is the sum over its scored tokens of weight x loss, with weights decided on the whole step by the data
    module, so neither the number of microbatches nor of processes changes the gradient. A step whose gradient is
    exactly 0 leaves weights and optimizer state alone and is counted in `train/steps_without_signal`.

    Dropout is switched off: with it, the ratio to the sampler would be noise.

    Args:
        model: A path for `AutoModelForCausalLM.from_pretrained`, a transformers config (random weights), a
            transformers model, or your own module (see `CausalLMPolicy`).
        learning_rate: Of AdamW.
        weight_decay: Of AdamW.
        warmup_steps: Optimizer steps over which the learning rate rises linearly from 0.
        objective: The per-token loss, one of `lit_rl.objectives`; ignored when `objective` is overridden.
        clip_low: How far a ratio may fall below 1 before its token is clipped; `None` is the objective's own number
            in `lit_rl.objectives.DEFAULT_CLIPS`.
        clip_high: How far it may rise above 1.
        normalization: What one token's loss is worth in its step; see `lit_rl.loss_weights`.
        constant: The divisor of the two constant normalizations.
        denominator: Whether tokens of zero advantage count in the divisor: "all" or "live".
        loss_on: Which trajectories are computed at all: "live" leaves out those with zero advantage, which is exact
            as long as the loss is a multiple of the advantage; "scored" keeps every one. `None` picks "live" for
            the named objectives that multiply by the advantage, and "scored" for "supervised", for an overridden
            `objective`, and with an entropy bonus or a KL term.
        entropy_bonus: Nats of entropy times this are subtracted from each token's loss; greater than 0 also logs
            `train/entropy`.
        kl_coefficient: This times an estimate of KL(policy || reference) in nats is added to each token's loss;
            greater than 0 also logs `train/reference_kl`. The reference's log-probabilities are computed with each
            microbatch and stand in `batch.reference_log_probs`.
        reference: The frozen policy of the KL term: a path, a module, or `None` for the model as it is before
            training (under PEFT: with its adapters switched off, at no cost in memory). Saved in checkpoints.
        sampler_correction: Corrects for a sampler (another engine, another precision) whose probabilities are not the
            trainer's: "truncate" or "mask" multiplies losses with `lit_rl.objectives.importance_weights` of the policy
            before its first update against the trajectories' `log_probs`; logs `train/sampler_weight`.
        correction_level: Whether it looks at each "token" or at the whole "sequence".
        correction_limit: The largest weight, greater than 1.
        temperature: Sampling temperature of rollouts, greater than 0.
        layout: "auto" packs where isolation is proved and pads elsewhere; "packed" or "padded" insist.
        chunk_tokens: Scored tokens whose logits exist at a time; `None` picks it from a byte budget.

    Raises:
        ValueError: A number is out of its range, or two arguments contradict each other.

    Example:
        >>> from lit_rl.testing import tiny_config
        >>> module = PolicyModule(tiny_config(), learning_rate=1e-3)
        >>> module.loss_on
        'live'
    """

    def __init__(
        self,
        model: str | PretrainedConfig | nn.Module,
        *,
        learning_rate: float = 1e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        objective: ObjectiveName = "clipped_ratio",
        clip_low: float | None = None,
        clip_high: float | None = None,
        normalization: Normalization = "token_mean",
        constant: float | None = None,
        denominator: Denominator = "all",
        loss_on: Literal["live", "scored"] | None = None,
        entropy_bonus: float = 0.0,
        kl_coefficient: float = 0.0,
        reference: str | nn.Module | None = None,
        sampler_correction: Correction = "none",
        correction_level: CorrectionLevel = "token",
        correction_limit: float = 2.0,
        temperature: float = 1.0,
        layout: Literal["auto", "packed", "padded"] = "auto",
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        check_choices(objective=(objective, ObjectiveName), normalization=(normalization, Normalization))
        check_choices(denominator=(denominator, Denominator), loss_on=(loss_on or "live", LossOn))
        check_choices(
            sampler_correction=(sampler_correction, Correction), correction_level=(correction_level, CorrectionLevel)
        )
        check_at_least(0, warmup_steps=warmup_steps)
        check_real(0, learning_rate=learning_rate, weight_decay=weight_decay, entropy_bonus=entropy_bonus)
        check_real(0, kl_coefficient=kl_coefficient, clip_low=clip_low, clip_high=clip_high)
        check_above(0, temperature=temperature)
        check_above(1, correction_limit=correction_limit)
        loss_weights([1], ["a"], mode=normalization, constant=constant)  # refuses a missing or superfluous constant
        if sampler_correction != "none" and objective == "supervised":
            raise ValueError("`sampler_correction` has nothing to correct in objective 'supervised'; leave it away")
        if reference is not None and kl_coefficient == 0:
            raise ValueError("`reference` is used by the KL term only, and `kl_coefficient` is 0; set it or leave both")
        modules = [name for name, value in (("model", model), ("reference", reference)) if not isinstance(value, str)]
        self.save_hyperparameters(ignore=modules)
        # Checkpoints load with `weights_only=True`, which knows no scalars of NumPy or torch.
        self.hparams.update({name: value.item() for name, value in self.hparams.items() if hasattr(value, "item")})
        self.objective_name = objective
        self.kl_coefficient, self.sampler_correction = kl_coefficient, sampler_correction
        self.correction_level, self.correction_limit = correction_level, correction_limit
        self.token_local = self._is_token_local()
        self.normalization, self.constant, self.denominator = normalization, constant, denominator
        self.temperature, self.entropy_bonus = temperature, entropy_bonus
        low, high = DEFAULT_CLIPS[objective]
        self.clip_low, self.clip_high = low if clip_low is None else clip_low, high if clip_high is None else clip_high
        self.learning_rate, self.weight_decay = float(learning_rate), float(weight_decay)
        self.warmup_steps = int(warmup_steps)
        self.loss_on = loss_on or self._default_loss_on()
        self.steps_without_signal = 0
        self.sigterm = strategies.HeldSigterm()
        self.policy: CausalLMPolicy | None = None
        self.reference: CausalLMPolicy | None = None
        self._reference_source = reference
        self._model_path = model if isinstance(model, str) else None
        self._policy_arguments: dict[str, Any] = {"layout": layout, "chunk_tokens": chunk_tokens}
        self._sums = StepSums()
        self._seen: list[tuple[PackedBatch, Tensor]] = []
        self._checked = False
        if not isinstance(model, str):
            network = AutoModelForCausalLM.from_config(model) if isinstance(model, PretrainedConfig) else model
            self._set_policy(network)

    # --- what a user overrides ---------------------------------------------------------------------------------

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW on the trainable parameters, with a linear warm-up per optimizer step when asked for."""
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=self.learning_rate, weight_decay=self.weight_decay)
        if self.warmup_steps == 0:
            return optimizer
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    # --- Lightning hooks ---------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        """Builds the policy from a path, and shards it when the strategy asks for it."""
        if self.policy is None:
            assert self._model_path is not None
            self._set_policy(load_causal_lm(self._model_path, "model"))
        if strategies.is_sharding(self._trainer):
            # Probing needs whole weights, so it comes before they are split.
            self._prepare_policy()
            strategies.shard_policy(self._policy(), self._trainer)
            if self.reference is not None:
                strategies.shard_policy(self.reference, self._trainer)

    @override
    def on_fit_start(self) -> None:
        strategies.check_strategy(self.trainer)
        if not self.automatic_optimization:
            raise MisconfigurationException(
                "`automatic_optimization=False` would never step; override `configure_optimizers` instead"
            )
        self._prepare_policy()
        self._sums, self._seen = StepSums(), []  # a fit that was broken off may have begun a step
        for policy in filter(None, (self.policy, self.reference)):
            policy.train()  # a loaded model is in evaluation mode, where activation checkpointing is off

    @override
    def on_validation_start(self) -> None:
        self._prepare_policy()

    @override
    def training_step(self, batch: PackedBatch, batch_idx: int) -> dict[str, Tensor]:
        if not isinstance(batch, PackedBatch):
            raise MisconfigurationException(
                f"a training batch is a {type(batch).__name__}, expected a PackedBatch; use `PackedDataModule`, or "
                "build your batches with `lit_rl.collate`"
            )
        required(batch.weights, "weights")
        batch = self.with_reference(batch)
        if self.token_local and self.entropy_bonus == 0:
            entropy = None
            loss, log_probs = self._policy()(batch, objective=partial(self.weighted_losses, batch))
        else:
            log_probs, entropy = self._policy()(batch, entropy=self.entropy_bonus > 0)
            loss = self.weighted_losses(batch, log_probs, entropy=entropy).sum()
        batch = batch.like(log_probs)
        self._add_metrics(loss, log_probs.detach(), entropy, batch)
        return {"loss": loss * strategies.gradient_multiplier(self.trainer), "log_probs": log_probs.detach()}

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._sums.add_total("sigterm", torch.tensor(self.sigterm.received, device=self.device))
        metrics = self._sums.reduce(lambda sums: strategies.sum_over_ranks(self.trainer, sums))
        if metrics.pop("sigterm"):
            self.sigterm.release()
        seen, self._seen = self._seen, []
        if not math.isfinite(metrics.get("loss", 0.0)):
            raise ValueError(explain_loss(metrics["loss"], seen))
        metrics["grad_norm"] = strategies.gradient_norm(self.parameters())
        if not math.isfinite(metrics["grad_norm"]) and not strategies.scales_gradients(self.trainer):
            raise ValueError(explain_gradient(metrics["grad_norm"], dict(self.named_parameters())))
        if metrics["grad_norm"] == 0.0:
            # Without gradients every torch optimizer leaves parameter and state alone, weight decay included.
            self.zero_grad(set_to_none=True)
            self.steps_without_signal += 1
            if self.steps_without_signal == 1:
                rank_zero_warn(
                    "the gradient of a step is exactly 0 (all advantages 0 or masked): weights left as they are; "
                    "`train/steps_without_signal` counts further ones"
                )
        metrics["steps_without_signal"] = float(self.steps_without_signal)
        self.log_dict(with_prefix("train", metrics), on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_train_epoch_end(self) -> None:
        statistics = getattr(getattr(self.trainer, "datamodule", None), "rollout_statistics", None)
        if statistics:
            self.log_dict(
                with_prefix("rollout", statistics), on_step=False, on_epoch=True, batch_size=1, sync_dist=True
            )

    @override
    def validation_step(self, batch: PackedBatch | EvaluationRequest, batch_idx: int) -> None:
        if isinstance(batch, EvaluationRequest):
            trajectories = batch.collect(self)
            self.log_dict(
                with_prefix("val", reward_statistics(trajectories)), on_epoch=True, batch_size=1, sync_dist=True
            )
            return
        log_probs = self._policy()(batch).log_probs
        sums = torch.stack([-log_probs.double().sum(), log_probs.new_tensor(log_probs.numel(), dtype=torch.float64)])
        nats, tokens = strategies.sum_over_ranks(self.trainer, sums).tolist()
        if tokens:
            self.log("val/nats_per_token", nats / tokens, on_epoch=True, batch_size=int(tokens), sync_dist=True)

    @override
    def predict_step(self, batch: EvaluationRequest, batch_idx: int) -> list[Trajectory]:
        return batch.collect(self)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lit_rl_steps_without_signal"] = self.steps_without_signal

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.steps_without_signal = int(checkpoint.get("lit_rl_steps_without_signal", 0))
        data = checkpoint.get(type(getattr(self._trainer, "datamodule", None)).__qualname__)
        if data and "microbatches" in data and "loops" in checkpoint:
            counts = {"microbatches": data["microbatches"], "per_step": data["microbatches_per_step"]}
            settle_progress(checkpoint, iteration=data["iteration"], **counts)

    def with_reference(self, batch: PackedBatch) -> PackedBatch:
        """The microbatch with the reference's log-probabilities, where the loss has a KL term.

        Args:
            batch: The microbatch.

        Returns:
            The same one where there is nothing to add.
        """
        if self.kl_coefficient == 0 or batch.reference_log_probs is not None:
            return batch
        return batch.replace(reference_log_probs=score_reference(self._policy(), self.reference, batch))

    # --- private -----------------------------------------------------------------------------------------------

    def _policy(self) -> CausalLMPolicy:
        if self.policy is None:
            raise MisconfigurationException("the policy is not built yet; call `configure_model()` first")
        return self.policy

    def _set_policy(self, network: nn.Module) -> None:
        self.policy = CausalLMPolicy(network, **self._policy_arguments)
        if self.kl_coefficient > 0:
            self.reference = build_reference(self.policy, self._reference_source, **self._policy_arguments)
        self._reference_source = None

    def _prepare_policy(self) -> None:
        """Once per module: settles the layout and proves the head against the model's own logits."""
        if self._checked:
            return
        self._policy().resolve_layout()
        verdict = check_head(self._policy())
        if not verdict.ok:
            raise MisconfigurationException(verdict.message)
        match_layout(self._policy(), self.reference)
        self._checked = True

    def _add_metrics(self, loss: Tensor, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> None:
        weights = required(batch.weights, "weights")
        live = weights != 0 if batch.advantages is None else (weights != 0) & (batch.advantages != 0)
        if self.sampler_correction != "none":
            old = log_probs if batch.old_log_probs is None else batch.old_log_probs
            correction = self._sampler_weights(batch.replace(old_log_probs=old))
            self._sums.add_mean("sampler_weight", correction)
            live = live & (correction != 0)
        self._seen.append((batch, log_probs))
        self._sums.add_total("loss", loss)
        self._sums.add_total("scored_tokens", loss.new_tensor(float(batch.num_scored)))
        self._sums.add_total("live_tokens", live)
        for name, values in self.token_metrics(log_probs, batch).items():
            self._sums.add_mean(name, values)
        if batch.reference_log_probs is not None:
            self._sums.add_mean("reference_kl", objectives.reference_kl(log_probs, batch.reference_log_probs))
        if entropy is not None:
            self._sums.add_mean("entropy", entropy)
