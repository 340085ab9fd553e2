"""The figures of `lit-rl plan` as one JSON-like dictionary."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields, replace
from typing import Any, get_args

from lit_rl.commands.plan import given_assumptions, parse_what_if
from lit_rl.options import check_at_least
from lit_rl.throughput import (
    Accelerator,
    Assumptions,
    ModelShape,
    StepHours,
    budget_waste,
    cheapest_changes,
    dead_group_share,
    decode_rate,
    find_accelerator,
    measured_assumptions,
    memory_breakdown,
    padded_share,
    parse_lengths,
    sequences_that_fit,
    step_gpu_hours,
    train_rate,
)
from lit_rl.throughput.memory import Head
from lit_rl.throughput.roofline import Counting

COUNTINGS: tuple[Counting, ...] = ("first_order", "counted")
_CONTEXTS, _BATCHES = (2048, 16_384, 65_536), (16, 64, 256)
_GIGA = 1e9


def build_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that `lit-rl plan` prints.

    Args:
        arguments: Parsed options of the command.

    Returns:
        Sections by name; numbers in the units that their names say.

    Raises:
        ValueError: An input that cannot work, or an unknown device.
    """
    _check(arguments)
    device = _device(arguments)
    shape = ModelShape.from_config(arguments.model)
    assumptions, origins = _assumptions(arguments)
    steps = {
        counting: step_gpu_hours(shape, device, assumptions, counting=counting, attention=arguments.attention)
        for counting in COUNTINGS
    }
    dead = None if arguments.pass_rate is None else dead_group_share(arguments.pass_rate, assumptions.group)
    waste = _waste(shape, assumptions, arguments, steps["first_order"], dead)
    return {
        "model": _model(shape),
        "gpu": _gpu(device),
        "decode": _decode(shape, device, assumptions),
        "train_tokens_per_second": _train(shape, device, assumptions, arguments),
        "iteration": {counting: _hours(step, arguments.iterations) for counting, step in steps.items()},
        "what_if": [_what_if(shape, device, steps["first_order"], text) for text in arguments.what_if],
        "memory_gb": _memory(shape, assumptions, arguments),
        "waste": waste,
        "changes": _changes(shape, device, steps["first_order"], dead, waste),
        "assumptions": _labelled(assumptions, origins),
        "notes": _notes(shape, device, assumptions, arguments),
    }


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what no formula would notice; the assumptions check themselves."""
    counts = {"--iterations": arguments.iterations, "--max-tokens": arguments.max_tokens, "--shards": arguments.shards}
    check_at_least(1, **counts)
    if arguments.pass_rate is not None and not 0 <= arguments.pass_rate <= 1:
        raise ValueError(f"`--pass-rate` must be in [0, 1], got {arguments.pass_rate:g}")


def _device(arguments: argparse.Namespace) -> Accelerator:
    numbers = (arguments.peak_tflops, arguments.bandwidth_tb, arguments.memory_gb)
    if arguments.gpu is None and None in numbers:
        raise ValueError("give `--gpu NAME`, or all of `--peak-tflops`, `--bandwidth-tb` and `--memory-gb`")
    given = {
        name: value * scale
        for name, value, scale in zip(("peak_flops", "bandwidth", "memory"), numbers, (1e12, 1e12, _GIGA), strict=True)
        if value is not None
    }
    if len(given) == len(numbers):
        return Accelerator(name=arguments.gpu or "given", **given)
    found = find_accelerator(arguments.gpu)
    return replace(found, **given, source=f"{found.source}; {', '.join(given)} given") if given else found


def _assumptions(arguments: argparse.Namespace) -> tuple[Assumptions, dict[str, str]]:
    """The assumptions and where each value comes from: what is given beats what is measured beats the default."""
    given = given_assumptions(arguments)
    measured = {} if arguments.measured is None else measured_assumptions(arguments.measured)
    origins = dict.fromkeys(measured, "measured") | dict.fromkeys(given, "given")
    values = measured | given
    lengths = None
    if arguments.tokens is not None:
        count = values.get("tasks", Assumptions.tasks) * values.get("group", Assumptions.group)
        lengths = parse_lengths(arguments.tokens, count)
        origins["tokens"] = "given"
    if ("tokens" in origins) and "context" not in values:
        values["context"] = None
        origins["context"] = "derived"
    assumptions = Assumptions(**(values | {"lengths": lengths}))
    # Resolved once, so that what is printed is what is used.
    resolved = replace(assumptions, context=assumptions.decode_context, tokens=assumptions.mean_tokens)
    return resolved, origins


def _labelled(assumptions: Assumptions, origins: dict[str, str]) -> list[dict[str, Any]]:
    shown = [item.name for item in fields(Assumptions) if item.name != "lengths"]
    return [
        {"name": name, "value": getattr(assumptions, name), "origin": origins.get(name, "assumed")}
        for name in shown
        if getattr(assumptions, name) is not None
    ]


def _model(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.name,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "multiplied_weights": shape.multiplied_weights,
        "layers": shape.num_layers,
        "cache_bytes_per_token": shape.cache_bytes_per_token(),
    }


def _gpu(device: Accelerator) -> dict[str, Any]:
    fields = asdict(device)
    del fields["device_names"]
    return fields


def _decode(shape: ModelShape, device: Accelerator, plan: Assumptions) -> list[dict[str, Any]]:
    shape = shape.with_cache_scaled(plan.cache_scale)
    bits: dict[str, Any] = {"weight_bits": plan.weight_bits, "cache_bits": plan.cache_bits}
    rows: list[dict[str, Any]] = []
    for context in sorted({*_CONTEXTS, plan.decode_context}):
        fits = sequences_that_fit(shape, device, context=context, **bits)
        for batch in sorted({*_BATCHES, plan.decode_batch}):
            rates = {
                counting: decode_rate(
                    shape,
                    device,
                    batch=batch,
                    context=context,
                    counting=counting,
                    parameters=plan.parameters if counting == "first_order" else None,
                    **bits,
                )
                for counting in COUNTINGS
            }
            rows.append(
                {
                    "context": context,
                    "batch": batch,
                    **{counting: rate.tokens_per_second for counting, rate in rates.items()},
                    "bound": rates["first_order"].bound,
                    "sequences_that_fit": fits,
                }
            )
    return rows


def _train(
    shape: ModelShape, device: Accelerator, plan: Assumptions, arguments: argparse.Namespace
) -> dict[str, float]:
    return {
        counting: train_rate(
            shape,
            device,
            mfu=plan.train_mfu,
            length=round(plan.mean_tokens),
            scored_share=plan.policy_share,
            counting=counting,
            parameters=plan.parameters if counting == "first_order" else None,
            attention=arguments.attention,
        )
        for counting in COUNTINGS
    }


def _hours(step: StepHours, iterations: int) -> dict[str, Any]:
    return {
        "gpu_hours": step.by_phase(),
        "share": {phase: step.share(phase) for phase in step.by_phase()},
        "total": step.total,
        "iterations": iterations,
        "run": step.run(iterations),
        "wall_hours_of_run": step.run(iterations) / step.assumptions.gpus,
    }


def _what_if(shape: ModelShape, device: Accelerator, base: StepHours, text: str) -> dict[str, Any]:
    changes = parse_what_if(text)
    if "tokens" in changes:
        changes["lengths"] = None
    changed = step_gpu_hours(shape, device, base.assumptions, counting=base.counting, **changes)
    return {
        "changes": text,
        "gpu_hours": changed.by_phase(),
        "total": changed.total,
        "times_base": {
            phase: hours / base.by_phase()[phase] if base.by_phase()[phase] else None
            for phase, hours in changed.by_phase().items()
        },
        "total_times_base": changed.total / base.total,
        "decode_tokens_per_second": changed.decode_tokens_per_second,
    }


def _budget(plan: Assumptions, arguments: argparse.Namespace) -> int:
    if arguments.max_tokens is not None:
        return int(arguments.max_tokens)
    return max(32_768, max(plan.lengths) if plan.lengths else round(plan.mean_tokens))


def _memory(shape: ModelShape, plan: Assumptions, arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = _budget(plan, arguments)
    breakdowns = {
        head: memory_breakdown(
            shape,
            tokens,
            shards=plan.gpus if arguments.shards is None else arguments.shards,
            precision=arguments.precision,
            checkpointing=arguments.checkpointing,
            head=head,
        )
        for head in get_args(Head)
    }
    return {
        "microbatch_tokens": tokens,
        "parts": {
            head: {part: size / _GIGA for part, size in found.by_part().items()} for head, found in breakdowns.items()
        },
        "total": {head: found.total / _GIGA for head, found in breakdowns.items()},
        "assumptions": list(breakdowns["recomputed"].assumptions),
    }


def _waste(
    shape: ModelShape, plan: Assumptions, arguments: argparse.Namespace, step: StepHours, dead: float | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if plan.lengths and len(set(plan.lengths)) > 1:
        found["padding_share_of_padded_batches_of_8"] = padded_share(_shuffled(plan.lengths))
        budgets = [_budget(plan, arguments) * scale for scale in (1, 2, 4)]
        usable = [budget for budget in budgets if budget >= max(plan.lengths)]
        found["budgets"] = [asdict(budget_waste(shape, plan.lengths, b, gpus=plan.gpus)) for b in usable]
    if dead is not None:
        found["zero_advantage_groups"] = dead
        found["gpu_hours_on_zero_advantage"] = dead * step.total
    return found


def _changes(
    shape: ModelShape, device: Accelerator, step: StepHours, dead: float | None, waste: dict[str, Any]
) -> list[dict[str, Any]]:
    changes = [
        {"label": change.label, "gpu_hours": -change.saving, "share": -change.share}
        for change in cheapest_changes(shape, device, step, dead_share=dead or 0.0)
    ]
    planned, *larger = waste.get("budgets") or [None]
    for budget in larger:
        # The same work with less waiting for the slowest rank: utilization rises by the ratio.
        faster = planned["useful_share"] / budget["useful_share"]
        label = f"budget {budget['max_tokens']:,}: {1 / faster - 1:+.0%} MFU"
        saved = (1 - faster) * step.update
        if saved > 0.005 * step.total:
            changes.append({"label": label, "gpu_hours": -saved, "share": -saved / step.total})
    return sorted(changes, key=lambda change: change["gpu_hours"])


def _shuffled(lengths: Any) -> list[int]:
    """The lengths in a fixed random order, as a data loader would meet them."""
    import random

    shuffled = list(lengths)
    random.Random(0).shuffle(shuffled)
    return shuffled


def _notes(shape: ModelShape, device: Accelerator, plan: Assumptions, arguments: argparse.Namespace) -> list[str]:
    notes = list(shape.notes)
    fits = sequences_that_fit(
        shape.with_cache_scaled(plan.cache_scale),
        device,
        context=plan.decode_context,
        weight_bits=plan.weight_bits,
        cache_bits=plan.cache_bits,
    )
    if fits is not None and fits < plan.decode_batch:
        notes.append(
            f"the cache of {plan.decode_batch} sequences of {plan.decode_context:,} tokens does not fit beside the "
            f"weights on one {device.name}: at most {fits}, more where GPUs share one engine"
        )
    if device.name not in ("given",) and device.date:
        notes.append(f"{device.name} figures: {device.source}, {device.date}")
    notes.append(f"attention FLOPs in `counted`: {arguments.attention}")
    notes.append("not included: communication, evaluation, failed runs, kernels below the roofline while decoding")
    return notes
