"""Exercise 7, the design review: what changes besides MFU when a microbatch grows from 4 to 16 trajectories.

    python -m examples.chapter.design_review memory
    python -m examples.chapter.design_review padding
    python -m examples.chapter.design_review gradient

design_review.md says what each answers, and which command measures it on your own run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np

from examples.chapter import accumulation, gym
from examples.chapter.table import gigabytes, percent
from lit_rl import plan_steps
from lit_rl.checks.gradients import relation
from lit_rl.throughput import ModelShape, memory_breakdown, padded_share

BEFORE, AFTER = 4, 16
CONTEXT = 32_768


def long_tail(count: int = 512, seed: int = 0) -> list[int]:
    """Lengths of agent trajectories with a median of 8k and a cap of 32k tokens."""
    drawn = np.random.default_rng(seed).lognormal(np.log(8_000), 0.85, count)
    return np.clip(drawn, 64, CONTEXT).astype(int).tolist()


def worst(lengths: Sequence[int], count: int) -> int:
    """Positions of the largest padded microbatch of `count` trajectories in a row.

    Example:
        >>> worst([1, 5, 2, 2], 2)
        10
    """
    return max(count * max(lengths[start : start + count]) for start in range(0, len(lengths), count))


def memory() -> list[str]:
    """The peak memory of the worst microbatch, by arithmetic for an 8B model on 8 GPUs."""
    shape, lengths = ModelShape.from_config("qwen3-8b"), long_tail()
    lines = []
    for count in (BEFORE, AFTER):
        tokens = worst(lengths, count)
        total = memory_breakdown(shape, tokens, checkpointing="full").total
        lines.append(f"{count:3d} trajectories: worst microbatch {tokens:9,} positions, {gigabytes(total)} on one GPU")
    budget = worst(lengths, BEFORE)
    total = memory_breakdown(shape, budget, checkpointing="full").total
    return [*lines, f"a token budget of {budget:,} positions: never more than {gigabytes(total)}, at any count"]


def padding() -> list[str]:
    """The share of the computed positions that is padding, and the number of microbatches."""
    lengths = long_tail()
    lines = [
        f"{count:3d} trajectories: {percent(padded_share(lengths, count))} padding, {-(-len(lengths) // count)} "
        "microbatches"
        for count in (BEFORE, AFTER)
    ]
    plan = plan_steps(lengths, max_tokens=worst(lengths, BEFORE))
    return [*lines, f"packed under a token budget: {percent(plan.padding_share)}, {plan.num_microbatches} microbatches"]


def gradient() -> list[str]:
    """How far the gradient is from that of the whole step, on the gym's episodes sorted by length."""
    module = accumulation.MicrobatchMean(*gym.first_episodes())
    order = sorted(range(len(module.episodes)), key=lambda index: len(module.episodes[index]))
    lines = []
    for count in (BEFORE, AFTER):
        split = [order[start : start + count] for start in range(0, len(order), count)]
        figures = module.judge(split).figures
        lines.append(
            f"{count:3d} trajectories: relative error {figures['relative_error']:.0%}, a token weighs "
            f"{figures['distortion_min']:.2f} to {figures['distortion_max']:.2f} times what it should"
        )
    whole = module.weighted_gradient([order])
    error = relation(module.weighted_gradient(split), whole)[0]
    return [*lines, f"weights of the whole step: relative error {error:.0e}, at any count"]


MEASUREMENTS: dict[str, Callable[[], list[str]]] = {"memory": memory, "padding": padding, "gradient": gradient}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=list(MEASUREMENTS))
    print("\n".join(MEASUREMENTS[parser.parse_args().measurement]()))


if __name__ == "__main__":
    main()
