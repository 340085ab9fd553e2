"""`lit-rl plan`: what an iteration costs before it is rented: rates, GPU-hours, memory, waste, what to change."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Estimates rates, GPU-hours, memory and waste of one iteration and of a run, and lists the cheapest changes.
Every input that you do not give is an assumption and is printed as one."""

EXAMPLES = """\
examples:
  lit-rl plan qwen3-8b --gpu h200 --gpus 8
  lit-rl plan ./my-model --gpu h100 --tokens 8000,24000 --pass-rate 0.6 --json
  lit-rl plan qwen3-8b --gpu h200 --what-if context=65536 --what-if context=65536,cache_scale=0.25
  lit-rl plan ./config.json --peak-tflops 500 --bandwidth-tb 2 --memory-gb 64
"""

# Command-line options that set the field of `Assumptions` of the same name: type and help.
_ASSUMPTIONS: dict[str, tuple[type, str]] = {
    "tasks": (int, "tasks per iteration"),
    "group": (int, "trajectories per task"),
    "policy_share": (float, "share of tokens that the policy samples"),
    "prompt_tokens": (float, "tokens that a group's trajectories start with"),
    "decode_batch": (int, "sequences decoded together on one GPU"),
    "context": (int, "mean tokens in the cache of a decoding sequence"),
    "busy_fraction": (float, "share of rollout time in which the engine decodes"),
    "prefill_mfu": (float, "utilization of prefill"),
    "scoring_passes": (int, "forward passes for old or reference log-probs"),
    "scoring_mfu": (float, "utilization of these passes"),
    "update_passes": (int, "times each trajectory is trained on"),
    "train_mfu": (float, "utilization of the update"),
    "trained_share": (float, "share of tokens that scoring and update see"),
    "weight_sync_seconds": (float, "seconds per iteration in which all GPUs wait"),
    "gpus": (int, "GPUs of the run"),
    "cache_scale": (float, "size of the KV cache relative to the model's own"),
    "cache_bits": (float, "bits per cached value"),
    "weight_bits": (float, "bits per weight while decoding"),
    "parameters": (float, "parameters to assume in first-order counting, such as 8.2e9"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `lit-rl plan`.

    Args:
        parser: Of the subcommand.
    """
    parser.description, parser.epilog = DESCRIPTION, EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="local model folder, config.json, or a built-in name such as qwen3-8b")
    device = parser.add_argument_group("hardware")
    device.add_argument("--gpu", help="name in the table, such as h200 or b200")
    device.add_argument("--peak-tflops", type=float, help="dense bf16 peak of a device that is not in the table")
    device.add_argument("--bandwidth-tb", type=float, help="its memory bandwidth, TB/s")
    device.add_argument("--memory-gb", type=float, help="its memory, GB")
    episode = parser.add_argument_group("assumptions", "what is not given is assumed, and labelled so in the output")
    episode.add_argument("--tokens", help="tokens per trajectory: lengths.json, MEAN, or MEAN,P95 (log-normal)")
    for name, (kind, text) in _ASSUMPTIONS.items():
        episode.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    episode.add_argument("--measured", metavar="CSV", help="metrics.csv of a pilot run; replaces what it measured")
    episode.add_argument("--pass-rate", type=float, help="mean pass rate; gives the share of zero-advantage groups")
    run = parser.add_argument_group("run and memory")
    run.add_argument("--iterations", type=int, default=300, help="iterations of the run (default %(default)s)")
    run.add_argument("--max-tokens", type=int, help="token budget of a microbatch (default 32768, or the longest)")
    run.add_argument("--shards", type=int, help="GPUs that share weights and optimizer (default: all of them)")
    run.add_argument("--precision", default="bf16-mixed", choices=["bf16-mixed", "bf16-true", "32-true"])
    run.add_argument("--checkpointing", default="selective", choices=["none", "selective", "full"])
    run.add_argument("--attention", default="full_square", choices=["full_square", "causal_half"])
    output = parser.add_argument_group("output")
    output.add_argument(
        "--what-if", action="append", default=[], metavar="NAME=VALUE[,...]", help="compare with other assumptions"
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of tables")
    output.add_argument("--plot", metavar="FILE", help="also draw rates, GPU-hours and memory (.png, .svg, .pdf)")


def run(arguments: argparse.Namespace) -> int:
    """Computes and prints the plan.

    Args:
        arguments: Parsed options.

    Returns:
        Exit status: 0, or 2 with one line on stderr for an input that cannot work.
    """
    from lit_rl.commands.plan_report import build_report
    from lit_rl.commands.plan_text import render

    report = build_report(arguments)
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    if arguments.plot:
        from lit_rl.commands.plan_figures import draw

        draw(report, Path(arguments.plot))
        if not arguments.json:
            print(f"\nFigure: {arguments.plot}")
    return 0


def given_assumptions(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Assumptions` that were given on the command line, lengths apart."""
    return {name: value for name in _ASSUMPTIONS if (value := getattr(arguments, name)) is not None}


def parse_what_if(text: str) -> dict[str, Any]:
    """Fields of `Assumptions` from "NAME=VALUE,NAME=VALUE".

    Raises:
        ValueError: Not of that form, or no such assumption.

    Example:
        >>> parse_what_if("context=65536,cache_scale=0.25")
        {'context': 65536, 'cache_scale': 0.25}
    """
    from lit_rl.throughput.hours import Assumptions

    known = [item.name for item in fields(Assumptions) if item.name != "lengths"]
    changes: dict[str, Any] = {}
    for part in text.split(","):
        name, sign, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or name not in known:
            raise ValueError(f"`--what-if` takes NAME=VALUE with a name out of {', '.join(known)}; got {part!r}")
        try:
            changes[name] = value == "true" if value in ("true", "false") else _number(value)
        except ValueError:
            raise ValueError(f"`--what-if {name}` needs a number, true or false; got {value!r}") from None
    return changes


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value
