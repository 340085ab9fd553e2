"""The same list of trajectories on every rank, or the same error."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from lit_rl.rollout.episode import RolloutError
from lit_rl.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class RolloutStatistics:
    """What one collection took, over all ranks.

    Attributes:
        episodes: Trajectories made.
        turns: Actions sampled.
        prompt_tokens: Tokens of the prompts.
        observation_tokens: Tokens of the observations between actions.
        generated_tokens: Tokens sampled by the policy.
        truncated_episodes: Episodes that a limit cut.
        unscored_episodes: Episodes without a reward.
        seconds: Wall time on the slowest rank.
        generation_seconds: Of these, in the engine, on the rank that spent most.
        environment_seconds: Of these, in environments and reward functions, on the rank that spent most.
    """

    episodes: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    observation_tokens: int = 0
    generated_tokens: int = 0
    truncated_episodes: int = 0
    unscored_episodes: int = 0
    seconds: float = 0.0
    generation_seconds: float = 0.0
    environment_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens of all ranks per second of wall time."""
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def metrics(self) -> dict[str, float]:
        """All of it as numbers for a logger."""
        numbers = {field.name: float(getattr(self, field.name)) for field in fields(self)}
        return {**numbers, "tokens_per_second": self.tokens_per_second}

    def __add__(self, later: RolloutStatistics) -> RolloutStatistics:
        """The statistics of two collections, one after the other."""
        return RolloutStatistics(
            **{field.name: getattr(self, field.name) + getattr(later, field.name) for field in fields(self)}
        )

    @classmethod
    def combine(cls, shares: Sequence[RolloutStatistics]) -> RolloutStatistics:
        """The statistics of several ranks at the same time: counts add up, the longest times count.

        Args:
            shares: One per rank.

        Returns:
            The statistics of all.

        Example:
            >>> one = RolloutStatistics(episodes=2, seconds=1.0)
            >>> RolloutStatistics.combine([one, RolloutStatistics(episodes=3, seconds=4.0)])
            ... # doctest: +ELLIPSIS
            RolloutStatistics(episodes=5, ..., seconds=4.0, generation_seconds=0.0, environment_seconds=0.0)
        """
        totals: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(share, field.name) for share in shares]
            totals[field.name] = max(values) if field.name.endswith("seconds") else sum(values)
        return cls(**totals)


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the other ranks."""

    message: str
    traceback: str


@dataclass(frozen=True)
class Share:
    """What one rank collected: its episodes as a few flat arrays, or why there are none."""

    rank: int
    arrays: dict[str, np.ndarray]
    details: list[dict[str, Any]]
    statistics: RolloutStatistics
    failure: Failure | None = None

    @classmethod
    def pack(cls, rank: int, records: Sequence[dict[str, Any]], statistics: RolloutStatistics) -> Share:
        """Lays the per-token lists of all records end to end.

        Args:
            rank: Of this process.
            records: As `Episode.record` gives them.
            statistics: Of this process.
        """
        kinds = {"token_ids": np.int64, "action_mask": np.bool_, "log_probs": np.float32}
        arrays: dict[str, Any] = {
            name: np.array([value for record in records for value in record[name]], dtype=kind)
            for name, kind in kinds.items()
        }
        arrays["lengths"] = np.array([len(record["token_ids"]) for record in records], dtype=np.int64)
        details = [{key: value for key, value in record.items() if key not in kinds} for record in records]
        return cls(rank, arrays, details, statistics)

    @classmethod
    def failed(cls, rank: int, error: Exception) -> Share:
        """What a rank sends instead of episodes."""
        message = str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
        failure = Failure(message, "".join(traceback.format_exception(error)))
        return cls(rank, {}, [], RolloutStatistics(), failure)

    def unpack(self, temperature: float) -> list[Trajectory]:
        """The trajectories, in the order of the records."""
        ends = np.cumsum(self.arrays["lengths"]).tolist()
        names = ("token_ids", "action_mask", "log_probs")
        trajectories = []
        for start, end, detail in zip([0, *ends], ends, self.details, strict=False):
            tokens: dict[str, Any] = {name: self.arrays[name][start:end] for name in names}
            trajectories.append(Trajectory(**tokens, **detail, temperature=temperature))
        return trajectories


def check_place(rank: int, world_size: int) -> None:
    """Refuses a place that would end in a hang.

    Args:
        rank: Which share of the groups a process attempts.
        world_size: Number of shares.

    Raises:
        ValueError: The rank is out of range, or there is no process group to exchange several shares in.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"`rank` is {rank} of `world_size` {world_size}; expected 0 to {world_size - 1}")
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world_size > 1 and not grouped:
        raise ValueError(f"`world_size` is {world_size}, but there is no process group; start one, or use 1")


def gather_shares(share: Share, world_size: int) -> list[Share]:
    """Exchanges the shares of all ranks; one collective, reached by every rank whatever happened on it.

    Args:
        share: This rank's.
        world_size: Number of shares.

    Returns:
        One share per rank, in order. Several processes with the same rank (they see the same data) count once.

    Raises:
        RolloutError: A rank failed, or the ranks are not those expected. The message is the same on every rank, with
            the traceback of the rank that failed as a note.
    """
    shares = [share]
    if world_size > 1:
        shares = [None] * torch.distributed.get_world_size()  # type: ignore[list-item]
        torch.distributed.all_gather_object(shares, share)
    by_rank = {gathered.rank: gathered for gathered in reversed(shares)}
    if sorted(by_rank) != list(range(world_size)):
        raise RolloutError(f"expected the ranks 0..{world_size - 1}, the process group has {sorted(by_rank)}")
    failures = [gathered for gathered in by_rank.values() if gathered.failure is not None]
    if failures:
        first = min(failures, key=lambda gathered: gathered.rank)
        raise _error(first, len(failures), world_size)
    return [by_rank[rank] for rank in range(world_size)]


def _error(first: Share, count: int, world_size: int) -> RolloutError:
    assert first.failure is not None
    others = f", and {count - 1} more of {world_size} ranks" if count > 1 else ""
    error = RolloutError(f"rank {first.rank}{others}: {first.failure.message}")
    error.add_note(f"Traceback on rank {first.rank}:\n{first.failure.traceback}")
    return error
