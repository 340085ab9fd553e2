"""14.3: the memory of logits, as arithmetic for every Qwen3 size and as measured heads."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from examples.benchmarks.head import Inputs, checkpointed, chunked, full, parse, peak_bytes
from examples.chapter.table import Row, Section, gigabytes
from lit_rl import LogProbHead, token_log_probs
from lit_rl.throughput import PRESETS, ModelShape, logits_bytes, memory_breakdown
from lit_rl.throughput.memory import Head

MICROBATCH = 32_768
HEADS: dict[Head, str] = {"full": "full logits", "chunked": "chunked", "recomputed": "chunked and recomputed"}
# The chapter's peaks through the output layer of Qwen3-0.6B, by head and tokens.
SOURCE: dict[tuple[Head, int], str] = {
    ("full", 4_096): "7.5 GB",
    ("full", 16_384): "29.9 GB",
    ("chunked", 4_096): "half of it",
    ("chunked", 16_384): "11.2 GB",
    ("recomputed", 4_096): "2.2 GB",
    ("recomputed", 16_384): "2.2 GB",
}


def one_pass(inputs: Inputs) -> None:
    """Loss and gradients of a token-local objective in one pass, `LogProbHead.loss`."""
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = inputs.weight
    head = LogProbHead(layer, chunk_tokens=inputs.chunk)
    head.loss(inputs.hidden, inputs.targets, lambda scores, part: inputs.upstream[part] * scores)[0].backward()


def two_pass(inputs: Inputs) -> None:
    """Log-probabilities first and gradients later, `token_log_probs`."""
    scores = token_log_probs(inputs.hidden, inputs.weight, inputs.targets, chunk_tokens=inputs.chunk)
    (scores.log_probs * inputs.upstream).sum().backward()


METHODS: dict[str, Callable[[Inputs], None]] = {
    "full logits": full,
    "chunked": chunked,
    "chunked and recomputed": checkpointed,
    "lit_rl, two passes": two_pass,
    "lit_rl, one pass": one_pass,
}


def arithmetic_rows() -> list[Row]:
    """Sizes that follow from the published configurations alone.

    Returns:
        Rows.
    """
    shapes = {name: ModelShape.from_config(name) for name in PRESETS if name.startswith("qwen3")}
    ratios = {name: shape.vocabulary / shape.hidden for name, shape in shapes.items()}
    small = [ratios[f"qwen3-{size}"] for size in ("0.6b", "1.7b", "4b", "8b")]
    vocabulary = shapes["qwen3-8b"].vocabulary
    rest = ", ".join(f"{name.removeprefix('qwen3-')} {ratio:.0f}" for name, ratio in ratios.items())
    rows = [
        Row("vocabulary", "151,936", f"{vocabulary:,}"),
        Row("float32 logits of one token", "0.6 MB", f"{4 * vocabulary / 1e6:.1f} MB"),
        Row("float32 logits of 32k tokens", "20 GB", gigabytes(4.0 * vocabulary * MICROBATCH)),
        Row("vocabulary over width, Qwen3-0.6B to 8B", "37 to 148", f"{min(small):.0f} to {max(small):.0f}", rest),
    ]
    hidden = shapes["qwen3-0.6b"].hidden
    for (head, tokens), source in SOURCE.items():
        found = gigabytes(logits_bytes(vocabulary, hidden, tokens, head=head))
        rows.append(Row(f"output layer of Qwen3-0.6B, {tokens:,} tokens, {HEADS[head]}", source, found, "arithmetic"))
    parts = by_part()
    fixed = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
    rows.append(
        Row(
            "8B on 8 GPUs, 32k tokens: weights, gradients and Adam of one GPU",
            "less than the logits",
            gigabytes(fixed),
            f"logits: full {gigabytes(parts['logits, full'])}, chunked {gigabytes(parts['logits, chunked'])}, "
            f"recomputed {gigabytes(parts['logits, recomputed'])}",
        )
    )
    return rows


def by_part() -> dict[str, float]:
    """Bytes on one GPU by component: an 8B model sharded over 8 GPUs, 32k tokens in the microbatch.

    Returns:
        Component to bytes, the logits once for each head.
    """
    shape = ModelShape.from_config("qwen3-8b")
    parts = memory_breakdown(shape, MICROBATCH).by_part()
    heads = {f"logits, {head}": memory_breakdown(shape, MICROBATCH, head=head).logits for head in HEADS}
    kept = ("parameters", "gradients", "optimizer", "gathered", "activations")
    return {name: parts[name] for name in kept} | heads


def settings(quick: bool) -> argparse.Namespace:
    """The problem that is measured: the chapter's on a GPU, a smaller one in float32 on a CPU."""
    if torch.cuda.is_available():
        return parse(["--tokens", "4096", "16384", "--chunk", "1024"])
    tokens = ["256", "512"] if quick else ["512", "1024", "2048"]
    return parse(["--tokens", *tokens, "--width", "128", "--chunk", "128", "--device", "cpu"])


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Most bytes held by forward and backward beyond inputs and their gradients, by method and number of tokens."""
    found: dict[str, dict[str, float]] = {name: {} for name in METHODS}
    for tokens in options.tokens:
        for name, method in METHODS.items():
            inputs = Inputs.make(options, tokens)
            peak = peak_bytes(lambda method=method, inputs=inputs: method(inputs), options)  # type: ignore[misc]
            gradients = [tensor.grad for tensor in (inputs.hidden, inputs.weight) if tensor.grad is not None]
            found[name][str(tokens)] = float(peak - sum(g.numel() * g.element_size() for g in gradients))
    return found


def reproduce(quick: bool) -> Section:
    """Computes the section.

    Args:
        quick: Measures smaller problems.

    Returns:
        Rows, the measured bytes and the components for the picture.
    """
    options = settings(quick)
    measured = measure(options)
    where = f"measured on {options.device.upper()}, width {options.width:,}, chunk {options.chunk}"
    section = Section("14.3", "The memory of logits", arithmetic_rows())
    if options.device == "cpu":
        section.rows.append(Row("measured on CUDA at these sizes", "see above", "not measured", "no GPU here"))
    sizes = " / ".join(f"{tokens:,}" for tokens in options.tokens)
    for name, by_tokens in measured.items():
        values = " / ".join(f"{value / 1e6:,.0f}" for value in by_tokens.values())
        why = "grows with the tokens" if name in ("full logits", "chunked") else "does not"
        section.rows.append(Row(f"{name}, {sizes} tokens", "-", f"{values} MB", f"{why}; {where}"))
    problem: dict[str, Any] = {"width": options.width, "chunk": options.chunk, "device": options.device}
    section.data = {"measured": measured, "problem": problem, "by_part": by_part()}
    return section
