"""What a curriculum did in the current iteration and since the start, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np

from lit_rl.curriculum.pass_rate import Beliefs
from lit_rl.curriculum.signal import Signal

# Upper ends, exclusive, of the classes of estimates strictly between 0 and 1.
_CLASSES = {"0_to_25": 0.25, "25_to_50": 0.5, "50_to_75": 0.75, "75_to_100": np.inf}


@dataclass
class CurriculumReport:
    """Counts of the current iteration, and totals over all iterations before it.

    Attributes:
        rounds: Calls to `sample` in this iteration.
        tasks: Tasks that could be drawn.
        pool_size: Tasks with a positive score.
        excluded_easy: Excluded tasks with an estimate of at least the rule's centre.
        excluded_hard: The other excluded tasks.
        asked: Tasks asked for in the first round.
        drawn: Tasks drawn in all rounds.
        revisits: Excluded tasks drawn as revisits.
        stand_ins: Excluded tasks drawn because the pool was too small.
        groups: Groups observed.
        live: Groups with a signal.
        all_pass: Groups without a signal in which every attempt passed.
        all_fail: Groups without a signal in which none did.
        equal_partial: Groups without a signal with equal rewards in between.
        unscored: Groups without any reward.
        episodes: Attempts observed.
        passes: Attempts that passed.
        predicted: Sum over the scored groups of the live probability believed beforehand.
        total_episodes: Attempts observed in earlier iterations.
        total_saved: Attempts not spent in earlier iterations, against filling every place asked for.

    Example:
        >>> report = CurriculumReport()
        >>> report.start(asked=8)
        >>> report.count_draw(drawn=3, revisits=1, stand_ins=0)
        >>> report.count_group("live", episodes=4, predicted=0.5)
        >>> report.metrics()["episodes_saved"]                                 # 5 groups of 4
        20.0
    """

    rounds: int = 0
    tasks: int = 0
    pool_size: int = 0
    excluded_easy: int = 0
    excluded_hard: int = 0
    asked: int = 0
    drawn: int = 0
    revisits: int = 0
    stand_ins: int = 0
    groups: int = 0
    live: int = 0
    all_pass: int = 0
    all_fail: int = 0
    equal_partial: int = 0
    unscored: int = 0
    episodes: int = 0
    passes: int = 0
    predicted: float = 0.0
    total_episodes: int = 0
    total_saved: float = 0.0

    def start(self, asked: int) -> None:
        """Begins an iteration: adds the last one to the totals and counts from 0."""
        total_episodes, total_saved = self.total_episodes + self.episodes, self.total_saved + self._saved()
        for field in fields(self):
            setattr(self, field.name, field.default)
        self.asked, self.total_episodes, self.total_saved = asked, total_episodes, total_saved

    def count_pool(self, *, tasks: int, pool_size: int, easy: int, hard: int) -> None:
        """Records how the rule split the tasks."""
        self.tasks, self.pool_size, self.excluded_easy, self.excluded_hard = tasks, pool_size, easy, hard

    def count_draw(self, *, drawn: int, revisits: int, stand_ins: int) -> None:
        """Adds one round."""
        self.drawn += drawn
        self.revisits += revisits
        self.stand_ins += stand_ins

    def count_group(self, signal: Signal, *, episodes: int, predicted: float | None, passes: int = 0) -> None:
        """Adds one observed group; `predicted` is `None` when nothing of it was scored."""
        self.groups += 1
        self.episodes += episodes
        self.passes += passes
        setattr(self, signal, getattr(self, signal) + 1)
        self.predicted += predicted or 0.0

    def metrics(self) -> dict[str, float]:
        """The numbers to log; live shares are left out while no group was scored."""
        counts = ("pool_size", "excluded_easy", "excluded_hard", "revisits", "stand_ins", "episodes")
        numbers = {name: float(getattr(self, name)) for name in counts}
        numbers["tasks_drawn"] = float(self.drawn)
        numbers["episodes_sampled"] = float(self.total_episodes + self.episodes)
        numbers["episodes_saved"] = float(self.total_saved + self._saved())
        scored = self.groups - self.unscored
        if scored:
            numbers["predicted_live_share"] = self.predicted / scored
            numbers["observed_live_share"] = self.live / scored
        return numbers

    def state_dict(self) -> dict[str, float]:
        """All counts, as primitives."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over stored counts."""
        for field in fields(self):
            setattr(self, field.name, state[field.name])

    def _saved(self) -> float:
        """Places left empty (less those of further rounds), in groups of the size seen in this iteration."""
        return (self.asked - self.drawn) * self.episodes / self.groups if self.groups else 0.0


def estimate_shares(beliefs: Beliefs) -> dict[str, float]:
    """Histogram of the estimates as shares of all tasks.

    Args:
        beliefs: What is known about n tasks.

    Returns:
        Shares that sum to 1: never observed ("unseen"), estimates of exactly 0 and 1 ("zero", "one"), and four
        classes in between, each with its lower end and without its upper.
    """
    seen, value = beliefs.groups > 0, beliefs.value
    masks = {"unseen": ~seen, "zero": seen & (value <= 0.0), "one": seen & (value >= 1.0)}
    lower = 0.0
    for name, upper in _CLASSES.items():
        masks[name] = seen & (value > 0.0) & (value < 1.0) & (value >= lower) & (value < upper)
        lower = upper
    return {f"estimates/{name}": float(mask.mean()) for name, mask in masks.items()}
