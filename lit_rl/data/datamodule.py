"""The LightningDataModule: rollouts or a data set in, planned microbatches out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_rl import strategies
from lit_rl.advantages import Baseline, Scale
from lit_rl.data.concerns import concerns
from lit_rl.data.evaluation import EvaluationRequest, every_rank_loader, prediction_requests, reward_statistics
from lit_rl.data.iteration import Iteration, IterationOptions, Microbatches, build_iteration
from lit_rl.data.loader import ResumableLoader
from lit_rl.data.old_log_probs import sampler_log_probs, score_trajectories
from lit_rl.data.sampler import TokenBudgetSampler
from lit_rl.data.state import trajectories_from_state, trajectories_to_state
from lit_rl.data.summary import Summary, as_trajectories, check_readable, summarize, without_rewards
from lit_rl.options import check_at_least, check_choices
from lit_rl.policy.module import PolicyModule
from lit_rl.rollout.collect import Rollouts
from lit_rl.rollout.tasks import index_tasks
from lit_rl.throughput.cost import segment_cost_of
from lit_rl.trajectory import Trajectory

OldLogProbs = Literal["recompute", "sampler"]


class PackedDataModule(LightningDataModule):
    """Plans packed microbatches of an iteration's trajectories, and hands them out so that any stop can be resumed.

    One Trainer epoch is one iteration: with a `Rollouts` source its trajectories are made by the current policy when
    the epoch begins; with a data set, an epoch is one pass over it. The plan is the same on every rank, and the data
    module sets `Trainer(accumulate_grad_batches)` to the smallest number K of microbatches per step that fits the
    token budget (a K > 1 that you give is kept). `reload_dataloaders_every_n_epochs` is set to 1 for you.

    Args:
        source: Where trajectories come from: `rollouts(environment, tasks, ...)`, a `datasets.Dataset` as
            `to_dataset` writes it, the path of a .parquet or .jsonl file of its rows, or a list of `Trajectory`.
        max_tokens: The token budget: most positions of one microbatch, padding included.
        steps_per_iteration: Optimizer steps per iteration.
        trajectories_per_step: Instead of `steps_per_iteration`: about this many trajectories make one step.
        overlong: What to do with a trajectory longer than `max_tokens`: "raise", "drop" or "truncate" (counted).
        baseline: As in `group_advantages`; "none" makes the reward itself the advantage, whatever the scale.
        scale: As in `group_advantages`.
        eps: As in `group_advantages`.
        missing_rewards: "raise", or "ignore" to leave unscored trajectories out of baseline and loss (counted).
        truncated: "keep" trains truncated trajectories; "mask" takes their tokens out of the loss, while their
            reward still counts in the baseline.
        partition: Whether a step gets whole groups ("groups") or any trajectories ("trajectories").
        old_log_probs: With several steps per iteration, what the ratio is taken against: "recompute" (the policy
            before the first update, with the same plan) or "sampler" (the trajectories' own `log_probs`).
        cost: Cost of segments by their lengths, for balancing; `None` takes it from the model's shape.
        seed: Of the partition into steps and the order of microbatches.
        num_workers: Processes that build microbatches ahead; 0 is right for trajectories in memory.
        validation_tasks: Held-out tasks, attempted with the source's environment in `Trainer.validate` and during
            `fit`; logs `val/reward`, `val/pass_rate` and more. `Trainer.predict` returns the trajectories of this
            process, task by task; on several processes the last task's list may be empty.
        validation_attempts: Trajectories per held-out task.
        validation_data: Instead of tasks: held-out trajectories; logs `val/nats_per_token`.

    Raises:
        TypeError: The source or the budget has the wrong type.
        ValueError: The budget cannot work.

    Example:
        >>> data = [Trajectory([1, 2, 3], [0, 1, 1], reward=float(i % 2), task="a") for i in range(4)]
        >>> PackedDataModule(data, max_tokens=8).rollouts is None
        True
    """

    def __init__(
        self,
        source: Rollouts | Dataset | Sequence[Trajectory] | str | Path,
        *,
        max_tokens: int,
        steps_per_iteration: int = 1,
        trajectories_per_step: int | None = None,
        overlong: Literal["raise", "drop", "truncate"] = "raise",
        baseline: Baseline = "mean",
        scale: Scale = "std",
        eps: float = 1e-6,
        missing_rewards: Literal["raise", "ignore"] = "raise",
        truncated: Literal["keep", "mask"] = "keep",
        partition: Literal["groups", "trajectories"] = "groups",
        old_log_probs: OldLogProbs = "recompute",
        cost: Callable[[Any], Any] | None = None,
        seed: int = 0,
        num_workers: int = 0,
        validation_tasks: Sequence[Mapping[str, Any]] | None = None,
        validation_attempts: int = 1,
        validation_data: Dataset | Sequence[Trajectory] | str | Path | None = None,
    ) -> None:
        super().__init__()
        self.rollouts = source if isinstance(source, Rollouts) else None
        self._trajectories = None if self.rollouts is not None else as_trajectories(source)
        # Bad values are refused here, not at the first epoch.
        self._options = IterationOptions(
            max_tokens=max_tokens,
            num_steps=steps_per_iteration,
            overlong=overlong,
            baseline=baseline,
            scale=scale,
            eps=eps,
            missing_rewards=missing_rewards,
            truncated=truncated,
            partition=partition,
            cost=cost,
        )
        check_at_least(1, trajectories_per_step=trajectories_per_step, validation_attempts=validation_attempts)
        check_at_least(0, num_workers=num_workers, seed=seed)
        check_choices(old_log_probs=(old_log_probs, OldLogProbs))
        if trajectories_per_step is not None and steps_per_iteration != 1:
            raise ValueError(
                f"`steps_per_iteration` ({steps_per_iteration}) and `trajectories_per_step` ({trajectories_per_step}) "
                "say the same thing; give one of them"
            )
        self.max_tokens, self.trajectories_per_step = max_tokens, trajectories_per_step
        self.old_log_probs, self.seed, self.num_workers = old_log_probs, seed, num_workers
        self.validation_tasks, self.validation_attempts = validation_tasks, validation_attempts
        self._validation = None if validation_data is None else as_trajectories(validation_data)
        declared = None if self.rollouts is None else self.rollouts.limits.max_trajectory_tokens
        if declared is not None and declared > max_tokens and overlong == "raise":
            raise ValueError(
                f"`max_tokens` ({max_tokens}) is below the rollouts' `max_trajectory_tokens` ({declared}): one may "
                "not fit; raise the one, lower the other, or choose `overlong='drop'` or 'truncate'"
            )
        if validation_tasks is not None and validation_data is not None:
            raise ValueError("`validation_tasks` and `validation_data` exclude each other; give one of them")
        if validation_tasks is not None and self.rollouts is None:
            raise ValueError(
                "`validation_tasks` need a `rollouts(...)` source to act in; give `validation_data` instead"
            )
        if validation_tasks is not None:
            index_tasks(validation_tasks, "validation_tasks")
        if validation_tasks is None and validation_data is None:
            # Lightning warns about an empty loader, but not where the hook is the base class's.
            self.val_dataloader = LightningDataModule.val_dataloader.__get__(self)  # type: ignore[method-assign]
        self.iteration: Iteration | None = None
        self.rollout_statistics: dict[str, float] = {}
        self.rollout_seconds = self.old_log_probs_seconds = 0.0
        self._warned: set[str] = set()  # what is said once, however often it happens
        self._summary: Summary | None = None
        self._old: list[Tensor] | None = None
        self._users: tuple[int, int] | None = None  # the Trainer's K and reloading before the fit
        self._restored: dict[str, Any] | None = None

    # --- Lightning hooks ---------------------------------------------------------------------------------------

    @override
    def setup(self, stage: str) -> None:
        if stage == "validate" and self.validation_tasks is None and self._validation is None:
            raise MisconfigurationException(
                "there is nothing to validate on; give the data module `validation_tasks` or `validation_data`"
            )
        if stage != "fit":
            return
        trainer = self._running
        if trainer.reload_dataloaders_every_n_epochs not in (0, 1):
            raise MisconfigurationException(
                f"`Trainer(reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs})` would train "
                "several epochs on the trajectories of one; leave it away (it is set to 1)"
            )
        if trainer.overfit_batches:
            raise MisconfigurationException(
                f"`Trainer(overfit_batches={trainer.overfit_batches})` would replace the plan's sampler; use "
                "`limit_train_batches` instead"
            )
        if self.old_log_probs == "sampler" and self._module().sampler_correction != "none":
            raise MisconfigurationException(
                "with `old_log_probs='sampler'` ratios are taken against the sampler already, and `sampler_correction` "
                "would correct nothing; use 'recompute', or leave one of them away"
            )
        self._users = (trainer.accumulate_grad_batches, trainer.reload_dataloaders_every_n_epochs)
        trainer.reload_dataloaders_every_n_epochs = 1

    @override
    def teardown(self, stage: str) -> None:
        if stage == "fit":
            self._give_back()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._give_back()  # After an exception Lightning calls no `teardown`.

    @override
    def train_dataloader(self) -> ResumableLoader:
        module, epoch = self._module(), self._running.current_epoch
        module.sigterm.hold(self._running)
        self.rollout_seconds = self.old_log_probs_seconds = 0.0
        trajectories = self._take_restored(epoch)
        if trajectories is None:
            trajectories = self._collect(module, epoch)
        self.iteration = iteration = self._plan(trajectories, module, epoch)
        self._running.accumulate_grad_batches = iteration.plan.microbatches_per_step
        losses = {f"dropped/{reason}": float(number) for reason, number in iteration.dropped.items()}
        self.rollout_statistics |= losses | {"cut": float(iteration.cut)}
        limit = self._running.limit_train_batches
        for kind, message in concerns(iteration, limit):
            if kind not in self._warned:
                self._warned |= {kind} & {"nothing"}
                rank_zero_warn(message)
        self._old = self._settle_old_log_probs(module)
        return self._loader(iteration, self._old)

    @override
    def val_dataloader(self) -> DataLoader:
        self._module().sigterm.hold(self._running)
        if self.validation_tasks is not None:
            rank, world_size = self._place()
            request = EvaluationRequest(
                self._rollouts(),
                list(self.validation_tasks),
                attempts=self.validation_attempts,
                rank=rank,
                world_size=world_size,
            )
            return every_rank_loader([request])
        assert self._validation is not None
        options = {"loss_on": "scored", "baseline": "none", "truncated": "keep", "num_steps": 1}
        return self._loader(self._plan(self._validation, self._module(), 0, **options), None)

    @override
    def predict_dataloader(self) -> DataLoader:
        if self.validation_tasks is None:
            raise MisconfigurationException(
                "`Trainer.predict` attempts `validation_tasks`; give them to the data module"
            )
        rank, world_size = self._place()
        return every_rank_loader(
            prediction_requests(
                self._rollouts(),
                list(self.validation_tasks),
                attempts=self.validation_attempts,
                rank=rank,
                world_size=world_size,
            )
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.iteration is None:
            return {}
        online = self.rollouts is not None
        return {
            "iteration": self.iteration.index,
            "microbatches": self._microbatches_in_use(self.iteration),
            "microbatches_per_step": self.iteration.plan.microbatches_per_step,
            "trajectories": trajectories_to_state(self.iteration.trajectories) if online else None,
            "old_log_probs": self._old,
            "rollout_statistics": dict(self.rollout_statistics),
            "task_sampler": self._rollouts().task_sampler.state_dict() if online else None,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict or self._running.state.fn != TrainerFn.FITTING:
            return
        self._restored = state_dict
        if self.rollouts is not None and state_dict["task_sampler"] is not None:
            self.rollouts.task_sampler.load_state_dict(state_dict["task_sampler"])

    @property
    def old_log_probs_by_trajectory(self) -> list[Tensor] | None:
        """[L] per trajectory of the iteration: the log-probabilities before its first update, where they are kept."""
        return self._old

    # --- private -----------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Any:
        """The Trainer; `Any`, because some of its attributes are set outside of its class."""
        if self.trainer is None:
            raise MisconfigurationException("`PackedDataModule` plans for a Trainer; pass it to `trainer.fit`")
        return self.trainer

    def _give_back(self) -> None:
        """The Trainer may fit again, with other data: what was chosen for these is not the user's choice."""
        trainer, self._restored = self._running, None
        if self._users is not None:
            trainer.accumulate_grad_batches, trainer.reload_dataloaders_every_n_epochs = self._users
            self._users = None

    def _microbatches_in_use(self, iteration: Iteration) -> int:
        """Microbatches of an iteration on each rank, as far as `limit_train_batches` lets it go."""
        planned = iteration.plan.num_steps * iteration.plan.microbatches_per_step
        return int(min(planned, self._running.num_training_batches))

    def _module(self) -> PolicyModule:
        module = self._running.lightning_module
        if not isinstance(module, PolicyModule):
            raise MisconfigurationException(f"`PackedDataModule` trains a PolicyModule, got {type(module).__name__}")
        return module

    def _rollouts(self) -> Rollouts:
        assert self.rollouts is not None
        return self.rollouts

    def _place(self) -> tuple[int, int]:
        return strategies.data_parallel_rank_and_size(self._running)

    def _take_restored(self, epoch: int) -> Sequence[Trajectory] | None:
        restored, self._restored = self._restored, None
        self._old = None
        if restored is None or restored["iteration"] != epoch:
            return None
        self._old = restored["old_log_probs"]
        self.rollout_statistics = dict(restored["rollout_statistics"])
        return self._trajectories if self.rollouts is None else trajectories_from_state(restored["trajectories"])

    def _collect(self, module: PolicyModule, epoch: int) -> Sequence[Trajectory]:
        if self._trajectories is not None:
            return self._trajectories
        rank, world_size = self._place()
        started = time.perf_counter()
        assert module.policy is not None
        context = self._running.precision_plugin.forward_context()
        with context, strategies.gathered_parameters(module.policy):
            trajectories = self._rollouts().collect(
                module.policy,
                iteration=epoch,
                rank=rank,
                world_size=world_size,
                temperature=module.temperature,
                progress=self._running.progress_bar_callback is not None,
            )
        self.rollout_seconds = time.perf_counter() - started
        self.rollout_statistics = reward_statistics(trajectories) | self._rollouts().last_statistics
        return trajectories

    def _plan(self, trajectories: Sequence[Trajectory], module: PolicyModule, epoch: int, **changes: Any) -> Iteration:
        if trajectories is self._trajectories:
            summary = self._summary = self._summary or summarize(trajectories)
        else:
            summary = summarize(trajectories)
        if trajectories is self._validation or module.is_supervised:
            summary = without_rewards(summary)
        assert module.policy is not None
        check_readable(summary, module.policy.model)
        num_steps = self._options.num_steps
        if self.trajectories_per_step is not None:
            num_steps = max(1, round(len(trajectories) / self.trajectories_per_step))
        options = replace(
            self._options,
            num_steps=num_steps,
            layout=module.policy.resolve_layout(),
            cost=self._options.cost or segment_cost_of(module.policy.model),
            normalization=module.normalization,
            constant=module.constant,
            denominator=module.denominator,
            loss_on=module.loss_on,
            objective=strategies.planning_objective(self._running),
            microbatches_per_step=self._users[0] if self._users and self._users[0] > 1 and not changes else None,
            world_size=self._place()[1],
            seed=(self.seed, epoch),
        )
        return build_iteration(trajectories, epoch, replace(options, **changes), summary)

    def _loader(self, iteration: Iteration, old: list[Tensor] | None) -> ResumableLoader:
        sampler = TokenBudgetSampler.from_plan(iteration.plan, self._place()[0])
        return ResumableLoader(Microbatches(iteration, old), sampler, num_workers=self.num_workers)

    def _settle_old_log_probs(self, module: PolicyModule) -> list[Tensor] | None:
        iteration = self.iteration
        assert iteration is not None
        if self._old is not None or not module.needs_old_log_probs:
            return self._old
        if self.old_log_probs == "sampler":
            whole = sampler_log_probs(iteration.trajectories)
            return [log_probs[:length] for log_probs, length in zip(whole, iteration.lengths, strict=True)]
        if iteration.plan.num_steps == 1:
            return None  # before the only update the policy is its own reference: the ratio is exactly 1
        assert module.policy is not None
        started = time.perf_counter()
        with self._running.precision_plugin.train_step_context():
            loader = self._loader(iteration, None)
            old = score_trajectories(module.policy, loader, iteration.lengths, module.device)
        self.old_log_probs_seconds = time.perf_counter() - started
        return old
