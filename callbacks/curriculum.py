"""Spends rollouts on tasks whose outcome is not yet certain."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lit_rl.curriculum import (
    BetaPosterior,
    DynamicSampling,
    ExponentialAverage,
    Interval,
    LastGroup,
    LiveProbability,
    MeanOfLast,
    PassRate,
    Rule,
    TaskSampler,
    Thompson,
    Uniform,
    Variance,
)
from lit_rl.monitoring import log_reduced

EstimatorName = Literal["last_group", "mean_of_last", "exponential_average", "beta_posterior"]
RuleName = Literal["interval", "variance", "live_probability", "thompson", "uniform"]
_ESTIMATORS: dict[str, type[PassRate]] = {
    "last_group": LastGroup,
    "mean_of_last": MeanOfLast,
    "exponential_average": ExponentialAverage,
    "beta_posterior": BetaPosterior,
}


class PassRateCurriculum(Callback):
    """Chooses the tasks of each rollout by their estimated pass rates.

    Installs a `TaskSampler` in the rollouts of the `PackedDataModule` at setup, before the first rollout, and keeps
    it in the checkpoint. The estimates cost no extra rollouts: every group that is sampled updates its task. All
    ranks see all groups, so they hold the same estimates without communicating.

    Logged once per iteration:

    | name under `curriculum/` | meaning |
    |---|---|
    | `pool_size` | tasks with a positive score |
    | `excluded_easy`, `excluded_hard` | tasks with score 0, by the side of the rule's centre |
    | `tasks_drawn` | tasks sampled in this iteration |
    | `revisits` | of these, excluded tasks looked at again |
    | `stand_ins` | of these, excluded tasks that stood in for a pool that was too small |
    | `episodes` | attempts of this iteration |
    | `episodes_sampled`, `episodes_saved` | attempts since the start, and those left out against filling every place |
    | `predicted_live_share` | share of groups expected, before sampling, to have both passes and fails |
    | `observed_live_share` | share of groups that turned out to have a signal |
    | `estimates/unseen`, `/zero`, `/0_to_25`, `/25_to_50`, `/50_to_75`, `/75_to_100`, `/one` | histogram: shares of \
all tasks, which sum to 1 |

    Args:
        low: With the rule "interval": tasks with an estimate at or below are excluded.
        high: With the rule "interval": tasks with an estimate at or above are excluded.
        estimator: How pass rates are estimated: a name, or an object such as `BetaPosterior(memory=0.98)`.
        rule: Which tasks are worth an attempt: "interval" (low < p < high), "variance" (in proportion to p(1-p)),
            "live_probability" (in proportion to the chance of a group with both passes and fails), "thompson" (needs
            "beta_posterior"), "uniform", or a `Rule` object.
        revisit: Tasks per iteration taken from the excluded ones, the longest undrawn first.
        refill: When the pool is smaller than an iteration: "none" samples fewer tasks, "full" fills up with excluded
            ones.
        floor: Fewest tasks an iteration may have before excluded ones stand in, with a warning.
        threshold: Reward from which an attempt counts as passed; where rewards are shaped, the environment gives
            `info["outcome"]`, which is then compared instead. A group whose rewards differ has a signal and is never
            certain: where none of them reaches `threshold` it counts half a pass, and one warning says so.
        dynamic_limit: Most rounds per iteration that look for groups with a signal (see `DynamicSampling`); 1 is
            no dynamic sampling.
        dynamic_exhausted: When the rounds end too early: "keep" what was found, or "raise".
        seed: Of the draws.

    Raises:
        ValueError: A name is unknown, or bounds are given for a rule that has none.
        MisconfigurationException: At setup, when the data module has no rollouts.

    Example:
        >>> curriculum = PassRateCurriculum(0.1, 0.9, estimator="beta_posterior", revisit=2)
    """

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1.0,
        *,
        estimator: EstimatorName | PassRate = "last_group",
        rule: RuleName | Rule = "interval",
        revisit: int = 1,
        refill: Literal["none", "full"] = "none",
        floor: int = 1,
        threshold: float = 1.0,
        dynamic_limit: int = 1,
        dynamic_exhausted: Literal["keep", "raise"] = "keep",
        seed: int = 0,
    ) -> None:
        if rule != "interval" and (low, high) != (0.0, 1.0):
            raise ValueError(f"`low` and `high` belong to rule='interval', but `rule` is {rule!r}; leave them away")
        self._interval = Interval(low, high)
        self._rule = rule
        self._estimator = _estimator(estimator)
        self._dynamic = DynamicSampling(dynamic_limit, dynamic_exhausted) if dynamic_limit != 1 else None
        self._options: dict[str, Any] = {"revisit": revisit, "refill": refill, "floor": floor, "threshold": threshold}
        self._options["seed"] = seed
        self._restored: dict[str, Any] | None = None
        self.sampler: TaskSampler | None = None
        # Bad values are refused here, not at the first rollout.
        TaskSampler(["task"], estimator=self._estimator, rule=self._build_rule(group_size=2), **self._options)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Installs the sampler: the last moment before the first rollout that every Trainer offers."""
        if stage != "fit":
            return
        rollouts = getattr(getattr(trainer, "datamodule", None), "rollouts", None)
        if rollouts is None:
            raise MisconfigurationException(
                "`PassRateCurriculum` chooses the tasks of rollouts, but the Trainer's data module has none. Fit with "
                "`PackedDataModule(rollouts(environment, tasks), ...)`, or remove the callback: a fixed data set of "
                "trajectories has no task to choose"
            )
        task_ids = rollouts.task_sampler.task_ids
        if self.sampler is None:
            rule = self._build_rule(rollouts.group_size)
            self.sampler = TaskSampler(task_ids, estimator=self._estimator, rule=rule, **self._options)
            self.sampler.warn = rank_zero_warn
        else:
            # Another fit: it counts its iterations from 0 again, and its groups may have another size.
            self.sampler.end_iteration()
            self.sampler.set_tasks(task_ids)
            self.sampler.rule = self._build_rule(rollouts.group_size)
        if self._restored is not None:
            self.load_state_dict(self._restored)
        rollouts.task_sampler = self.sampler
        if self._dynamic is not None:
            if not hasattr(rollouts, "dynamic_sampling"):
                raise MisconfigurationException(
                    f"`dynamic_limit={self._dynamic.limit}` asks for further rounds, but {type(rollouts).__name__} has "
                    "no `dynamic_sampling` to set; use `lit_rl.rollout.rollouts`, or leave `dynamic_limit` at 1"
                )
            rollouts.dynamic_sampling = self._dynamic

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs what the sampler did; nothing to reduce, every rank has the same numbers."""
        assert self.sampler is not None
        metrics = {f"curriculum/{name}": value for name, value in self.sampler.metrics().items()}
        log_reduced(pl_module, metrics)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.sampler is None else {"sampler": self.sampler.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls this after `setup` and before the first rollout; a state given earlier waits for `setup`."""
        if self.sampler is None:
            self._restored = state_dict
        elif state_dict:
            self.sampler.load_state_dict(state_dict["sampler"])
            self._restored = None

    def _build_rule(self, group_size: int) -> Rule:
        if isinstance(self._rule, Rule):
            return self._rule
        rules = {"interval": self._interval, "variance": Variance(), "thompson": Thompson(), "uniform": Uniform()}
        if self._rule == "live_probability":
            return LiveProbability(group_size)
        if self._rule not in rules:
            raise ValueError(f"`rule` must be one of {[*rules, 'live_probability']} or a Rule, got {self._rule!r}")
        return rules[self._rule]


def _estimator(estimator: str | PassRate) -> PassRate:
    if isinstance(estimator, PassRate):
        return estimator
    if estimator not in _ESTIMATORS:
        raise ValueError(f"`estimator` must be one of {[*_ESTIMATORS]} or a PassRate object, got {estimator!r}")
    return _ESTIMATORS[estimator]()
