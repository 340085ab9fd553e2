"""Forward and backward over one microbatch, laid out in three ways: what padding and block masks cost.

    python examples/benchmarks/packed_forward.py --json packed_forward.json

The same segments go through the same model (a Llama of 4 layers, width 256) as

- segment attention: one flat row, one attention per segment (what `CausalLMPolicy` trains with);
- padded batch: one row per segment, padded to the longest;
- dense block mask: one flat row, the model's own attention under the [L, L] mask that transformers builds.

The loss is the mean square of the hidden states at real tokens, so the output layer is left out. Times are the best
of `--repeats` interleaved runs; a machine that is busy with other things makes every one of them longer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lit_rl import CausalLMPolicy, Trajectory, collate
from lit_rl.data.batch import PackedBatch
from lit_rl.policy.attention import own_attention
from lit_rl.testing import tiny_policy_model


def draw_lengths(segments: int, tokens: int) -> list[int]:
    """Right-skewed lengths, as agents' trajectories have them, that add up to `tokens`."""
    quantiles = (torch.arange(segments) + 0.5) / segments
    shape = torch.exp(0.45 * torch.special.ndtri(quantiles))
    lengths = (shape / shape.sum() * tokens).floor().clamp(min=1).long()
    lengths[-1] += tokens - int(lengths.sum())
    return lengths[torch.randperm(segments, generator=torch.Generator().manual_seed(0))].tolist()


def real_hidden_states(policy: CausalLMPolicy, batch: PackedBatch) -> Tensor:
    """[tokens, width] hidden states of the real tokens, in the order of the segments."""
    return policy.hidden_states(batch).flatten(0, 1)[(batch.segment_ids >= 0).flatten()]


def time_once(run: Callable[[], Tensor], policy: CausalLMPolicy) -> tuple[float, float]:
    """Seconds of one forward and one backward pass."""
    policy.zero_grad()
    start = time.perf_counter()
    loss = run().square().mean()
    middle = time.perf_counter()
    loss.backward()
    return middle - start, time.perf_counter() - middle


def best_of(
    runs: dict[str, Callable[[], Tensor]], policy: CausalLMPolicy, repeats: int
) -> dict[str, tuple[float, float]]:
    """The fastest run of each, taken in turns so that a busy moment hits all of them alike."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            times[name].append(time_once(run, policy))
    return {name: min(pairs[1:], key=sum) for name, pairs in times.items()}


def build_policy(options: argparse.Namespace) -> CausalLMPolicy:
    """A Llama with random weights of the asked-for size, packed by segment attention."""
    heads = options.width // 64
    sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width, "head_dim": 64}
    sizes |= {"num_hidden_layers": options.layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    model = tiny_policy_model("llama", **sizes, initializer_range=0.02, max_position_embeddings=options.tokens)
    policy = CausalLMPolicy(model, layout="packed")
    policy.resolve_layout()
    return policy


def measure(policy: CausalLMPolicy, lengths: list[int], repeats: int) -> list[dict[str, float | str]]:
    """One row of figures per layout; the first is what the others are compared with."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(32, (length,), generator=generator) for length in lengths]
    trajectories = [Trajectory(x, [True] * len(x), 0.0) for x in ids]
    packed, padded = collate(trajectories), collate(trajectories, layout="padded")

    def dense_block_mask() -> Tensor:
        with own_attention(policy.model):
            return real_hidden_states(policy, packed)

    runs: dict[str, Callable[[], Tensor]] = {
        "segment attention": lambda: real_hidden_states(policy, packed),
        "padded batch": lambda: real_hidden_states(policy, padded),
        "dense block mask": dense_block_mask,
    }
    with torch.no_grad():
        reference = runs["segment attention"]()
        differences = {name: float((run() - reference).abs().max()) for name, run in runs.items()}
    times = best_of(runs, policy, repeats)
    first = sum(times["segment attention"])
    return [
        {
            "layout": name,
            "positions": (padded if name == "padded batch" else packed).num_positions,
            "forward_s": forward,
            "backward_s": backward,
            "total_s": forward + backward,
            "ratio": (forward + backward) / first,
            "largest_difference": differences[name],
        }
        for name, (forward, backward) in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=32, help="number of trajectories")
    parser.add_argument("--tokens", type=int, default=5390, help="real tokens in the microbatch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="hidden size, a multiple of 64: heads are 64 wide")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, after one to warm up")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()

    lengths = draw_lengths(options.segments, options.tokens)
    rows = measure(build_policy(options), lengths, options.repeats)
    print(
        f"{options.segments} segments, {options.tokens} tokens (longest {max(lengths)}), {options.layers} layers of "
        f"width {options.width}, {torch.get_num_threads()} threads, float32\n"
    )
    columns = {"forward_s": "forward s", "backward_s": "backward s", "total_s": "total s", "ratio": "ratio"}
    print(
        f"{'layout':<20}{'positions':>10}"
        + "".join(f"{title:>12}" for title in columns.values())
        + f"{'difference':>12}"
    )
    for row in rows:
        figures = "".join(f"{row[column]:>12.3f}" for column in columns)
        print(f"{row['layout']:<20}{row['positions']:>10}{figures}{row['largest_difference']:>12.1e}")
    if options.json is not None:
        figures_of_run = {"threads": torch.get_num_threads(), "lengths": lengths, "rows": rows}
        options.json.write_text(json.dumps(figures_of_run, indent=2) + "\n")


if __name__ == "__main__":
    main()
