"""Rollouts of one iteration: all episodes at once, turn by turn, spread over ranks by whole groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lit_rl.curriculum import DynamicSampling, TaskSampler
from lit_rl.rollout.decoding import model_context, model_end_ids
from lit_rl.rollout.decoding_choice import vocabulary_of
from lit_rl.rollout.engine import Engine, TransformersEngine
from lit_rl.rollout.environment import Environment
from lit_rl.rollout.episode import ActionEnds, Episode, Limits
from lit_rl.rollout.gather import RolloutStatistics, Share, check_place, gather_shares
from lit_rl.rollout.play import Progress, play_episodes, warn_if_all_cut
from lit_rl.rollout.rewards import SingleTurn
from lit_rl.rollout.tasks import Attempt, index_tasks, plan_attempts
from lit_rl.rollout.validation import check_end_ids, check_integer, check_temperature
from lit_rl.trajectory import Trajectory

if TYPE_CHECKING:
    from lit_rl.policy.causal_lm import CausalLMPolicy


class Rollouts:
    """How an iteration's trajectories are made; also spelled `rollouts(...)`.

    Each iteration draws `tasks_per_iteration` tasks and attempts each `group_size` times. All open episodes of a
    process act together: their contexts go to the engine as one batch, what was sampled is appended id by id with its
    log-probability, the environments answer, and the next turn begins. With several processes, whole groups are
    dealt out in turn, and every process gets all trajectories in the same order. The default engine reads each context
    again in every turn; for long episodes, an `engine` with a prefix cache saves that.

    All randomness of sampling is a function of (seed, iteration, task, attempt, turn): trajectories do not depend on
    the number of processes or on batch sizes, and a checkpoint needs no generator.

    A trajectory is `truncated` when a limit ended it; `info["stop"]` says which: "max_new_tokens" (the last action has
    no end token), "max_trajectory_tokens", "max_turns", otherwise "done". An action in the middle of an episode that
    hits `max_new_tokens` is handed to the environment like any other. `info` also holds "attempt", "turns" and,
    where an episode failed, "error".

    Args:
        environment: Called without arguments to make the environment of each episode: a subclass of `Environment`,
            a `SingleTurn`, or any callable.
        tasks: Mappings with a unique string under "id"; a list, or a `datasets.Dataset`.
        tasks_per_iteration: How many different tasks an iteration draws; at most the number of tasks.
        group_size: Attempts per task, at least 2.
        engine: Who generates; `None` samples from the policy in this process (`TransformersEngine`).
        end_ids: Ids that end an action, for the default engine. `None` takes them from the model's generation
            configuration; empty means that only `max_new_tokens` ends an action, which then is no
            truncation.
        batch_size: The most episodes generated together by the default engine; `None` takes all at once.
        max_new_tokens: The most tokens sampled in one turn.
        max_turns: The most actions in an episode.
        max_trajectory_tokens: The most tokens of a trajectory, at most what the model's configuration says it can read
            (`max_position_embeddings`). `None` is all of that, and no limit where the configuration does not say.
        errors: What an exception of an environment or a missing reward does: "raise" names rank, task, attempt and
            turn on every rank; "unscored" keeps the tokens so far without a reward (NaN) and the message in `info`.
        seed: Of all sampling.
        task_sampler: Which tasks come next; `None` is shuffled passes over all of them.
        dynamic_sampling: Draws further tasks in rounds until `tasks_per_iteration` groups have a signal, within its
            limit; `None` draws once.

    Attributes:
        task_sampler: A curriculum replaces or updates it. It learns the rewards of every training collection.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of range, a task has no id, or an id comes twice.

    Example:
        >>> from lit_rl.policy.causal_lm import CausalLMPolicy
        >>> from lit_rl.rollout.rewards import SingleTurn
        >>> from lit_rl.testing import tiny_policy_model
        >>> def shorter_is_better(completions, **columns):
        ...     return [-float(len(ids)) for ids in completions]
        >>> tasks = [{"id": name, "prompt": [1, number]} for number, name in enumerate("abcd", start=5)]
        >>> source = rollouts(SingleTurn(shorter_is_better), tasks, tasks_per_iteration=2, group_size=3, end_ids=[2])
        >>> policy = CausalLMPolicy(tiny_policy_model())
        >>> trajectories = source.collect(policy, iteration=0, temperature=1.0, progress=False)
        >>> len(trajectories), len({trajectory.group for trajectory in trajectories})
        (6, 2)
    """

    def __init__(
        self,
        # A `SingleTurn` is such a callable; by name, a configuration file can say so.
        environment: Callable[[], Environment] | SingleTurn,
        tasks: Sequence[Mapping[str, Any]],
        *,
        tasks_per_iteration: int = 8,
        group_size: int = 8,
        engine: Engine | None = None,
        end_ids: Collection[int] | None = None,
        batch_size: int | None = None,
        max_new_tokens: int = 64,
        max_turns: int = 8,
        max_trajectory_tokens: int | None = None,
        errors: Literal["raise", "unscored"] = "raise",
        seed: int = 0,
        task_sampler: TaskSampler | None = None,
        dynamic_sampling: DynamicSampling | None = None,
    ) -> None:
        if isinstance(environment, Environment) or not callable(environment):
            raise TypeError(
                f"`environment` is {environment!r}; expected a callable that makes a fresh environment for every "
                "episode, for example the class itself"
            )
        if errors not in ("raise", "unscored"):
            raise ValueError(f'`errors` must be "raise" or "unscored", got {errors!r}')
        if engine is not None and (end_ids is not None or batch_size is not None):
            raise ValueError("`end_ids` and `batch_size` belong to the default engine; set them on your `engine`")
        self.environment = environment
        self.tasks = tasks
        self.task_index = index_tasks(tasks)
        self.tasks_per_iteration = check_integer("tasks_per_iteration", tasks_per_iteration, 1)
        if tasks_per_iteration > len(self.task_index):
            raise ValueError(
                f"`tasks_per_iteration` is {tasks_per_iteration}, but there are {len(self.task_index)} tasks; ask for "
                "at most that many"
            )
        self.group_size = check_integer("group_size", group_size, 2)
        self.engine = engine
        self.end_ids = None if end_ids is None else check_end_ids(end_ids)
        self.batch_size = None if batch_size is None else check_integer("batch_size", batch_size, 1)
        action_ends: ActionEnds = "length" if self.end_ids is not None and not self.end_ids else "end_id"
        self.limits = Limits(max_new_tokens, max_turns, max_trajectory_tokens, action_ends)
        self.errors = errors
        self.seed = check_integer("seed", seed, 0)
        self.task_sampler = TaskSampler(list(self.task_index), seed=seed) if task_sampler is None else task_sampler
        self.dynamic_sampling = dynamic_sampling
        self._statistics = RolloutStatistics()
        self._warned = False

    @property
    def last_statistics(self) -> dict[str, float]:
        """What the last collection took, over all ranks, as numbers for a logger; see `RolloutStatistics`."""
        return self._statistics.metrics()

    def collect(
        self,
        policy: CausalLMPolicy,
        *,
        iteration: int,
        temperature: float,
        rank: int = 0,
        world_size: int = 1,
        progress: bool = True,
    ) -> list[Trajectory]:
        """Draws the tasks of an iteration, attempts them, and tells the task sampler what came of it.

        Args:
            policy: The policy that acts, with its current weights.
            iteration: Number of the iteration, at least 0.
            temperature: Sampling temperature, greater than 0.
            rank: Which share of the groups this process attempts.
            world_size: Number of shares; above 1, every rank has to call this.
            progress: Whether rank 0 shows a progress bar.

        Returns:
            The trajectories of all ranks, group by group; the same list on every rank.

        Raises:
            ValueError: `max_trajectory_tokens` is more than the model reads, or the engine's answer is no completion;
                on several ranks a `RolloutError` that says so.
            RolloutError: An environment or engine failed on some rank; the same error on every rank.
        """
        if rank == 0 and self.tasks_per_iteration < world_size:
            warnings.warn(
                f"{self.tasks_per_iteration} groups are spread over {world_size} ranks, so "
                f"{world_size - self.tasks_per_iteration} have nothing to do; raise `tasks_per_iteration`",
                stacklevel=2,
            )
        trajectories: list[Trajectory] = []
        statistics = RolloutStatistics()
        for task_ids in self._rounds(check_integer("iteration", iteration, 0)):
            found = self.collect_tasks(
                policy,
                task_ids,
                attempts=self.group_size,
                iteration=iteration,
                temperature=temperature,
                rank=rank,
                world_size=world_size,
                purpose="training",
                progress=progress,
            )
            self.task_sampler.observe_trajectories(found)
            trajectories += found
            statistics += self._statistics
        self._statistics = statistics
        if rank == 0 and not self._warned:
            self._warned = warn_if_all_cut(trajectories, self._limits(policy))
        return trajectories

    def collect_tasks(
        self,
        policy: CausalLMPolicy,
        tasks: Sequence[str | Mapping[str, Any]],
        *,
        attempts: int = 1,
        iteration: int = 0,
        temperature: float,
        rank: int = 0,
        world_size: int = 1,
        purpose: str = "evaluation",
        progress: bool = True,
    ) -> list[Trajectory]:
        """Attempts given tasks, without telling the task sampler: for validation, prediction, or an own sampler.

        Args:
            policy: The policy that acts.
            tasks: Ids of the tasks given at construction, or other tasks; one that comes twice gets two groups.
            attempts: Trajectories per entry of `tasks`, at least 1.
            iteration: Part of the seeds and group ids; the same number samples with the same random numbers.
            temperature: Sampling temperature, greater than 0.
            rank: Which share of the groups this process attempts.
            world_size: Number of shares; above 1, every rank has to call this.
            purpose: Part of the seeds, so that validation does not repeat the samples of training.
            progress: Whether rank 0 shows a progress bar.

        Returns:
            `attempts` trajectories per entry, in order; the same list on every rank.

        Raises:
            RolloutError: An environment or engine failed on some rank; the same error on every rank.
        """
        temperature = check_temperature(temperature)
        check_place(rank, world_size)
        groups = plan_attempts(
            [self._task(entry) for entry in tasks],
            check_integer("attempts", attempts, 1),
            iteration=check_integer("iteration", iteration, 0),
            seed=self.seed,
            purpose=purpose,
        )
        own = [attempt for group in groups[rank::world_size] for attempt in group]
        with Progress(len(own), shown=progress and rank == 0) as bar:
            share = self._share(policy, own, rank, world_size, temperature, bar)
        shares = gather_shares(share, world_size)
        self._statistics = RolloutStatistics.combine([one.statistics for one in shares])
        by_rank = [one.unpack(temperature) for one in shares]
        return [
            trajectory
            for index in range(len(groups))
            for trajectory in by_rank[index % world_size][index // world_size * attempts :][:attempts]
        ]

    def _rounds(self, iteration: int) -> Iterator[list[str]]:
        if self.dynamic_sampling is None:
            yield self.task_sampler.sample(self.tasks_per_iteration, iteration=iteration)
        else:
            yield from self.dynamic_sampling.rounds(self.task_sampler, self.tasks_per_iteration, iteration=iteration)

    def _task(self, entry: str | Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(entry, str):
            return entry
        if entry not in self.task_index:
            raise ValueError(f"there is no task with the id {entry!r}; the task sampler and `tasks` must agree")
        return self.tasks[self.task_index[entry]]

    def _share(
        self,
        policy: CausalLMPolicy,
        attempts: list[Attempt],
        rank: int,
        world_size: int,
        temperature: float,
        bar: Progress,
    ) -> Share:
        """This rank's episodes; with several ranks an exception becomes a share too, so that none waits in vain."""
        try:
            engine, limits = self._engine(policy), self._limits(policy)
            vocabulary = vocabulary_of(policy)
            episodes = [Episode(attempt, limits, self.errors, vocabulary) for attempt in attempts]
            statistics = play_episodes(episodes, self.environment, engine, temperature=temperature, progress=bar)
        except Exception as error:
            if world_size == 1:
                raise
            return Share.failed(rank, error)
        return Share.pack(rank, [episode.record() for episode in episodes], statistics)

    def _engine(self, policy: CausalLMPolicy) -> Engine:
        engine = self.engine
        if engine is None:
            end_ids = check_end_ids(model_end_ids(policy.model)) if self.end_ids is None else self.end_ids
            engine = TransformersEngine(policy, end_ids=end_ids, batch_size=self.batch_size)
        synchronize = getattr(engine, "synchronize", None)
        if synchronize is not None:
            synchronize(policy)
        return engine

    def _limits(self, policy: CausalLMPolicy) -> Limits:
        return self.limits.within(model_context(policy.model))


rollouts = Rollouts
