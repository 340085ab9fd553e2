"""Plays episodes to their end: all open ones act together, turn by turn."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from lit_rl.options import as_flag, as_number
from lit_rl.rollout.engine import Completion, Engine
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.rollout.episode import Episode, Limits
from lit_rl.rollout.gather import RolloutStatistics
from lit_rl.rollout.validation import read_ids
from lit_rl.trajectory import Trajectory

_REFRESH_SECONDS = 0.5


class Progress:
    """A progress bar over finished episodes, with sampled tokens per second behind it.

    Args:
        episodes: How many there are.
        shown: Whether to draw it at all.
    """

    def __init__(self, episodes: int, *, shown: bool) -> None:
        self._bar = tqdm(total=episodes, disable=not shown, desc="rollouts", unit="episode", leave=False)
        self._tokens = 0
        self._started = self._drawn = time.perf_counter()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def add_tokens(self, count: int) -> None:
        """Counts sampled tokens; redraws now and then."""
        self._tokens += count
        now = time.perf_counter()
        if now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            self._bar.set_postfix_str(f"{self._tokens / (now - self._started):,.0f} tokens/s")

    def add_episode(self) -> None:
        """Counts one finished episode."""
        self._bar.update(1)


def play_episodes(
    episodes: Sequence[Episode],
    factory: Callable[[], Environment],
    engine: Engine,
    *,
    temperature: float,
    progress: Progress,
) -> RolloutStatistics:
    """Plays episodes to their end and closes their environments, also after an exception.

    Args:
        episodes: Fresh ones.
        factory: Makes the environment of each.
        engine: Continues the contexts of all open episodes in one call per turn.
        temperature: Of sampling, greater than 0.
        progress: Told about tokens and finished episodes.

    Returns:
        What it took.

    Raises:
        RolloutError: An environment failed, and its episode does not allow that.
        ValueError: The engine returned something that is no completion of its prompts.
    """
    started = time.perf_counter()
    seconds: Counter[str] = Counter()
    with _tokens_reported(engine, progress):
        try:
            with _timed(seconds, "environment"):
                for episode in episodes:
                    episode.start(factory)
                going_on = _close_finished(episodes, progress)
            while going_on:
                with _timed(seconds, "generation"):
                    completions = _generate(engine, going_on, temperature)
                with _timed(seconds, "environment"):
                    _let_answer(factory, going_on, completions)
                    going_on = _close_finished(going_on, progress)
        finally:
            for episode in episodes:
                episode.abandon()
    return _statistics(episodes, seconds, time.perf_counter() - started)


def warn_if_all_cut(trajectories: Sequence[Trajectory], limits: Limits) -> bool:
    """Warns when limits cut every episode before it earned anything: it looks like a trainer that does nothing.

    Args:
        trajectories: Of one iteration, as `Episode.record` describes them.
        limits: That were in force.

    Returns:
        Whether there was a warning.
    """
    rewards = {trajectory.reward for trajectory in trajectories}
    if len(rewards) != 1 or not all(trajectory.truncated for trajectory in trajectories):
        return False
    stops = Counter(trajectory.info["stop"] for trajectory in trajectories)
    reasons = ", ".join(f"{count} by {stop}={getattr(limits, stop)}" for stop, count in stops.items())
    warnings.warn(
        f"all {len(trajectories)} trajectories were cut by a limit ({reasons}) and have the reward {rewards.pop()}, so "
        "there is nothing to learn from; raise the limit, or check that `end_ids` are what the policy ends with",
        stacklevel=3,
    )
    return True


def _generate(engine: Engine, episodes: Sequence[Episode], temperature: float) -> list[Completion]:
    limits = [episode.max_new_tokens for episode in episodes]
    completions = engine.generate(
        [episode.token_ids for episode in episodes],
        max_new_tokens=limits,
        temperature=temperature,
        seeds=[episode.turn_seed for episode in episodes],
    )
    name = f"`{type(engine).__name__}.generate`"
    if len(completions) != len(episodes):
        raise ValueError(f"{name} returned {len(completions)} completions for {len(episodes)} prompts")
    read: list[Completion] = []
    for index, (completion, episode, limit) in enumerate(zip(completions, episodes, limits, strict=True)):
        try:
            read.append(_read(completion, limit, episode.vocabulary))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            where = f"{name} for prompt {index} ({episode.name}, turn {episode.turns + 1})"
            raise kind(f"{where}: {error}") from error
    return read


def _read(completion: Any, limit: int, vocabulary: int | None) -> Completion:
    """A completion as plain lists, from lists, arrays or tensors; the caller says whose it is."""
    missing = [name for name in ("token_ids", "log_probs", "truncated") if getattr(completion, name, None) is None]
    if missing:
        raise TypeError(f"{completion!r} has no {missing}; expected a `Completion` with one log-probability per id")
    ids = read_ids(completion.token_ids, "`token_ids`", vocabulary)
    given = completion.log_probs
    items = given.tolist() if hasattr(given, "tolist") else list(given)
    log_probs = [as_number(item) for item in items]
    if not 1 <= len(ids) <= limit or len(log_probs) != len(ids):
        raise ValueError(
            f"got {len(ids)} ids and {len(log_probs)} log-probabilities; expected 1 to {limit} ids and one "
            "log-probability for each"
        )
    if None in log_probs:
        position = log_probs.index(None)
        raise TypeError(f"`log_probs`[{position}] is {items[position]!r}, expected a number")
    truncated = as_flag(completion.truncated)
    if truncated is None:
        raise TypeError(f"`truncated` is {completion.truncated!r}, expected True or False")
    return Completion(ids, log_probs, truncated)  # type: ignore[arg-type]


def _let_answer(
    factory: Callable[[], Environment], episodes: Sequence[Episode], completions: Sequence[Completion]
) -> None:
    for episode, completion in zip(episodes, completions, strict=True):
        episode.act(completion)
    together = getattr(factory, "step_together", None)
    turns = [_step(episode) for episode in episodes] if together is None else _step_together(together, episodes)
    for episode, turn in zip(episodes, turns, strict=True):
        episode.answer(turn)


def _step(episode: Episode) -> Turn | Exception:
    assert episode.environment is not None
    try:
        return episode.environment.step(episode.last_action)
    except Exception as error:
        return error


def _step_together(together: Callable[..., Any], episodes: Sequence[Episode]) -> Sequence[Turn | Exception]:
    try:
        turns = together([episode.environment for episode in episodes], [episode.last_action for episode in episodes])
        if len(turns) != len(episodes):
            raise ValueError(f"`step_together` returned {len(turns)} turns for {len(episodes)} episodes")
    except Exception as error:
        return [error] * len(episodes)
    return turns


def _close_finished(episodes: Sequence[Episode], progress: Progress) -> list[Episode]:
    for episode in episodes:
        if not episode.is_open:
            episode.close()
            progress.add_episode()
    return [episode for episode in episodes if episode.is_open]


def _statistics(episodes: Sequence[Episode], seconds: Counter[str], total: float) -> RolloutStatistics:
    generated = sum(sum(episode.action_mask) for episode in episodes)
    prompts = sum(episode.prompt_tokens for episode in episodes)
    return RolloutStatistics(
        episodes=len(episodes),
        turns=sum(episode.turns for episode in episodes),
        prompt_tokens=prompts,
        observation_tokens=sum(len(episode.token_ids) for episode in episodes) - prompts - generated,
        generated_tokens=generated,
        truncated_episodes=sum(episode.is_truncated for episode in episodes),
        unscored_episodes=sum(episode.reward is None for episode in episodes),
        seconds=total,
        generation_seconds=seconds["generation"],
        environment_seconds=seconds["environment"],
    )


@contextmanager
def _timed(seconds: Counter[str], name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] += time.perf_counter() - started  # type: ignore[assignment]


@contextmanager
def _tokens_reported(engine: Any, progress: Progress) -> Iterator[None]:
    """An engine with an attribute `on_tokens` reports what it samples while it samples."""
    if not hasattr(engine, "on_tokens"):
        yield
        return
    before, engine.on_tokens = engine.on_tokens, progress.add_tokens
    try:
        yield
    finally:
        engine.on_tokens = before
