"""14.1: what padding wastes, what packing saves, and the two mistakes that packing invites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from examples.chapter.table import Row, Section, percent
from lit_rl import CausalLMPolicy, PackedBatch, Trajectory, collate, pack_sequences
from lit_rl.testing import tiny_policy_model
from lit_rl.throughput import padded_share

ROW_TOKENS = 256
GYM = "another gym and another policy"


def reproduce(policy: CausalLMPolicy, episodes: Sequence[Trajectory]) -> Section:
    """Computes the section.

    Args:
        policy: The policy that played the episodes.
        episodes: 64 trajectories.

    Returns:
        Rows, and the two layouts for the picture.
    """
    lengths = [len(episode) for episode in episodes]
    rows = pack_sequences(lengths, ROW_TOKENS)
    padded, packed = collate(episodes, layout="padded"), collate(episodes, rows=rows, row_tokens=ROW_TOKENS)
    share = padded_share(lengths, len(lengths))
    difference = differences(policy, episodes, rows)
    learned = learned_position_differences(episodes, rows)
    section = Section("14.1", "Padding and its waste")
    section.rows = [
        Row("shortest, median, longest episode", "10, 18, 149 tokens", _spread(lengths), GYM),
        Row("positions of the padded batch", "9,536", f"{padded.num_positions:,}", GYM),
        Row("real tokens", "2,472", f"{padded.num_tokens:,}", GYM),
        Row("padding of the padded batch", "74%", percent(share), GYM),
        Row("rows of 256 when packed", "10", str(len(rows)), GYM),
        Row(
            "fill of these rows",
            "96.6%",
            percent(packed.num_tokens / packed.num_positions),
            "fewer tokens, so the last row weighs more",
        ),
        Row("fill of lit_rl's own microbatch (one flat row)", "-", _own_fill(episodes), "no row has to be filled up"),
        Row("plain causal mask, running positions", "6.4 nats", _nats(difference["running"]), GYM),
        Row("plain causal mask, restarted positions", "1.7 nats", _nats(difference["restarted"]), _ROTARY),
        Row("block mask, running positions", "-", f"{difference['block_running']:.1e} nats", _RELATIVE),
        Row("the same on learned positions (random weights)", "-", _nats(learned), "here the mistake shows"),
        Row("block mask, restarted positions", "1.4e-06 nats", f"{difference['right']:.1e} nats", "float32 rounding"),
    ]
    section.data = {
        "padded": _layout(padded),
        "packed": _layout(packed),
        "largest_difference_nats": difference | {"learned_positions": learned},
        "lengths": lengths,
    }
    return section


_ROTARY = "rotary positions here, learned ones there: the leak is nearly all of the damage"
_RELATIVE = "rotary attention sees distances only, so with the right mask it cannot tell"


def variants(batch: PackedBatch) -> Mapping[str, PackedBatch]:
    """The same packed rows read in four ways.

    A row that is declared to be one segment gets a plain causal mask: its segments see each other.

    Args:
        batch: Packed rows.

    Returns:
        "running" and "restarted" (plain causal mask), "block_running" and "right" (block mask), by their positions.
    """
    count, width = batch.input_ids.shape
    running = torch.arange(width).expand(count, width).contiguous()
    leaky = batch.replace(
        segment_starts=torch.arange(count) * width,
        segment_lengths=torch.full((count,), width),
        trajectory_index=torch.arange(count),
    )
    return {
        "running": leaky.replace(position_ids=running),
        "restarted": leaky,
        "block_running": batch.replace(position_ids=running),
        "right": batch,
    }


@torch.no_grad()
def alone(policy: CausalLMPolicy, episodes: Sequence[Trajectory], order: Sequence[int]) -> Tensor:
    """[M] log-probabilities in nats of the scored tokens, each episode in a pass of its own."""
    return torch.cat([policy(collate([episodes[index]], layout="padded")).log_probs for index in order])


@torch.no_grad()
def differences(
    policy: CausalLMPolicy, episodes: Sequence[Trajectory], rows: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Largest difference in nats between packed and unpacked log-probabilities, for each of `variants`.

    Args:
        policy: The policy.
        episodes: The trajectories.
        rows: Which of them stand in which row.

    Returns:
        Variant to nats.
    """
    reference = alone(policy, episodes, [index for row in rows for index in row])
    batch = collate(episodes, rows=rows, row_tokens=ROW_TOKENS)
    return {
        name: float((policy(variant).log_probs - reference).abs().max()) for name, variant in variants(batch).items()
    }


def learned_position_differences(episodes: Sequence[Trajectory], rows: Sequence[Sequence[int]]) -> float:
    """The damage of running positions alone, in nats, on a random GPT-2 with learned positions."""
    vocabulary = 1 + max(int(episode.token_ids.max()) for episode in episodes)
    room: dict[str, Any] = {"n_positions": ROW_TOKENS, "max_position_embeddings": ROW_TOKENS}
    policy = CausalLMPolicy(tiny_policy_model("gpt2", vocab_size=vocabulary, **room), layout="packed")
    return differences(policy, episodes, rows)["block_running"]


def _layout(batch: PackedBatch) -> dict[str, Any]:
    """What stands at each position: 0 padding, 1 read, 2 sampled by the policy; and where segments start."""
    kind = (batch.segment_ids >= 0).int() + batch.grid(torch.ones(batch.num_scored)).int()
    return {"kind": ["".join(map(str, row)) for row in kind.tolist()], "starts": batch.segment_starts.tolist()}


def _own_fill(episodes: Sequence[Trajectory]) -> str:
    batch = collate(episodes)
    return percent(batch.num_tokens / batch.num_positions)


def _spread(lengths: Sequence[int]) -> str:
    return f"{min(lengths)}, {median(lengths):g}, {max(lengths)} tokens"


def _nats(value: float) -> str:
    return f"{value:.1f} nats"
