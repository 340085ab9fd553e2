"""How far a trainer's probabilities are from the sampler's, exact over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from lit_rl.metrics import CountingMetric, Counts


class LogRatioCounts(CountingMetric):
    """Distribution of log(trainer probability / sampler probability) over scored tokens.

    Figures: "tokens"; "outside_20_percent", the share of tokens with a ratio more than 20% away from 1; "max", the
    largest absolute log-ratio in nats; "mean" of the log-ratio in nats; "kl", an estimate of KL(sampler || trainer)
    in nats per token: the mean of r - 1 - log r, never negative (Schulman 2020, "Approximating KL divergence");
    "mean_ratio", the mean of r, which is 1 for tokens drawn from the sampler's whole distribution and the share of it
    that was kept where it was cut, with its standard error "mean_ratio_error"; "above_20_percent", the share of tokens
    with a ratio above 1.2.
    "non_finite" tokens are counted and left out of all others. "outside_first" and "outside_later" are the shares
    outside among tokens of segments that stand first in their row, and of all later ones.

    Example:
        >>> metric = LogRatioCounts()
        >>> metric.update(torch.tensor([0.0, -1.0]), torch.tensor([0.0, -1.5]))
        >>> metric.compute()["outside_20_percent"]
        0.5
    """

    tokenwise: ClassVar[tuple[str, ...]] = (
        "tokens",
        "outside",
        "above",
        "log_ratio",
        "kl",
        "excess",
        "excess_square",
        "non_finite",
    )
    summed = (*tokenwise, "first", "outside_first", "later", "outside_later")
    greatest = ("max",)

    def update(self, log_probs: Tensor, sampler_log_probs: Tensor, first_in_row: Tensor | None = None) -> None:
        """Adds scored tokens.

        Args:
            log_probs: [M] the trainer's, in nats, before any update on these tokens.
            sampler_log_probs: [M] the sampler's, in nats, at the same temperature.
            first_in_row: bool [M] whether the token's segment is the first of its row; `None` leaves it out.
        """
        log_ratio = log_probs.detach().cpu().double() - sampler_log_probs.detach().cpu().double()
        finite = log_ratio.isfinite()
        inside = torch.where(finite, log_ratio, 0.0)
        # expm1 keeps small ratios exact; the clamp only keeps a hopeless one from becoming infinite.
        excess = torch.expm1(inside.clamp(max=80.0))
        outside = finite & (excess.abs() > 0.2)
        values = [finite.sum(), outside.sum(), (excess > 0.2).sum(), inside.sum(), (excess - inside).sum()]
        values += [excess.sum(), excess.square().sum(), (~finite).sum()]
        names = list(self.tokenwise)
        if first_in_row is not None:
            first_in_row = first_in_row.cpu()
            for name, mask in (("first", first_in_row), ("later", ~first_in_row)):
                values += [(finite & mask).sum(), (outside & mask).sum()]
                names += [name, f"outside_{name}"]
        values.append(inside.abs().max() if inside.numel() else inside.sum())
        self.add(dict(zip([*names, "max"], torch.stack([v.double() for v in values]).tolist(), strict=True)))

    @staticmethod
    def figures(counts: Mapping[str, float]) -> Counts:
        """The figures described above."""
        figures = {"tokens": counts["tokens"], "non_finite": counts["non_finite"], "max": counts["max"]}
        if counts["tokens"]:
            names = {"outside_20_percent": "outside", "above_20_percent": "above", "mean": "log_ratio", "kl": "kl"}
            figures |= {name: counts[count] / counts["tokens"] for name, count in names.items()}
            excess, square = counts["excess"] / counts["tokens"], counts["excess_square"] / counts["tokens"]
            figures["mean_ratio"] = 1.0 + excess
            figures["mean_ratio_error"] = math.sqrt(max(square - excess**2, 0.0) / counts["tokens"])
        for name in ("first", "later"):
            if counts[name]:
                figures[f"outside_{name}"] = counts[f"outside_{name}"] / counts[name]
        return figures
