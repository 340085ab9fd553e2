"""The few short random segments that isolation is measured with, arranged in every way that is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lit_rl.data.batch import Layout, PackedBatch
from lit_rl.data.collate import collate
from lit_rl.policy.head import LogProbHead
from lit_rl.trajectory import Trajectory

# One of a single token, all of them short enough for any table of positions.
LENGTHS = (3, 1, 4, 2)


class Isolated(Protocol):
    """What isolation is measured on: a policy."""

    model: nn.Module
    head: LogProbHead

    def __call__(self, batch: PackedBatch) -> Any:
        """Returns an object with `log_probs` [M] in nats."""

    def embedding(self) -> nn.Module | None:
        """The module that turns ids into vectors, if it is known."""

    def reference_attention(self) -> Any:
        """A context in which the model runs the attention it came with."""


@dataclass(frozen=True)
class Probe:
    """The same few random segments, arranged in every way that is compared.

    Args:
        batch: In the layout in question.
        changed: The same with every token of one segment replaced.
        first: `batch`, but every prediction is asked for its segment's first token instead of the one that follows.
        future: `first` with the last token of every segment replaced: no prediction may look at it, not even its own.
        padded: In rows of one, padded on the right.
        alone: Each segment in a microbatch of its own, without padding.
        replaced: Which segment `changed` replaces: one with neighbours on both sides.
    """

    batch: PackedBatch
    changed: PackedBatch
    first: PackedBatch
    future: PackedBatch
    padded: PackedBatch
    alone: list[PackedBatch]
    replaced: int


def positions_of(batch: PackedBatch, segments: list[int]) -> list[int]:
    """Flat indices of the tokens of some of a batch's segments."""
    starts, lengths = batch.segment_starts.tolist(), batch.segment_lengths.tolist()
    return [p for s in segments for p in range(starts[s], starts[s] + lengths[s])]


def make_probe(
    policy: Isolated, layout: Layout, *, seed: int, device: torch.device, lengths: Sequence[int] = LENGTHS
) -> Probe:
    """Draws the segments and arranges them.

    Args:
        policy: The policy they are for: it decides on the vocabulary.
        layout: How the microbatch in question is laid out.
        seed: Of the random tokens.
        device: Where the batches go.
        lengths: Tokens of each segment; at least two segments, two of which have at least 2 tokens.

    Raises:
        ValueError: `lengths` has too little in it to be measured.
    """
    if sum(length >= 2 for length in lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"`lengths` needs two segments of at least 2 tokens and none without any, got {list(lengths)}")
    generator = torch.Generator().manual_seed(seed)
    vocabulary = vocabulary_of(policy)
    sizes = [*lengths]
    middle = len(sizes) // 2
    widths = {size for parameter in policy.model.parameters() for size in parameter.shape}
    while sum(sizes) in widths:  # A row as long as a feature is wide could not be told from it.
        sizes[middle] += 1
    ids = [torch.randint(vocabulary, (size,), generator=generator) for size in sizes]
    # Adding 1 to vocabulary - 1 replaces a token by any other one.
    shifts = [torch.randint(1, vocabulary, (size,), generator=generator) for size in sizes]
    last = [(torch.arange(size) == size - 1).long() for size in sizes]
    same = [_trajectory(x) for x in ids]
    changed = [_trajectory((x + shifts[i] * (i == middle)) % vocabulary) for i, x in enumerate(ids)]
    future = [_trajectory((x + shift * end) % vocabulary) for x, shift, end in zip(ids, shifts, last, strict=True)]
    return Probe(
        batch=collate(same, layout=layout).to(device),
        changed=collate(changed, layout=layout).to(device),
        first=_asked_for_first(collate(same, layout=layout)).to(device),
        future=_asked_for_first(collate(future, layout=layout)).to(device),
        padded=collate(same, layout="padded").to(device),
        alone=[collate([trajectory], layout="padded").to(device) for trajectory in same],
        replaced=middle,
    )


def _trajectory(ids: Tensor) -> Trajectory:
    return Trajectory(ids, torch.ones(len(ids), dtype=torch.bool), 0.0)


def _asked_for_first(batch: PackedBatch) -> PackedBatch:
    # A replaced last token changes what its own prediction is asked for; the first token of a segment stays.
    return batch.replace(scored=batch.segment_starts[batch.scored_segments])


def vocabulary_of(policy: Isolated) -> int:
    """How many token ids the policy both reads and gives a probability."""
    config = getattr(policy.model, "config", None)
    layer: Any = policy.head.output_layer
    rows = getattr(layer, "out_features", None) or getattr(layer, "num_embeddings", None)
    read = getattr(policy.embedding(), "num_embeddings", None) or getattr(config, "vocab_size", None)
    return max(2, min(int(size) for size in (rows, read, policy.head.vocab_size, 2**31) if size))


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
