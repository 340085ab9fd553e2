"""What the user should hear about an iteration before it is trained."""

from __future__ import annotations

from collections.abc import Iterator

from lit_rl.data.iteration import Iteration


def concerns(iteration: Iteration, limit: int | float = 1.0) -> Iterator[tuple[str, str]]:
    """Names what is lost in an iteration.

    Args:
        iteration: As it was planned.
        limit: The Trainer's `limit_train_batches`: a number of microbatches, or a share of them.

    Yields:
        Kind ("overlong", "cut_step", "nothing") and message.

    Example:
        >>> from lit_rl import Trajectory
        >>> from lit_rl.data.iteration import IterationOptions, build_iteration
        >>> same = [Trajectory([1, 2], [0, 1], 1.0, task="a"), Trajectory([1, 3], [0, 1], 1.0, task="a")]
        >>> [kind for kind, message in concerns(build_iteration(same, 0, IterationOptions(max_tokens=8)))]
        ['nothing']
    """
    overlong = iteration.dropped["overlong"]
    if iteration.cut or overlong:
        yield (
            "overlong",
            f"of {len(iteration)} trajectories {overlong} were dropped and {iteration.cut} were cut because they are "
            f"longer than `max_tokens`={iteration.plan.max_tokens}; the log counts them as `rollout/dropped/overlong` "
            "and `rollout/cut`",
        )
    per_step = iteration.plan.microbatches_per_step
    length = iteration.plan.num_steps * per_step
    kept = min(limit, length) if isinstance(limit, int) else int(limit * length)
    if kept % per_step:
        yield (
            "cut_step",
            f"`limit_train_batches={limit}` keeps {kept} of {length} microbatches, which ends inside a step of "
            f"{per_step}: its gradient is only a part; limits count microbatches",
        )
    if not iteration.kept:
        yield (
            "nothing",
            f"iteration {iteration.index} has nothing to train on: {iteration.dropped}{_explain(iteration)}; its steps "
            "change nothing, and neither do those of further such iterations",
        )


def _explain(iteration: Iteration) -> str:
    if iteration.dropped["zero_advantage"] and len(set(iteration.groups)) == len(iteration):
        return (
            " (every trajectory is a group of its own, so its baseline is its own reward: give `group` or `task`, or "
            "`baseline='none'`)"
        )
    return ""
