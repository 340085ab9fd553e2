"""14.3: the memory of logits, as arithmetic for every Qwen3 size and as measured heads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

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
    peaks = {name: logits_bytes(vocabulary, shape.hidden, MICROBATCH) for name, shape in shapes.items()}
    by_size = ", ".join(f"{name.removeprefix('qwen3-')} {gigabytes(peak)}" for name, peak in peaks.items())
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
    every = f"{gigabytes(min(peaks.values()))} to {gigabytes(max(peaks.values()))}"
    rows.append(Row("recomputed head at 32k tokens, every Qwen3 size", "-", every, by_size))
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
    for tokens, name in tqdm([(tokens, name) for tokens in options.tokens for name in METHODS], desc="14.3 heads"):
        inputs = Inputs.make(options, tokens)
        with silent_errors():
            peak = peak_bytes(partial(METHODS[name], inputs), options)
        gradients = [tensor.grad for tensor in (inputs.hidden, inputs.weight) if tensor.grad is not None]
        found[name][str(tokens)] = float(peak - sum(g.numel() * g.element_size() for g in gradients))
    return found


@contextmanager
def silent_errors() -> Iterator[None]:
    """Keeps the lines that torch's profiler prints at each start from tearing the progress bar."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def measured_rows(data: Mapping[str, Any]) -> list[Row]:
    """What was measured, next to the chapter's peaks where the sizes are the chapter's.

    Args:
        data: Of the section: "measured" and "problem".

    Returns:
        Rows.
    """
    problem, rows = data["problem"], []
    where = f"measured on {problem['device'].upper()}, width {problem['width']:,}, chunks of {problem['chunk']}"
    if problem["device"] == "cpu":
        rows.append(Row("measured on CUDA at the sizes above", "as above", "not measured", "no GPU on this machine"))
    for name, by_tokens in data["measured"].items():
        sizes = " / ".join(f"{int(tokens):,}" for tokens in by_tokens)
        values = " / ".join(f"{value / 1e6:,.0f}" for value in by_tokens.values())
        grows = "grows with the tokens" if name in ("full logits", "chunked") else "does not grow"
        rows.append(Row(f"{name}, {sizes} tokens", "-", f"{values} MB", f"{grows}; {where}"))
    return rows


def reproduce(quick: bool) -> Section:
    """Computes the section.

    Args:
        quick: Measures smaller problems.

    Returns:
        Rows, the measured bytes and the components for the picture.
    """
    options = settings(quick)
    section = Section("14.3", "The memory of logits")
    section.data = {
        "measured": measure(options),
        "problem": {"width": options.width, "chunk": options.chunk, "device": options.device},
        "by_part": by_part(),
    }
    section.rows = arithmetic_rows() + measured_rows(section.data)
    return section
