"""Where the time went: every second belongs to one phase, and the work of an iteration is summed beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from lit_rl.throughput.flops import AttentionConvention, Recompute, model_flops
from lit_rl.throughput.shape import ModelShape

PHASES = ("rollout", "old_log_probs", "first_step", "update", "validation", "waiting")


class PhaseClock:
    """Seconds by phase on one process; the phases add up to the time between start and stop.

    Args:
        clock: Seconds as a float.

    Example:
        >>> times = iter([0.0, 2.0, 5.0])
        >>> clock = PhaseClock(lambda: next(times))
        >>> clock.enter("update"); clock.enter("waiting"); clock.enter(None)
        >>> clock.seconds["update"], clock.seconds["waiting"]
        (2.0, 3.0)
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.phase: str | None = None
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = 0.0

    def enter(self, phase: str | None) -> None:
        """Books the time since the last call on the phase it was spent in; `None` stops."""
        now = self.clock()
        if self.phase is not None:
            self.seconds[self.phase] += now - self._mark
        self.phase, self._mark = phase, now

    def reassign(self, seconds: float, source: str, target: str) -> None:
        """Moves time that was measured elsewhere from the phase that it was booked on to its own."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def take(self) -> dict[str, float]:
        """The seconds so far, and starts over from 0."""
        taken, self.seconds = self.seconds, dict.fromkeys(PHASES, 0.0)
        return taken

    def pending(self) -> dict[str, float]:
        """The seconds so far, those of the current phase included; nothing is changed."""
        pending = dict(self.seconds)
        if self.phase is not None:
            pending[self.phase] += self.clock() - self._mark
        return pending


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one process, or all of them, computed in the update of an iteration.

    Args:
        segments: Real segments.
        tokens: Real tokens.
        scored: Scored tokens.
        live: Live tokens.
        positions: Positions computed: padding and fillers included.
        flops: Model FLOPs of forward and backward, and of a reference's forward where there is one.
        executed: The same with what backward recomputes.
        useful: Model FLOPs of the segments that have a live token, the head on live tokens.
    """

    segments: float = 0.0
    tokens: float = 0.0
    scored: float = 0.0
    live: float = 0.0
    positions: float = 0.0
    flops: float = 0.0
    executed: float = 0.0
    useful: float = 0.0

    def values(self) -> list[float]:
        """The numbers in a fixed order, for a reduction over ranks."""
        return list(asdict(self).values())

    @classmethod
    def from_values(cls, values: Iterable[float]) -> Work:
        """The reverse of `values`."""
        return cls(**{item.name: value for item, value in zip(fields(cls), values, strict=True)})

    @classmethod
    def of_segments(
        cls,
        segments: Iterable[tuple[int, int, int]],
        positions: int,
        shape: ModelShape | None,
        *,
        attention: AttentionConvention = "full_square",
        recompute: Recompute = "head",
        adapter_weights: int | None = None,
        scoring_passes: int = 0,
    ) -> Work:
        """Counts segments; a filler has length 0 here and costs positions only.

        Args:
            segments: (tokens, scored tokens, live tokens) of each.
            positions: Positions computed.
            shape: The model; without it no FLOPs are counted.
            attention: Convention for attention pairs.
            recompute: What backward computes twice.
            adapter_weights: Trainable weights of adapters over a frozen model.
            scoring_passes: Further forward passes over every segment, such as the reference's for a KL term.

        Example:
            >>> work = Work.of_segments([(5, 3, 0)], 8, None)
            >>> work.positions, work.tokens, work.scored
            (8, 5, 3)
        """
        real = [segment for segment in segments if segment[0] > 0]
        lengths, scored = [length for length, _, _ in real], sum(scored for _, scored, _ in real)
        useful, live = [length for length, _, live in real if live], sum(live for _, _, live in real)
        sums = {"segments": len(real), "tokens": sum(lengths), "scored": scored, "live": live, "positions": positions}
        if shape is None:
            return cls(**sums)
        every = model_flops(
            shape, lengths, scored=scored, attention=attention, recompute=recompute, adapter_weights=adapter_weights
        )
        lively = model_flops(shape, useful, scored=live, attention=attention, adapter_weights=adapter_weights)
        scoring = scoring_passes * model_flops(shape, lengths, scored=scored, work="forward", attention=attention).model
        return cls(**sums, flops=every.model + scoring, executed=every.hardware + scoring, useful=lively.model)

    def rates(self, seconds: float, devices: int, peak: float | None) -> dict[str, float]:
        """Tokens per second and utilization of the update; nothing where there was none.

        Args:
            seconds: Of the slowest process.
            devices: Processes of the run.
            peak: Dense FLOP/s of one device, or `None` for no utilization.
        """
        if seconds <= 0 or self.positions == 0:
            return {}
        rates = {
            "update_tokens_per_second": self.tokens / seconds,
            "update_scored_tokens_per_second": self.scored / seconds,
            "update_live_tokens_per_second": self.live / seconds,
            "update_positions_per_second": self.positions / seconds,
        }
        if self.flops and self.segments:
            rates["update_tflops_per_segment"] = self.flops / self.segments / 1e12
        if peak is not None:
            all_of_it = seconds * devices * peak
            rates["update_mfu"] = self.flops / all_of_it
            rates["update_useful_mfu"] = self.useful / all_of_it
            rates["update_hfu"] = self.executed / all_of_it
        return rates


def gpu_hours(gpu_seconds: Mapping[str, float]) -> dict[str, float]:
    """GPU-hours by phase and in all, under the names they are logged by.

    Example:
        >>> gpu_hours({"update": 7200.0, "waiting": 1800.0})
        {'gpu_hours': 2.5, 'gpu_hours_update': 2.0, 'gpu_hours_waiting': 0.5}
    """
    hours = {f"gpu_hours_{phase}": seconds / 3600 for phase, seconds in gpu_seconds.items()}
    return {"gpu_hours": sum(hours.values()), **hours}
