"""Tokens per second, utilization and GPU-hours of a run, by phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lit_rl import strategies
from lit_rl.data.batch import PackedBatch
from lit_rl.data.iteration import Iteration, iteration_of
from lit_rl.monitoring import log_reduced, packed_batch
from lit_rl.throughput import ModelShape, known_accelerator, model_flops
from lit_rl.throughput.flops import AttentionConvention, Recompute
from lit_rl.throughput.ledger import PHASES, PhaseClock, Work, gpu_hours


class TokenThroughputMonitor(Callback):
    """Counts what a run gets done, from the real lengths of its trajectories over all ranks, and what it costs.

    FLOPs are counted per segment: matrices by token, attention by segment, the head on scored tokens only; look-ups
    and idle experts count nothing, frozen weights under an adapter need no gradient, and a KL term's reference counts
    as one more forward pass. Utilization (MFU) is model FLOPs over seconds x devices x dense peak; padding, fillers
    and recomputation do not raise it. Every second of the fit belongs to exactly one phase, so the GPU-hours add up to
    wall time x devices, and a resumed run adds to what it restored. The first optimizer step of a process, which
    compiles and allocates, is a phase of its own and left out of the rates.

    Logged once per iteration:

    | name under `throughput/` | meaning |
    |---|---|
    | `PHASE_seconds` | rollout, old_log_probs, first_step, update, validation; waiting is everything else |
    | `rollout_tokens_per_second`, `rollout_sampled_tokens_per_second` | all tokens of the trajectories, and those \
that the policy sampled |
    | `old_log_probs_tokens_per_second` | real tokens of the scoring pass |
    | `update_tokens_per_second` | real tokens trained; `update_positions_`, `update_scored_tokens_` and \
`update_live_tokens_per_second` count the others |
    | `update_mfu`, `old_log_probs_mfu` | share of the dense peak, from real tokens |
    | `update_useful_mfu` | the same, counting only trajectories with a live token |
    | `update_hfu` | the same, counting recomputation too |
    | `update_tflops_per_segment` | mean model TFLOPs of a segment, forward and backward |
    | `peak_tflops`, `devices` | what the utilization is a share of |
    | `tokens_per_trajectory`, `policy_share` | of the rollout; `lit-rl plan --measured metrics.csv` reads them |
    | `gpu_hours`, `gpu_hours_PHASE` | since the beginning of the run |

    Args:
        model: Where the shape is read from: a local folder, `config.json`, a built-in name, or a `ModelShape`;
            `None` takes the config of the transformers model inside the module.
        peak_tflops: Dense peak of one device in TFLOP/s; `None` looks the device up. An unknown device, or a
            precision other than 16 bits, means no utilization and one message.
        attention: Convention for attention FLOPs: "full_square" (n^2 pairs, as most published figures) or
            "causal_half".
        recompute: What backward computes twice, for `update_hfu`: the head is recomputed by `LogProbHead`, the
            layers with gradient checkpointing.
        clock: Seconds as a float; `time.perf_counter` by default. For tests.

    Raises:
        ValueError: `peak_tflops` is not positive.
        MisconfigurationException: A loader of your own yields something else than `PackedBatch`.

    Example:
        >>> TokenThroughputMonitor(model="qwen3-8b", peak_tflops=989.4).attention
        'full_square'
    """

    def __init__(
        self,
        model: str | ModelShape | None = None,
        peak_tflops: float | None = None,
        attention: AttentionConvention = "full_square",
        recompute: Recompute = "head",
        clock: Callable[[], float] | None = None,
    ) -> None:
        if peak_tflops is not None and peak_tflops <= 0:
            raise ValueError(f"`peak_tflops` must be greater than 0, got {peak_tflops}")
        self.model, self.peak_tflops, self.attention, self.recompute = model, peak_tflops, attention, recompute
        self.clock = PhaseClock(clock or time.perf_counter)
        self.gpu_seconds = dict.fromkeys(PHASES, 0.0)
        self._shape: ModelShape | None = None
        self._peak: float | None = None
        self._adapter_weights: int | None = None
        self._segments: list[Tensor] = []
        self._positions = 0
        self._devices = 1
        self._first_step: int | None = None
        self._interrupted: str | None = None
        self._seen: Iteration | None = None

    # --- Lightning hooks ---------------------------------------------------------------------------------------

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._devices = trainer.world_size
        self._shape = _find_shape(self.model, pl_module)
        self._peak = None if self._shape is None else self._find_peak(trainer, pl_module)
        self._adapter_weights = _adapter_weights(pl_module)
        self._first_step = self._seen = self._interrupted = None
        self._segments, self._positions = [], 0
        self.clock.enter(None)
        self.clock.take()  # whatever came before is no time of this fit
        self.clock.enter("waiting")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Not `on_train_epoch_start`, which Lightning leaves out when it resumes in the middle of an epoch.
        if self.clock.phase != "waiting":
            return
        source, iteration = getattr(trainer, "datamodule", None), iteration_of(trainer)
        self._enter("update" if self._first_step is not None else "first_step", pl_module)
        if self._first_step is None:
            self._first_step = trainer.global_step
        if iteration is not None and iteration is not self._seen:
            # The data module measured these while the loader was made, which was booked as waiting.
            self._seen = iteration
            for phase in ("rollout", "old_log_probs"):
                self.clock.reassign(float(getattr(source, f"{phase}_seconds", 0.0)), "waiting", phase)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        batch = packed_batch(batch, "TokenThroughputMonitor")
        self._segments.append(_count_segments(batch))
        self._positions += batch.num_positions
        if self.clock.phase == "first_step" and trainer.global_step != self._first_step:
            self._enter("update", pl_module)
            self._segments, self._positions = [], 0

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.clock.phase is not None:
            self._interrupted = self.clock.phase
            self._enter("validation", pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.clock.phase == "validation":
            self._enter(self._interrupted, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("waiting", pl_module)
        mine = self.clock.take()
        slowest = dict(zip(PHASES, _reduce(trainer, pl_module, list(mine.values()), "max"), strict=True))
        for phase, seconds in zip(PHASES, _reduce(trainer, pl_module, list(mine.values()), "sum"), strict=True):
            self.gpu_seconds[phase] += seconds
        metrics = {f"{phase}_seconds": seconds for phase, seconds in slowest.items()}
        metrics |= self._take_work(trainer, pl_module).rates(slowest["update"], self._devices, self._peak)
        metrics |= self._rollout_rates(iteration_of(trainer), slowest["rollout"])
        metrics |= self._scoring_rates(iteration_of(trainer), slowest["old_log_probs"])
        metrics |= gpu_hours(self.gpu_seconds) | {"devices": float(self._devices)}
        if self._peak is not None:
            metrics["peak_tflops"] = self._peak / 1e12
        values = {f"throughput/{name}": value for name, value in metrics.items()}
        log_reduced(pl_module, values)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()  # `on_fit_end` is not called then

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"gpu_seconds": self._so_far()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.gpu_seconds = {phase: float(state_dict["gpu_seconds"].get(phase, 0.0)) for phase in PHASES}

    # --- private -----------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Books what was spent so far, and stops the clock until the next fit."""
        self.gpu_seconds = self._so_far()
        self.clock.enter(None)
        self.clock.take()

    def _enter(self, phase: str | None, pl_module: LightningModule) -> None:
        """Changes the phase when the device has finished what was asked of it."""
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self.clock.enter(phase)

    def _take_work(self, trainer: Trainer, pl_module: LightningModule) -> Work:
        """The update's work over all ranks, and starts over."""
        segments = torch.cat(self._segments, 1).T.tolist() if self._segments else []
        work = Work.of_segments(
            segments,
            self._positions,
            self._shape,
            attention=self.attention,
            recompute=self.recompute,
            adapter_weights=self._adapter_weights,
            scoring_passes=1 if getattr(pl_module, "kl_coefficient", 0.0) > 0 else 0,
        )
        self._segments, self._positions = [], 0
        # Ranks that split one layer between them see the same data; it counts once.
        once = strategies.data_parallel_rank_and_size(trainer)[1] / self._devices
        return Work.from_values(once * value for value in _reduce(trainer, pl_module, work.values(), "sum"))

    def _rollout_rates(self, iteration: Iteration | None, seconds: float) -> dict[str, float]:
        if iteration is None or seconds <= 0 or not len(iteration):
            return {}
        tokens = sum(len(trajectory) for trajectory in iteration.trajectories)
        sampled = sum(trajectory.num_scored for trajectory in iteration.trajectories)
        return {
            "rollout_tokens_per_second": tokens / seconds,
            "rollout_sampled_tokens_per_second": sampled / seconds,
            "tokens_per_trajectory": tokens / len(iteration),
            "policy_share": sampled / tokens,
        }

    def _scoring_rates(self, iteration: Iteration | None, seconds: float) -> dict[str, float]:
        if iteration is None or seconds <= 0:
            return {}
        lengths = [iteration.lengths[index] for index in iteration.kept]
        rates = {"old_log_probs_tokens_per_second": sum(lengths) / seconds}
        if self._peak is not None and self._shape is not None:
            scored = sum(iteration.scored_counts[index] for index in iteration.kept)
            flops = model_flops(self._shape, lengths, scored=scored, work="forward", attention=self.attention)
            rates["old_log_probs_mfu"] = flops.model / (seconds * self._devices * self._peak)
        return rates

    def _so_far(self) -> dict[str, float]:
        """GPU-seconds with the iteration in progress, as this rank sees it, without asking the others."""
        pending = self.clock.pending()
        return {phase: self.gpu_seconds[phase] + self._devices * pending[phase] for phase in PHASES}

    def _find_peak(self, trainer: Trainer, pl_module: LightningModule) -> float | None:
        device = pl_module.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        known = known_accelerator(name)
        half = str(trainer.precision).startswith(("bf16", "16"))
        if self.peak_tflops is not None:
            peak, source = self.peak_tflops * 1e12, "given"
        elif known is not None and half:
            peak, source = known.peak_flops, f"{known.source}, {known.date}"
        else:
            why = f"precision {trainer.precision!r}" if known is not None else f"device {name!r}"
            rank_zero_warn(f"no MFU: no dense peak is known for {why}; give `TokenThroughputMonitor(peak_tflops=...)`")
            return None
        rank_zero_info(
            f"MFU: share of {peak / 1e12:g} TFLOP/s dense ({source}) on each of {self._devices} x {name}, attention "
            f"counted as {self.attention}"
        )
        return peak


def _find_shape(model: str | ModelShape | None, pl_module: LightningModule) -> ModelShape | None:
    if isinstance(model, ModelShape):
        return model
    configs = [getattr(module, "config", None) for module in pl_module.modules()]
    found = model or next((config for config in configs if hasattr(config, "num_hidden_layers")), None)
    try:
        if found is not None:
            return ModelShape.from_config(found)
        reason = "the module has no transformers config"
    except ValueError as error:
        if model is not None:
            raise
        reason = str(error)
    rank_zero_warn(f"no FLOPs and no MFU: {reason}; give `TokenThroughputMonitor(model=...)`, a path or a ModelShape")
    return None


def _adapter_weights(pl_module: LightningModule) -> int | None:
    """Trainable weights under PEFT adapters; `None` where the model itself is trained."""
    if not any(hasattr(module, "peft_config") for module in pl_module.modules()):
        return None
    return sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)


def _count_segments(batch: PackedBatch) -> Tensor:
    """int64 [3, S] tokens, scored and live tokens of each segment, left on the device; 0 for a filler."""
    real = batch.trajectory_index >= 0
    live = torch.ones_like(batch.scored) if batch.advantages is None else (batch.advantages != 0).long()
    none = torch.zeros_like(batch.segment_lengths)
    scored = none.index_add(0, batch.scored_segments, torch.ones_like(batch.scored))
    return torch.stack([batch.segment_lengths * real, scored, none.index_add(0, batch.scored_segments, live)])


def _reduce(trainer: Trainer, pl_module: LightningModule, values: list[float], operation: str) -> list[float]:
    if trainer.world_size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=pl_module.device)
    reduced: list[float] = trainer.strategy.reduce(tensor, reduce_op=operation).tolist()
    return reduced
