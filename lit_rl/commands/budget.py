"""`lit-rl budget`: measure the memory of a few microbatches on this device, and recommend `max_tokens`."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lit_rl.commands.plan_text import table

if TYPE_CHECKING:
    from lit_rl.throughput.budget import Measurement

DESCRIPTION = """\
Trains a few microbatches of your model on this device, each in a fresh process, fits
    peak bytes = a + b x tokens + c x longest segment
and recommends the largest token budget that leaves a margin. On a CPU the process's own peak is measured."""

EXAMPLES = """\
examples:
  lit-rl budget --model ./my-model --context 4096
  lit-rl budget --model ./my-model --context 32768 --checkpointing --precision bf16-mixed --device cuda
  lit-rl budget --model qwen3-0.6b --context 512 --limit-gb 16 --check 1536
"""
_GIGA = 1e9
# A straight line through small microbatches is trusted up to this many times the largest of them, and beyond the
# second number it is not worth pasting.
_FAR, _TOO_FAR = 4, 10
# For the forecast of a measurement's time: what a process needs to start, and FLOP/s that a core or a GPU reaches.
_START_SECONDS, _CORE_FLOPS, _GPU_FLOPS = 15.0, 1e10, 1e14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `lit-rl budget`.

    Args:
        parser: Of the subcommand.
    """
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", required=True, help="local folder, config.json (random weights), or built-in name")
    parser.add_argument("--context", type=int, required=True, help="longest trajectory, tokens")
    parser.add_argument("--tokens", help="microbatch sizes to measure, N,N,... (default: 2, 3 and 4 times the context)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--precision", choices=["32-true", "bf16-true", "bf16-mixed"], default="32-true")
    parser.add_argument("--checkpointing", action="store_true", help="with gradient checkpointing")
    parser.add_argument("--scored-share", type=float, default=1.0, help="share of tokens that are scored (default 1)")
    parser.add_argument("--limit-gb", type=float, help="memory to stay within (default: the device's)")
    parser.add_argument("--margin", type=float, default=0.1, help="share of it to keep free (default %(default)s)")
    parser.add_argument("--check", type=int, metavar="TOKENS", help="also measure this size and compare with the fit")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per measurement (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Measures, fits, recommends.

    Args:
        arguments: Parsed options.

    Returns:
        Exit status.

    Raises:
        ValueError: Too few measurements came back, or the context does not fit.
    """
    from lit_rl.throughput.budget import fit_memory, recommend_budget

    _check(arguments)
    points = measuring_points(arguments.context, arguments.tokens)
    if not arguments.json:
        print(_forecast(arguments, points), flush=True)
    measured, failed, limit = _measure(arguments, points)
    limit_bytes = limit if arguments.limit_gb is None else arguments.limit_gb * _GIGA
    if limit_bytes is None:
        raise ValueError("this system does not say how much memory it has; give `--limit-gb`")
    fit = fit_memory(measured)
    advice = recommend_budget(fit, context=arguments.context, limit_bytes=limit_bytes, margin=arguments.margin)
    report: dict[str, Any] = {
        "measurements": [
            asdict(point) | {"predicted_bytes": fit.predict(point.tokens, point.longest)} for point in measured
        ],
        "failed": failed,
        "fit": asdict(fit),
        "check": None if arguments.check is None else _compare(arguments, fit),
        "recommendation": asdict(advice) | _trust(advice.max_tokens, measured, arguments.context),
    }
    print(json.dumps(report, indent=2) if arguments.json else _render(report))
    return 0


def measuring_points(context: int, tokens: str | None = None) -> list[tuple[int, int]]:
    """Microbatches to measure as (tokens, longest): every size with segments of full and of quarter length.

    Example:
        >>> measuring_points(400)
        [(800, 400), (800, 100), (1200, 400), (1200, 100), (1600, 400)]
    """
    if tokens is None:
        sizes = [2 * context, 3 * context, 4 * context]
    else:
        try:
            sizes = sorted({int(part) for part in tokens.split(",")})
        except ValueError:
            raise ValueError(f"`--tokens` takes whole numbers with commas between them, got {tokens!r}") from None
    if len(sizes) < 2 or sizes[0] < 1:
        raise ValueError(f"`--tokens` needs at least two different sizes of at least 1, got {tokens!r}")
    points = [(size, longest) for size in sizes for longest in (min(size, context), max(1, min(size, context) // 4))]
    # The largest is measured once: the quarter-length one of the same size says nothing new.
    return points[:-1]


def _trust(max_tokens: int, measured: Sequence[Measurement], context: int) -> dict[str, Any]:
    """How far beyond the measurements a budget is, and where it is too far, what to measure instead of pasting it."""
    times = max_tokens / max(point.tokens for point in measured)
    if times <= _TOO_FAR:
        return {"times_measured": times}
    sizes = max(context, max_tokens // 8), max(2 * context, max_tokens // 4)
    advice = (
        f"That is {times:.0f} times the largest microbatch that was measured, too far for a straight line: measure "
        f"with `--tokens {sizes[0]},{sizes[1]}` first"
    )
    return {"times_measured": times, "sentence": None, "measure_first": advice}


def _forecast(arguments: argparse.Namespace, points: Sequence[tuple[int, int]]) -> str:
    """How long the measurements will take, to an order of magnitude."""
    from lit_rl.throughput import ModelShape, model_flops

    if arguments.check is not None:
        points = [*points, (arguments.check, min(arguments.check, arguments.context))]
    text = f"{len(points)} measurements, each in a fresh process that trains 3 microbatches"
    limit = f"one is given up after {arguments.timeout:g} s (`--timeout`)"
    try:
        shape = ModelShape.from_config(arguments.model)
    except ValueError:
        return f"{text}; {limit}"
    rate = _GPU_FLOPS if arguments.device == "cuda" else _CORE_FLOPS * (os.cpu_count() or 1)
    work = sum(model_flops(shape, [longest]).model * tokens / longest for tokens, longest in points)
    seconds = len(points) * _START_SECONDS + 3 * work / rate
    return f"{text}: about {max(1, round(seconds / 60)):,} min or a few times that; {limit}"


def _check(arguments: argparse.Namespace) -> None:
    for name in ("limit_gb", "check", "timeout"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"`--{name.replace('_', '-')}` must be greater than 0, got {value:g}")
    if arguments.context < 4:
        raise ValueError(f"`--context` must be at least 4 tokens, got {arguments.context}")
    if not 0 <= arguments.margin < 1:
        raise ValueError(f"`--margin` must be in [0, 1), got {arguments.margin}")
    if not 0 < arguments.scored_share <= 1:
        raise ValueError(f"`--scored-share` must be in (0, 1], got {arguments.scored_share}")
    from lit_rl.throughput.reading import resolve_config

    resolve_config(arguments.model)
    if arguments.device == "auto":
        import torch

        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"


def _measure(
    arguments: argparse.Namespace, points: Sequence[tuple[int, int]]
) -> tuple[list[Measurement], list[dict[str, Any]], int | None]:
    """What came back, what did not, and the device's memory where it is known."""
    from lit_rl.throughput.budget import Measurement

    measured: list[Measurement] = []
    failed: list[dict[str, Any]] = []
    limit: int | None = None
    for tokens, longest in points:
        answer = _probe(arguments, tokens, longest)
        if isinstance(answer, str):
            if not measured and not failed and "Error" in answer and "OutOfMemory" not in answer:
                raise ValueError(f"the first microbatch could not be trained: {answer}")
            failed.append({"tokens": tokens, "longest": longest, "error": answer})
            continue
        limit = answer["limit_bytes"]
        measured.append(Measurement(tokens=tokens, longest=longest, peak_bytes=answer["peak_bytes"]))
    if len(measured) < 3:
        raise ValueError(f"only {len(measured)} of the measurements came back: {failed}; try smaller `--tokens`")
    return measured, failed, limit


def _probe(arguments: argparse.Namespace, tokens: int, longest: int) -> dict[str, Any] | str:
    """One measurement in its own process, or why there is none."""
    probe = {
        "model": arguments.model,
        "tokens": tokens,
        "longest": longest,
        "device": arguments.device,
        "precision": arguments.precision,
        "checkpointing": arguments.checkpointing,
        "scored_share": arguments.scored_share,
    }
    command = [sys.executable, "-m", "lit_rl.commands.budget_probe", json.dumps(probe)]
    if not arguments.json:
        print(f"measuring {tokens:,} tokens in segments of {longest:,} ...", flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {arguments.timeout:g} s"
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}, which is how a system short of memory ends a process"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _compare(arguments: argparse.Namespace, fit: Any) -> dict[str, Any]:
    longest = min(arguments.check, arguments.context)
    answer = _probe(arguments, arguments.check, longest)
    if isinstance(answer, str):
        return {"tokens": arguments.check, "longest": longest, "error": answer}
    predicted = fit.predict(arguments.check, longest)
    return {
        "tokens": arguments.check,
        "longest": longest,
        "peak_bytes": answer["peak_bytes"],
        "predicted_bytes": predicted,
        "relative_error": round(predicted / answer["peak_bytes"] - 1, 6) + 0.0,
    }


def _render(report: dict[str, Any]) -> str:
    rows = [
        [
            f"{p['tokens']:,}",
            f"{p['longest']:,}",
            f"{p['peak_bytes'] / _GIGA:.3f}",
            f"{p['predicted_bytes'] / _GIGA:.3f}",
        ]
        for p in report["measurements"]
    ]
    fit, advice, check = report["fit"], report["recommendation"], report["check"]
    lines = [
        "",
        table(["tokens", "longest", "peak GB", "fit GB"], rows),
        *(
            f"  {f['tokens']:,} tokens in segments of {f['longest']:,}: not measured, {f['error']}"
            for f in report["failed"]
        ),
        "",
        f"peak = {fit['fixed'] / _GIGA:.3f} GB + {fit['per_token'] / 1e3:,.1f} kB x tokens + "
        f"{fit['per_longest'] / 1e3:,.1f} kB x longest (off by at most {fit['worst_error']:.1%})",
    ]
    if check and "error" in check:
        lines.append(f"check at {check['tokens']:,} tokens: not measured, {check['error']}")
    elif check:
        lines.append(
            f"check at {check['tokens']:,} tokens: predicted {check['predicted_bytes'] / _GIGA:.3f} GB, measured "
            f"{check['peak_bytes'] / _GIGA:.3f} GB ({check['relative_error']:+.1%})"
        )
    lines += [
        "",
        f"max_tokens = {advice['max_tokens']:,}: {advice['predicted_bytes'] / _GIGA:.2f} of "
        f"{advice['limit_bytes'] / _GIGA:.2f} GB, {advice['margin']:.0%} kept free.",
    ]
    if advice["sentence"] is None:
        lines.append(f"{advice['measure_first']}.")
    else:
        lines.append(f"Paste:\n  {advice['sentence']}")
    if advice["sentence"] is not None and advice["times_measured"] > _FAR:
        lines.append(
            f"This is {advice['times_measured']:.0f} times the largest microbatch that was measured; measure larger "
            "ones with `--tokens` before relying on it."
        )
    return "\n".join(lines)
