"""One microbatch: segments laid out in rows, and everything the loss needs about each scored token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

Layout = Literal["packed", "padded"]
_PER_SCORED_TOKEN = (
    "scored",
    "predictors",
    "scored_segments",
    "temperature",
    "advantages",
    "weights",
    "sampler_log_probs",
    "old_log_probs",
    "reference_log_probs",
)


class PackedBatch:
    """One microbatch: R rows of L positions holding S segments with M scored tokens. Immutable.

    A *flat index* is `row * L + column`. What an objective reads has one entry per scored token, so that masked
    and padded positions are not there to leak; `grid` lays such values out over the positions.

    Args:
        input_ids: int64 [R, L] token ids; 0 where padded.
        position_ids: int64 [R, L] positions, restarting at 0 in every segment.
        segment_ids: int64 [R, L] index of the segment within its row, -1 where padded.
        segment_starts: int64 [S] flat index of each segment's first token, increasing.
        segment_lengths: int64 [S] tokens of each segment, at least 1.
        trajectory_index: int64 [S] the caller's index of each trajectory; -1 in a filler.
        scored: int64 [M] flat index of each scored token.
        predictors: int64 [M] flat index of the hidden state that predicts it.
        scored_segments: int64 [M] the segment, in [0, S), of each scored token.
        temperature: float32 [M] sampling temperature.
        advantages: float64 [M] or `None`.
        weights: float64 [M] what each token's loss is worth in its step (see `lit_rl.loss_weights`), or `None`.
        sampler_log_probs: float32 [M] log-probabilities of the sampler in nats, or `None`.
        old_log_probs: float32 [M] log-probabilities before the iteration's first update in nats, or `None`.
        reference_log_probs: float32 [M] log-probabilities of the reference policy in nats, or `None`.
        layout: "packed", or "padded" with one segment per row and padding on the right.
        max_tokens: The token budget this microbatch was planned for, in positions.

    Example:
        >>> from lit_rl import Trajectory, collate
        >>> batch = collate([Trajectory([10, 11, 12], [0, 1, 1], 1.0), Trajectory([20, 21], [0, 1], 0.0)])
        >>> batch.position_ids.tolist(), batch.targets.tolist(), batch.predictors.tolist()
        ([[0, 1, 2, 0, 1]], [11, 12, 21], [0, 1, 3])
    """

    input_ids: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    segment_starts: Tensor
    segment_lengths: Tensor
    trajectory_index: Tensor
    scored: Tensor
    predictors: Tensor
    scored_segments: Tensor
    temperature: Tensor
    advantages: Tensor | None
    weights: Tensor | None
    sampler_log_probs: Tensor | None
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    layout: Layout
    max_tokens: int | None

    # Not a dataclass: Lightning's precision plugins would rebuild one with advantages and weights in half precision.
    def __init__(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        segment_ids: Tensor,
        segment_starts: Tensor,
        segment_lengths: Tensor,
        trajectory_index: Tensor,
        scored: Tensor,
        predictors: Tensor,
        scored_segments: Tensor,
        temperature: Tensor,
        advantages: Tensor | None = None,
        weights: Tensor | None = None,
        sampler_log_probs: Tensor | None = None,
        old_log_probs: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
        layout: Layout = "packed",
        max_tokens: int | None = None,
    ) -> None:
        fields = self.__dict__
        fields.update(input_ids=input_ids, position_ids=position_ids, segment_ids=segment_ids)
        fields.update(segment_starts=segment_starts, segment_lengths=segment_lengths)
        fields.update(trajectory_index=trajectory_index, scored=scored, predictors=predictors)
        fields.update(scored_segments=scored_segments, temperature=temperature, advantages=advantages)
        fields.update(weights=weights, sampler_log_probs=sampler_log_probs, old_log_probs=old_log_probs)
        fields.update(reference_log_probs=reference_log_probs)
        fields.update(layout=layout, max_tokens=max_tokens)
        _check_shapes(self, ("position_ids", "segment_ids"), input_ids.shape, "[rows, width] like `input_ids`")
        segments = segment_starts.shape
        _check_shapes(self, ("segment_lengths", "trajectory_index"), segments, "[segments] like `segment_starts`")
        _check_shapes(self, _PER_SCORED_TOKEN[1:], scored.shape, "[scored tokens] like `scored`")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a microbatch is immutable; use `batch.replace({name}=...)` for a changed copy")

    def __repr__(self) -> str:
        return (
            f"PackedBatch(layout={self.layout!r}, positions={list(self.input_ids.shape)}, "
            f"segments={self.segment_starts.numel()}, scored={self.num_scored})"
        )

    @property
    def targets(self) -> Tensor:
        """int64 [M] the ids that the scored tokens have."""
        return self.input_ids.flatten()[self.scored]

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [S+1] cumulative lengths of the segments, padding left out."""
        ends = self.segment_lengths.cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)

    @property
    def num_positions(self) -> int:
        """Positions computed, padding included."""
        return self.input_ids.numel()

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding excluded."""
        return int(self.segment_lengths.sum())

    @property
    def num_scored(self) -> int:
        """Scored tokens."""
        return self.scored.numel()

    @property
    def is_filler(self) -> bool:
        """True when the microbatch only keeps this rank in step with the others."""
        return bool((self.trajectory_index < 0).all())

    def grid(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Lays one value per scored token out over the positions.

        Args:
            values: [M] any dtype.
            fill: What stands at positions that are not scored.

        Returns:
            [R, L] of the dtype of `values`.

        Example:
            >>> from lit_rl import Trajectory, collate
            >>> batch = collate([Trajectory([5, 6, 7], [0, 0, 1], 1.0)])
            >>> batch.grid(torch.tensor([2.5])).tolist()
            [[0.0, 0.0, 2.5]]
        """
        grid = values.new_full((self.num_positions,), fill)
        return grid.index_put((self.scored,), values).view_as(self.input_ids)

    def scored_slice(self, tokens: slice) -> PackedBatch:
        """The same microbatch seen through some of its scored tokens only.

        Args:
            tokens: Which of the M scored tokens to keep.

        Returns:
            A batch whose per-scored-token fields are views of the slice; everything else is shared.
        """
        kept = {name: value[tokens] for name in _PER_SCORED_TOKEN if (value := getattr(self, name)) is not None}
        return self.replace(**kept)

    def replace(self, **changes: Any) -> PackedBatch:
        """A copy with some fields changed; tensors that are not named are shared."""
        return PackedBatch(**{**self.__dict__, **changes})

    def like(self, log_probs: Tensor) -> PackedBatch:
        """The same microbatch with its floating-point fields in the dtype of `log_probs`, as objectives see it."""
        return self._map(lambda tensor: tensor.to(log_probs.dtype) if tensor.is_floating_point() else tensor)

    def to(self, device: torch.device | str, non_blocking: bool = False, **_: Any) -> PackedBatch:
        """Moves every tensor; what Lightning calls on each batch."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedBatch:
        """Pins every tensor; what a `DataLoader` with `pin_memory=True` calls."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Any) -> PackedBatch:
        return self.replace(**{k: function(v) for k, v in self.__dict__.items() if isinstance(v, Tensor)})


def _check_shapes(batch: PackedBatch, names: Sequence[str], shape: torch.Size, expected: str) -> None:
    for name in names:
        value = getattr(batch, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"`{name}` has shape {list(value.shape)}, expected {list(shape)}: {expected}")
