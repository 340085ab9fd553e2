"""14.4: what a mean per microbatch does to the gradient, and what lit_rl's weights do instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from examples.chapter.table import Row, Section
from lit_rl import CausalLMPolicy, Trajectory, Verdict, check_normalization, collate, group_advantages, loss_weights
from lit_rl.checks.gradients import relation, take_gradients
from lit_rl.objectives import reinforce

MICROBATCHES = 4
GYM = "another gym and another policy"


class MicrobatchMean(LightningModule):
    """The mistake: each microbatch divides by its own number of policy tokens. A batch is a list of indices."""

    def __init__(self, policy: CausalLMPolicy, episodes: Sequence[Trajectory]) -> None:
        super().__init__()
        self.policy, self.episodes = policy, episodes
        rewards, groups = [episode.reward for episode in episodes], [str(episode.group) for episode in episodes]
        self.advantages = group_advantages(rewards, groups).advantages

    def training_step(self, batch: Sequence[int], batch_idx: int) -> Tensor:
        """The mean loss over the policy tokens of the batch."""
        microbatch = collate([self.episodes[index] for index in batch], advantages=self.advantages[list(batch)])
        log_probs = self.policy(microbatch).log_probs
        return reinforce(log_probs, microbatch.like(log_probs).advantages).mean()  # type: ignore[arg-type]

    def weighted_gradient(self, split: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """The right gradient of a step: every token carries its weight in the whole step, microbatches only add."""
        weights = loss_weights([episode.num_scored for episode in self.episodes], mode="token_mean")
        self.zero_grad(set_to_none=True)
        for part in split:
            chosen, index = [self.episodes[index] for index in part], list(part)
            microbatch = collate(chosen, advantages=self.advantages[index], weights=weights[index])
            log_probs = self.policy(microbatch).log_probs
            seen = microbatch.like(log_probs)
            (seen.weights * reinforce(log_probs, seen.advantages)).sum().backward()  # type: ignore[arg-type,operator]
        return take_gradients(self)

    def tokens(self, part: Sequence[int]) -> int:
        """Policy tokens of a microbatch."""
        return sum(self.episodes[index].num_scored for index in part)

    def judge(self, split: Sequence[Sequence[int]]) -> Verdict:
        """Compares the accumulated gradient of the mistake with that of one pass."""
        return check_normalization(self, split, lambda parts: [i for part in parts for i in part], tokens=self.tokens)


def splits(episodes: Sequence[Trajectory], seed: int = 0) -> dict[str, list[list[int]]]:
    """Four microbatches of 16 episodes, in random order and sorted by length.

    Args:
        episodes: The trajectories of a step.
        seed: Of the random order.

    Returns:
        "random" and "sorted": indices by microbatch.
    """
    shuffled = np.random.default_rng(seed).permutation(len(episodes))
    ordered = np.argsort([len(episode) for episode in episodes], kind="stable")
    halves = {"random": shuffled, "sorted": ordered}
    return {name: [part.tolist() for part in np.array_split(order, MICROBATCHES)] for name, order in halves.items()}


def reproduce(policy: CausalLMPolicy, episodes: Sequence[Trajectory], draws: int = 10) -> Section:
    """Computes the section.

    Args:
        policy: The policy that played the episodes.
        episodes: 64 trajectories.
        draws: Further random splits, which show how much one says.

    Returns:
        Rows and the figures behind them.
    """
    module = MicrobatchMean(policy, episodes)
    chosen = splits(episodes)
    verdicts = {name: module.judge(split) for name, split in chosen.items()}
    reference = module.weighted_gradient([list(range(len(episodes)))])
    ours = {name: relation(module.weighted_gradient(split), reference)[0] for name, split in chosen.items()}
    module.zero_grad(set_to_none=True)
    others = [module.judge(splits(episodes, seed)["random"]).figures["relative_error"] for seed in range(1, draws + 1)]
    counts = {name: [module.tokens(part) for part in split] for name, split in chosen.items()}
    figures = {name: dict(verdict.figures) for name, verdict in verdicts.items()}
    spread = f"other random splits: {min(others):.0%} to {max(others):.0%} over {draws}"
    section = Section("14.4", "Gradient accumulation and loss normalization (4 microbatches)")
    section.rows = [
        Row("policy tokens per microbatch, random", "159 to 208", _range(counts["random"]), GYM),
        Row("policy tokens per microbatch, sorted", "96 to 355", _range(counts["sorted"]), GYM),
        Row("mean per microbatch, random: relative error", "8%", f"{figures['random']['relative_error']:.0%}", spread),
        Row("mean per microbatch, random: cosine", "0.997", f"{figures['random']['cosine']:.3f}", GYM),
        Row("mean per microbatch, sorted: relative error", "52%", f"{figures['sorted']['relative_error']:.0%}", GYM),
        Row("mean per microbatch, sorted: cosine", "0.88", f"{figures['sorted']['cosine']:.2f}", GYM),
        Row("one normalizer, random and sorted", "1.3e-07", f"{ours['random']:.1e}, {ours['sorted']:.1e}", "rounding"),
    ]
    section.data = {"verdicts": figures, "ours": ours, "tokens": counts, "message": verdicts["sorted"].message}
    return section


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}"


def exact_gradient_error(module: MicrobatchMean, split: Sequence[Sequence[int]]) -> float:
    """Relative error of lit_rl's accumulated gradient in float64, for tests."""
    module = module.to(torch.float64)
    return relation(
        module.weighted_gradient(split), module.weighted_gradient([[index for part in split for index in part]])
    )[0]
