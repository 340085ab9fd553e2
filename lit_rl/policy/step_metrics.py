"""Numbers of one optimizer step: added up over its microbatches and ranks, then divided once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class StepSums:
    """Sums over the microbatches of a step, so that a mean over tokens is one however the tokens were split.

    Every rank must add the same names in every microbatch (a filler adds zeros), because the sums of all names
    travel in one tensor.

    Example:
        >>> sums = StepSums()
        >>> sums.add_mean("entropy", torch.full((10,), 1.0)); sums.add_mean("entropy", torch.full((30,), 2.0))
        >>> sums.add_total("loss", torch.tensor(0.5)); sums.add_total("loss", torch.tensor(0.25))
        >>> sums.reduce(lambda tensor: tensor)
        {'entropy': 1.75, 'loss': 0.75}
    """

    def __init__(self) -> None:
        self._numerators: dict[str, Tensor] = {}
        self._denominators: dict[str, Tensor | None] = {}

    def add_mean(self, name: str, values: Tensor) -> None:
        """Adds one value per scored token; the result is their mean over the step, left out when there was none.

        Args:
            name: Metric name.
            values: [M] of this microbatch, M may be 0.
        """
        count = torch.tensor(float(values.numel()), dtype=torch.float64, device=values.device)
        previous = self._denominators.get(name)
        self._denominators[name] = count if previous is None else previous + count
        self._add(name, values)

    def add_total(self, name: str, value: Tensor) -> None:
        """Adds a number that is summed over the step.

        Args:
            name: Metric name.
            value: A scalar of this microbatch.
        """
        self._denominators.setdefault(name, None)
        self._add(name, value)

    def _add(self, name: str, values: Tensor) -> None:
        total = values.detach().to(torch.float64).sum()
        self._numerators[name] = self._numerators[name] + total if name in self._numerators else total

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Ends the step: one reduction, one transfer from the device, and the sums start again from nothing.

        Args:
            sum_over_ranks: Adds a float64 tensor up over the ranks.

        Returns:
            Metric name to number.
        """
        if not self._numerators:
            return {}
        names = list(self._numerators)
        ones = torch.ones((), dtype=torch.float64)
        stacked = torch.stack(
            [self._numerators[name] for name in names]
            + [ones.to(self._numerators[name]) if (d := self._denominators[name]) is None else d for name in names]
        )
        values = sum_over_ranks(stacked).tolist()
        numerators, denominators = values[: len(names)], values[len(names) :]
        totals = {name for name in names if self._denominators[name] is None}
        self._numerators, self._denominators = {}, {}
        return {
            name: top if name in totals else top / bottom
            for name, top, bottom in zip(names, numerators, denominators, strict=True)
            if name in totals or bottom > 0
        }


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Puts a stable prefix before metric names.

    Example:
        >>> with_prefix("train", {"loss": 1.0})
        {'train/loss': 1.0}
    """
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
