"""GPU-hours of one iteration: decode, prefill, scoring, update, weight sync. Every input is a named assumption."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal

from lit_rl.throughput.flops import AttentionConvention, model_flops
from lit_rl.throughput.hardware import Accelerator, find_accelerator
from lit_rl.throughput.roofline import Counting, decode_rate, forward_flops_per_token
from lit_rl.throughput.shape import ModelShape

Origin = Literal["assumed", "given", "derived", "measured"]
# What a value has to be, as a test and in words.
_Range = tuple[Callable[[float], bool], str]
_SHARE: _Range = (lambda value: 0 < value <= 1, "in (0, 1]")
_POSITIVE: _Range = (lambda value: value > 0, "> 0")
_AT_LEAST_0: _Range = (lambda value: value >= 0, ">= 0")
_COUNT: _Range = (lambda value: value >= 1 and value == int(value), "a whole number >= 1")
_PASSES: _Range = (lambda value: value >= 0 and value == int(value), "a whole number >= 0")
_RANGES: dict[str, _Range] = {
    **dict.fromkeys(("policy_share", "busy_fraction", "prefill_mfu", "scoring_mfu", "train_mfu"), _SHARE),
    **dict.fromkeys(("tasks", "group", "decode_batch", "gpus", "context"), _COUNT),
    **dict.fromkeys(("cache_scale", "cache_bits", "weight_bits", "parameters"), _POSITIVE),
    **dict.fromkeys(("rollout_rate", "scoring_rate", "update_rate"), _POSITIVE),
    **dict.fromkeys(("prompt_tokens", "weight_sync_seconds"), _AT_LEAST_0),
    **dict.fromkeys(("scoring_passes", "update_passes"), _PASSES),
    "tokens": (lambda value: value >= 1, ">= 1"),
    "trained_share": (lambda value: 0 <= value <= 1, "in [0, 1]"),
}
_OPTIONAL = ("context", "parameters", "rollout_rate", "scoring_rate", "update_rate")
PHASES = ("decode", "prefill", "scoring", "update", "weight_sync")


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What one iteration is assumed to look like. Replace each by a measurement before a budget is signed.

    Args:
        tasks: Tasks per iteration.
        group: Trajectories per task.
        tokens: Mean tokens per trajectory: prompt, sampled and tool tokens.
        lengths: The tokens of each trajectory instead of their mean; attention is then counted by length.
        policy_share: Share of tokens that the policy samples; the rest is read.
        prompt_tokens: Tokens at the start of a trajectory that its whole group shares.
        decode_batch: Sequences decoded together on one GPU.
        context: Mean tokens in the cache of a sequence while it decodes; `None` derives it from the lengths.
        busy_fraction: Share of rollout time in which the engine decodes; tools and stragglers take the rest.
        prefill_mfu: Utilization of reading prompts and tool results, each once.
        share_prefix: The engine reads the prompt of a group once instead of once per trajectory.
        scoring_passes: Forward passes over all tokens before the update: old log-probs, a reference policy.
        scoring_mfu: Utilization of these passes.
        update_passes: Times each trajectory is trained on.
        train_mfu: Utilization of the update.
        trained_share: Share of the tokens that the scoring passes and the update see; 1 less the share of
            zero-advantage trajectories where those are dropped.
        weight_sync_seconds: Seconds per iteration in which all GPUs wait, for new weights to reach the engine and
            for whatever else is neither rollout nor update.
        gpus: GPUs of the run.
        cache_scale: Size of the KV cache relative to the model's own at `cache_bits`.
        cache_bits: Bits per cached value.
        weight_bits: Bits per weight while decoding.
        parameters: Parameters to assume in first-order counting instead of the counted ones.
        rollout_rate: Measured tokens per second and GPU of the whole rollout, prompts and tool results included;
            replaces the decode roofline, the busy fraction and prefill.
        scoring_rate: Measured tokens per second and GPU of a scoring pass; replaces `scoring_mfu`.
        update_rate: Measured tokens per second and GPU of the update; replaces `train_mfu`.

    Raises:
        ValueError: A value is out of its range.
    """

    tasks: int = 64
    group: int = 8
    tokens: float = 24_000
    lengths: Sequence[int] | None = None
    policy_share: float = 0.25
    prompt_tokens: float = 2_000
    decode_batch: int = 64
    context: int | None = 16_384
    busy_fraction: float = 0.5
    prefill_mfu: float = 0.4
    share_prefix: bool = False
    scoring_passes: int = 1
    scoring_mfu: float = 0.4
    update_passes: int = 1
    train_mfu: float = 0.4
    trained_share: float = 1.0
    weight_sync_seconds: float = 0.0
    gpus: int = 8
    cache_scale: float = 1.0
    cache_bits: float = 16
    weight_bits: float = 16
    parameters: float | None = None
    rollout_rate: float | None = None
    scoring_rate: float | None = None
    update_rate: float | None = None

    def __post_init__(self) -> None:
        for name, (in_range, expected) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"`{name}` must be a finite number, got {value!r}")
            if not in_range(float(value)):
                raise ValueError(f"`{name}` must be {expected}, got {value:g}")
        if not isinstance(self.share_prefix, bool):
            raise ValueError(f"`share_prefix` must be true or false, got {self.share_prefix!r}")
        if self.lengths is not None and (not len(self.lengths) or min(self.lengths) < 1):
            raise ValueError("`lengths` must hold at least one length, each at least 1")

    @property
    def trajectories(self) -> int:
        """Trajectories per iteration."""
        return self.tasks * self.group

    @property
    def mean_tokens(self) -> float:
        """Mean tokens per trajectory, from the lengths where they are given."""
        return self.tokens if self.lengths is None else sum(self.lengths) / len(self.lengths)

    @property
    def decode_context(self) -> int:
        """Mean cache of a decoding sequence: as given, or sum n^2 / (2 sum n), for actions spread evenly."""
        if self.context is not None:
            return self.context
        if self.lengths is None:
            return max(1, round(self.tokens / 2))
        return max(1, round(sum(n * n for n in self.lengths) / (2 * sum(self.lengths))))


@dataclass(frozen=True, kw_only=True)
class StepHours:
    """GPU-hours of one iteration by phase, under the assumptions it was computed from.

    Args:
        decode: Sampling, over the busy fraction: everything the rollout GPUs are held for.
        prefill: Reading prompts and tool results.
        scoring: Forward passes for old or reference log-probs.
        update: Forward and backward.
        weight_sync: Waiting for new weights.
        assumptions: The inputs.
        counting: How weights and FLOPs were counted.
        decode_tokens_per_second: Roofline rate of one busy GPU.
    """

    decode: float
    prefill: float
    scoring: float
    update: float
    weight_sync: float
    assumptions: Assumptions = field(repr=False)
    counting: Counting
    decode_tokens_per_second: float

    @property
    def total(self) -> float:
        """GPU-hours of the iteration."""
        return sum(self.by_phase().values())

    def by_phase(self) -> dict[str, float]:
        """GPU-hours of each phase, in the order of an iteration."""
        return {phase: getattr(self, phase) for phase in PHASES}

    def share(self, phase: str) -> float:
        """A phase's share of the total."""
        return self.by_phase()[phase] / self.total

    def run(self, iterations: int) -> float:
        """GPU-hours of so many iterations, nothing else included."""
        return iterations * self.total


def step_gpu_hours(
    shape: ModelShape,
    accelerator: str | Accelerator,
    assumptions: Assumptions | None = None,
    *,
    counting: Counting = "first_order",
    attention: AttentionConvention = "full_square",
    **changes: Any,
) -> StepHours:
    """GPU-hours of one iteration (one rollout and the updates made with it).

    Args:
        shape: The model.
        accelerator: A name of the table or an `Accelerator`.
        assumptions: The episodes and rates; the defaults are an agent run with 512 trajectories of 24k tokens.
        counting: `first_order` or `counted`, see `roofline`.
        attention: Convention for attention pairs; only `counted` looks at it.
        **changes: Fields of `Assumptions` to set, as in `busy_fraction=0.25`.

    Returns:
        GPU-hours by phase.

    Raises:
        TypeError: A change that is no field of `Assumptions`; the message lists them.

    Example:
        >>> shape = ModelShape.from_config("qwen3-8b")
        >>> step = step_gpu_hours(shape, "h200")
        >>> round(step.total, 2), round(step.run(300)), round(step.share("decode"), 2), round(step.share("update"), 2)
        (1.62, 486, 0.59, 0.26)
        >>> round(step_gpu_hours(shape, "h200", busy_fraction=0.25).total - step.total, 2)
        0.95
    """
    known = {item.name for item in fields(Assumptions)}
    if unknown := set(changes) - known:
        raise TypeError(f"no assumption is called {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
    plan = replace(assumptions or Assumptions(), **changes)
    device = find_accelerator(accelerator)
    tokens = plan.trajectories * plan.mean_tokens
    sampled = tokens * plan.policy_share
    rate = decode_rate(
        shape.with_cache_scaled(plan.cache_scale),
        device,
        batch=plan.decode_batch,
        context=plan.decode_context,
        counting=counting,
        parameters=plan.parameters,
        weight_bits=plan.weight_bits,
        cache_bits=plan.cache_bits,
    ).tokens_per_second
    forward = _forward_flops(shape, plan, counting, attention, plan.policy_share) / device.peak_flops
    without_head = _forward_flops(shape, plan, counting, attention, 0.0) / device.peak_flops
    read = max(0.0, tokens - sampled)
    if plan.share_prefix:
        read = max(0.0, read - plan.tasks * (plan.group - 1) * plan.prompt_tokens)
    trained = tokens * plan.trained_share
    # A measured rate stands for everything that its phase was assumed to be made of.
    decode = sampled / rate / plan.busy_fraction if plan.rollout_rate is None else tokens / plan.rollout_rate
    seconds = {
        "decode": decode,
        "prefill": read * without_head / plan.prefill_mfu if plan.rollout_rate is None else 0.0,
        "scoring": plan.scoring_passes * trained / (plan.scoring_rate or plan.scoring_mfu / forward),
        "update": plan.update_passes * trained / (plan.update_rate or plan.train_mfu / (3 * forward)),
        "weight_sync": plan.weight_sync_seconds * plan.gpus,
    }
    hours = {phase: value / 3600 for phase, value in seconds.items()}
    return StepHours(**hours, assumptions=plan, counting=counting, decode_tokens_per_second=rate)


def _forward_flops(
    shape: ModelShape, plan: Assumptions, counting: Counting, attention: AttentionConvention, scored_share: float
) -> float:
    """Mean forward FLOPs per token, the head on a share of them."""
    if counting == "first_order" or plan.lengths is None:
        return forward_flops_per_token(
            shape,
            length=round(plan.mean_tokens),
            scored_share=scored_share,
            counting=counting,
            parameters=plan.parameters,
            attention=attention,
        )
    total = sum(plan.lengths)
    scored = round(total * scored_share)
    return model_flops(shape, plan.lengths, scored=scored, work="forward", attention=attention).model / total
