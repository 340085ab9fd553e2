"""The log-probability head against the ways around it: time, and memory beyond inputs and gradients.

    python examples/benchmarks/head.py --json head.json --picture head.png
    python examples/benchmarks/head.py --tokens 2048 --rows full products two_pass one_pass

Every row computes the same thing, forward and backward: the gradients of `sum_i upstream_i * log p(target_i)` with
respect to hidden states and output weight. `products` is the limit: the three matrix products and nothing else, made
by `torch.mm`. The last rows show what is saved where few tokens are scored, and where most gradients are zero.

On CPU it runs in float32, and with CUDA in bfloat16, with rows for `liger-kernel` and `cut-cross-entropy` if they are
installed. Times are the best of `--repeats` rounds after one that measures memory. Rows that would not fit into the
memory that is free are left out, and said so. Another program on the same cores makes every time longer, and most of
all those of rows with many small steps: measure with `--threads 1` then, and compare the CPU seconds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lit_rl.policy.head import LogProbHead
from lit_rl.policy.head_products import multiply
from lit_rl.policy.head_tiles import CHUNK_BYTES


@dataclass
class Inputs:
    """One problem: hidden states [M, D] and weight [V, D] with gradient, targets [M], upstream gradients [M]."""

    hidden: Tensor
    weight: nn.Parameter
    targets: Tensor
    upstream: Tensor
    chunk: int

    @classmethod
    def make(cls, options: argparse.Namespace, tokens: int) -> Inputs:
        """Random inputs of the asked-for size."""
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(options.vocabulary, options.width, generator=generator) * 0.02
        hidden = torch.randn(tokens, options.width, generator=generator)
        targets = torch.randint(0, options.vocabulary, (tokens,), generator=generator)
        upstream = torch.randn(tokens, generator=generator)
        hidden, weight = (tensor.to(options.device, options.dtype) for tensor in (hidden, weight))
        targets, upstream = (tensor.to(options.device) for tensor in (targets, upstream))
        return cls(hidden.requires_grad_(), nn.Parameter(weight), targets, upstream, options.chunk)

    def chunks(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Hidden states, targets and upstream gradients, a chunk at a time."""
        parts = [tensor.split(self.chunk) for tensor in (self.hidden, self.targets, self.upstream)]
        return list(zip(*parts, strict=True))

    def head(self) -> LogProbHead:
        """The head on the weight, with its default settings."""
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = self.weight
        return LogProbHead(layer)


def _weighted(hidden: Tensor, weight: Tensor, targets: Tensor, upstream: Tensor) -> Tensor:
    log_probs = functional.linear(hidden, weight).float().log_softmax(-1)
    return (log_probs.gather(1, targets[:, None])[:, 0] * upstream).sum()


def full(inputs: Inputs) -> None:
    _weighted(inputs.hidden, inputs.weight, inputs.targets, inputs.upstream).backward()


def chunked(inputs: Inputs) -> None:
    torch.stack([_weighted(h, inputs.weight, t, u) for h, t, u in inputs.chunks()]).sum().backward()


def checkpointed(inputs: Inputs) -> None:
    losses = [
        checkpoint(_weighted, hidden, inputs.weight, targets, upstream, use_reentrant=False)
        for hidden, targets, upstream in inputs.chunks()
    ]
    torch.stack(losses).sum().backward()


def linear_cross_entropy(inputs: Inputs) -> None:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=inputs.chunk)
    function, (hidden, weight, targets) = (
        functional.linear_cross_entropy,
        (inputs.hidden, inputs.weight, inputs.targets),
    )
    function(hidden, weight, targets, reduction="sum", options=options).backward()


def liger(inputs: Inputs) -> None:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    LigerFusedLinearCrossEntropyLoss(reduction="sum")(inputs.weight, inputs.hidden, inputs.targets).backward()


def cut_cross_entropy(inputs: Inputs) -> None:
    from cut_cross_entropy import linear_cross_entropy as cce

    losses = cce(inputs.hidden, inputs.weight, inputs.targets, reduction="none")
    (losses * -inputs.upstream).sum().backward()


def two_pass(inputs: Inputs) -> None:
    (inputs.head()(inputs.hidden, inputs.targets).log_probs * inputs.upstream).sum().backward()


def one_pass(inputs: Inputs) -> None:
    loss, _ = inputs.head().loss(
        inputs.hidden, inputs.targets, lambda log_probs, part: inputs.upstream[part] * log_probs
    )
    loss.backward()


def quarter_scored(inputs: Inputs) -> None:
    hidden = inputs.hidden[::4]
    two_pass(replace(inputs, hidden=hidden, targets=inputs.targets[::4], upstream=inputs.upstream[::4]))


def four_fifths_zero(inputs: Inputs) -> None:
    live = torch.arange(len(inputs.targets), device=inputs.targets.device) % 5 == 0
    two_pass(replace(inputs, upstream=inputs.upstream * live))


@torch.no_grad()
def products_alone(inputs: Inputs, product: Callable[[Tensor, Tensor], Tensor], rows: int, columns: int) -> None:
    for hidden in inputs.hidden.split(rows):
        for weight in inputs.weight.split(columns):
            logits = product(hidden, weight.t()).to(hidden.dtype)
            product(logits, weight)
            product(logits.t(), hidden)


ROWS: dict[str, tuple[str, Callable[[Inputs], None]]] = {
    "full": ("full logits", full),
    "products": ("three products alone (limit)", lambda x: products_alone(x, torch.mm, 2048, len(x.weight))),
    "head_products": ("the same, made as the head makes them", lambda x: products_alone(x, multiply, 1024, 6144)),
    "chunked": ("chunked", chunked),
    "checkpointed": ("chunked and checkpointed", checkpointed),
    "linear_cross_entropy": ("torch linear_cross_entropy, chunked", linear_cross_entropy),
    "liger": ("liger-kernel", liger),
    "cut_cross_entropy": ("cut-cross-entropy", cut_cross_entropy),
    "two_pass": ("head, two passes", two_pass),
    "one_pass": ("head, one pass", one_pass),
    "quarter_scored": ("head, two passes, 25% scored", quarter_scored),
    "four_fifths_zero": ("head, two passes, 80% zero upstream", four_fifths_zero),
}
#: Logits that a row holds at its peak, in copies of all of them.
COPIES = {"full": 3.0, "chunked": 2.0}


def runs_here(row: str, options: argparse.Namespace) -> bool:
    """Whether a row's library is installed; the two others' kernels need CUDA."""
    modules = {"liger": "liger_kernel", "cut_cross_entropy": "cut_cross_entropy"}
    return row not in modules or (options.device == "cuda" and importlib.util.find_spec(modules[row]) is not None)


def free_bytes(options: argparse.Namespace) -> int:
    if options.device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(run: Callable[[], None], options: argparse.Namespace) -> int:
    """Most bytes held at once during a run, beyond those held before it."""
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def fresh(inputs: Inputs, row: str) -> Callable[[], None]:
    """A run of a row that makes its gradients anew."""
    inputs.hidden.grad = inputs.weight.grad = None
    gc.collect()
    return lambda: ROWS[row][1](inputs)


def extra_bytes(inputs: Inputs, row: str, options: argparse.Namespace) -> float:
    """Peak memory of a run beyond the gradients that it leaves."""
    peak = peak_bytes(fresh(inputs, row), options)
    left = [tensor.grad for tensor in (inputs.hidden, inputs.weight) if tensor.grad is not None]
    return float(peak - sum(gradient.numel() * gradient.element_size() for gradient in left))


def timed(inputs: Inputs, row: str, options: argparse.Namespace) -> tuple[float, float]:
    """Wall seconds and CPU seconds of a run."""
    run = fresh(inputs, row)
    start, cpu_start = time.perf_counter(), time.process_time()
    run()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu_start


def measure(rows: list[str], inputs: Inputs, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Memory of a first run of each row, and the best time of further ones, made in turns."""
    results = {row: {"extra_bytes": extra_bytes(inputs, row, options)} for row in rows}
    times: dict[str, list[tuple[float, float]]] = {row: [] for row in rows}
    for _ in range(options.repeats):
        for row in rows:
            times[row].append(timed(inputs, row, options))
    for row, result in results.items():
        result["seconds"], result["cpu_seconds"] = (min(column) for column in zip(*times[row], strict=True))
    return results


def table(results: dict[str, dict[str, float]], tokens: int, options: argparse.Namespace) -> str:
    """One line per row, with ratios to full logits, to the products alone, and to a chunk of logits."""
    chunk = min(tokens, max(1, CHUNK_BYTES // (4 * options.vocabulary))) * 4 * options.vocabulary

    lines = [
        f"{tokens:,} tokens, vocabulary {options.vocabulary:,}, width {options.width:,}, {options.dtype}, "
        f"{options.device}; one chunk of logits is {chunk / 1e9:.2f} GB",
        f"{'':38}{'s':>8}{'/full':>8}{'/limit':>8}{'/two':>8}{'CPU s':>8}{'/full':>8}{'/two':>8}{'GB':>8}{'/chunk':>8}",
    ]
    for row, result in results.items():
        cells = [f"{ROWS[row][0]:38}"]
        for key, others in (("seconds", ("full", "products", "two_pass")), ("cpu_seconds", ("full", "two_pass"))):
            ratios = [result[key] / results[other][key] if other in results else math.nan for other in others]
            cells += [f"{value:8.2f}" for value in (result[key], *ratios)]
        cells += [f"{result['extra_bytes'] / 1e9:8.3f}{result['extra_bytes'] / chunk:8.2f}"]
        lines.append("".join(cells))
    return "\n".join(lines)


def draw(results: dict[int, dict[str, dict[str, float]]], path: Path) -> None:
    """Time and memory by number of tokens, one line per row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
    measured = [row for row in ROWS if any(row in rows for rows in results.values())]
    for index, row in enumerate(measured):
        points = [(tokens, rows[row]) for tokens, rows in results.items() if row in rows]
        style = {"marker": "os^"[index // 10], "linestyle": ":-"["head," in ROWS[row][0]], "label": ROWS[row][0]}
        for axis, key, unit in ((axes[0], "seconds", 1.0), (axes[1], "extra_bytes", 1e9)):
            axis.plot([t for t, _ in points], [r[key] / unit for _, r in points], **style)
    for axis, title in ((axes[0], "forward and backward, s"), (axes[1], "memory beyond inputs and gradients, GB")):
        axis.set(xlabel="tokens", title=title, xscale="log", yscale="log")
        axis.set_xticks(list(results), [f"{tokens:,}" for tokens in results])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.25)
    axes[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk, for the rows that are not the head")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    options.dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    return options


def main(arguments: list[str] | None = None) -> dict[int, dict[str, dict[str, float]]]:
    """Measure, print the tables, and write what was asked for."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    results: dict[int, dict[str, dict[str, float]]] = {}
    for tokens in options.tokens:
        inputs = Inputs.make(options, tokens)
        needed = {row: COPIES.get(row, 0.0) * tokens * options.vocabulary * 4 for row in options.rows}
        too_large = [row for row in options.rows if needed[row] > 0.9 * free_bytes(options)]
        for row in too_large:
            print(f"left out at {tokens:,} tokens: {ROWS[row][0]}, which needs {needed[row] / 1e9:.1f} GB", flush=True)
        rows = [row for row in options.rows if row not in too_large and runs_here(row, options)]
        results[tokens] = measure(rows, inputs, options)
        print(table(results[tokens], tokens, options), end="\n\n", flush=True)
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, "results": results}, indent=2))
    if options.picture is not None:
        draw(results, options.picture)
    return results


if __name__ == "__main__":
    main()
