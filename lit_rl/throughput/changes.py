"""What one change of an assumption would save: each candidate is the same iteration, computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lit_rl.throughput.hardware import Accelerator, find_accelerator
from lit_rl.throughput.hours import StepHours, step_gpu_hours
from lit_rl.throughput.roofline import sequences_that_fit
from lit_rl.throughput.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change and what it is worth.

    Args:
        label: In words.
        changes: Fields of `Assumptions` and their new values.
        saving: GPU-hours per iteration; negative where it costs more.
        share: The same as a share of the total.
    """

    label: str
    changes: Mapping[str, Any]
    saving: float
    share: float


def compare(
    shape: ModelShape, accelerator: str | Accelerator, step: StepHours, label: str, changes: Mapping[str, Any]
) -> Change:
    """What an iteration costs less when some of its assumptions are changed."""
    after = step_gpu_hours(shape, accelerator, step.assumptions, counting=step.counting, **changes)
    saving = step.total - after.total
    return Change(label=label, changes=changes, saving=saving, share=saving / step.total)


def cheapest_changes(
    shape: ModelShape,
    accelerator: str | Accelerator,
    step: StepHours,
    *,
    dead_share: float = 0.0,
    smallest: float = 0.005,
) -> list[Change]:
    """Changes worth trying, the largest saving first.

    Args:
        shape: The model.
        accelerator: A name of the table or an `Accelerator`.
        step: The iteration as planned.
        dead_share: Share of trajectories in groups without advantage, whose scoring and update can be left out.
        smallest: Share of the total below which a change is not worth a line.

    Returns:
        Changes that save at least `smallest`.

    Example:
        >>> shape = ModelShape.from_config("qwen3-8b")
        >>> for change in cheapest_changes(shape, "h200", step_gpu_hours(shape, "h200"))[:2]:
        ...     print(f"{change.label}: {-change.share:+.0%}")
        KV cache in 8 bits: -26%
        busy fraction from 0.5 to 0.75: -20%
    """
    plan = step.assumptions
    fits = sequences_that_fit(
        shape.with_cache_scaled(plan.cache_scale),
        find_accelerator(accelerator),
        context=plan.decode_context,
        weight_bits=plan.weight_bits,
        cache_bits=plan.cache_bits,
    )
    busier = round((1 + plan.busy_fraction) / 2, 2)
    candidates: list[tuple[str, dict[str, Any]]] = [
        ("prefix shared by the group", {"share_prefix": True}),
        (f"busy fraction from {plan.busy_fraction:g} to {busier:g}", {"busy_fraction": busier}),
        (f"update at {plan.train_mfu + 0.1:.0%} MFU", {"train_mfu": min(1.0, plan.train_mfu + 0.1)}),
        ("the sampler's log-probs instead of a scoring pass", {"scoring_passes": 0}),
    ]
    if plan.cache_bits > 8:
        candidates.append(("KV cache in 8 bits", {"cache_bits": 8}))
    if fits is not None and fits > plan.decode_batch:
        candidates.append((f"decode batch of {fits}, what fits in memory", {"decode_batch": fits}))
    if dead_share > 0:
        kept = plan.trained_share * (1 - dead_share)
        candidates.append((f"leave out the {dead_share:.0%} zero-advantage trajectories", {"trained_share": kept}))
    found = [compare(shape, accelerator, step, label, changes) for label, changes in candidates]
    worthwhile = [change for change in found if change.share >= smallest]
    return sorted(worthwhile, key=lambda change: change.saving, reverse=True)


def dead_group_share(pass_rate: float, group: int) -> float:
    """Probability that all attempts of a group agree: p^G + (1 - p)^G. No advantage, no gradient.

    Example:
        >>> round(dead_group_share(0.9, 8), 2)
        0.43
    """
    if not 0 <= pass_rate <= 1 or group < 1:
        raise ValueError(f"need a pass rate in [0, 1] and a group of at least 1, got {pass_rate} and {group}")
    return pass_rate**group + (1 - pass_rate) ** group
