"""14.5: rollouts spent on tasks by their pass rates. A run is a warmed-up policy, an arm, and GRPO."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from tqdm import tqdm

from examples.bugfix.report import read_log
from examples.bugfix.tasks import bugfix_tasks
from examples.chapter.gym import GROUP, gym_rollouts, model_with, warm_weights
from lit_rl import PackedDataModule, PolicyModule
from lit_rl.callbacks import PassRateCurriculum, ZeroAdvantageMonitor
from lit_rl.curriculum import BetaPosterior, LiveProbability

LEARNING_RATE = 1e-3  # the demo's
# Tokens sampled by the policy in a full iteration, when training begins. With this divisor a token weighs the same
# however few tasks an iteration has left; with `token_mean` it weighs more, the fewer there are.
CONSTANT = 600.0
Divisor = Literal["constant", "token_mean"]
# Attempts per held-out task at each evaluation: 64 on 10 tasks have a standard error of at most 0.02.
ATTEMPTS = 64
EVERY = 10

# The posterior's evidence fades, so excluded tasks come back by themselves: no revisits.
ARMS: dict[str, Callable[[], PassRateCurriculum]] = {
    "unfiltered": lambda: PassRateCurriculum(rule="uniform"),
    "last group": lambda: PassRateCurriculum(0.0, 1.0, estimator="last_group", revisit=1),
    "mean of three": lambda: PassRateCurriculum(0.0, 1.0, estimator="mean_of_last", revisit=1),
    "p(1-p)": lambda: PassRateCurriculum(estimator="last_group", rule="variance", revisit=1),
    "Beta posterior": lambda: PassRateCurriculum(
        estimator=BetaPosterior(memory=0.9), rule=LiveProbability(GROUP, least=0.6), revisit=0
    ),
}


class Job(NamedTuple):
    """One run, as it is sent to a process."""

    arm: str
    seed: int
    iterations: int
    attempts: int
    weights: dict[str, Tensor]
    normalization: Divisor = "constant"


def train(job: Job) -> dict[str, Any]:
    """One run.

    Args:
        job: What to run.

    Returns:
        Series by iteration and totals; plain data.
    """
    _be_quiet()
    torch.set_num_threads(1)
    started = time.perf_counter()
    module = PolicyModule(
        model_with(job.weights),
        learning_rate=LEARNING_RATE,
        normalization=job.normalization,
        constant=CONSTANT if job.normalization == "constant" else None,
    )
    data = PackedDataModule(
        gym_rollouts(job.seed),
        max_tokens=2048,
        seed=job.seed,
        validation_tasks=bugfix_tasks()[1],
        validation_attempts=job.attempts,
    )
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=job.iterations,
            check_val_every_n_epoch=min(EVERY, job.iterations),
            gradient_clip_val=1.0,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            log_every_n_steps=1,
            logger=CSVLogger(folder, name="", version=""),
            callbacks=[ARMS[job.arm](), ZeroAdvantageMonitor(share=1.0)],
        )
        (before,) = trainer.validate(module, data, verbose=False)
        trainer.fit(module, data)
        log = {name: [value for _, value in series] for name, series in read_log(Path(folder)).items()}
    return {
        "arm": job.arm,
        "seed": job.seed,
        "normalization": job.normalization,
        "iterations": job.iterations,
        "episodes": log["rollout/trajectories"],
        "pass_rate": log["rollout/pass_rate"],
        "groups": log["curriculum/tasks_drawn"],
        "dead_share": log["zero_advantage/groups"],
        "pool": log["curriculum/pool_size"],
        "wasted": log["zero_advantage/episodes_wasted"][-1],
        "held_out": [before["val/pass_rate"], *log["val/pass_rate"][-(job.iterations // min(EVERY, job.iterations)) :]],
        "seconds": round(time.perf_counter() - started, 1),
    }


def run_all(
    arms: Sequence[tuple[str, Divisor]], seeds: Sequence[int], iterations: int, attempts: int, processes: int
) -> list[Any]:
    """All arms on all seeds, a few processes at a time; the arms of a seed start from the same weights.

    Args:
        arms: Names in `ARMS`, each with a normalization.
        seeds: Of initial weights, demonstrations and sampling.
        iterations: Iterations per run.
        attempts: Attempts per held-out task.
        processes: Runs at a time.

    Returns:
        What `train` returned, by seed and arm.
    """
    context = multiprocessing.get_context("spawn")
    found = []
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        warm = list(tqdm(pool.map(warm_up, seeds), total=len(seeds), desc="14.5 warm-up"))
        jobs = [
            Job(arm, seed, iterations, attempts, weights, normalization)
            for arm, normalization in arms
            for seed, weights in zip(seeds, warm, strict=True)
        ]
        with tqdm(total=len(jobs), desc="14.5 runs") as bar:
            for future in as_completed([pool.submit(train, job) for job in jobs]):
                found.append(future.result())
                bar.set_postfix_str(f"{found[-1]['arm']}, seed {found[-1]['seed']}")
                bar.update()
    order = list(arms)
    return sorted(found, key=lambda run: (run["seed"], order.index((run["arm"], run["normalization"]))))


def warm_up(seed: int) -> dict[str, Tensor]:
    """The imitation warm-up in a process of its own, without a progress bar.

    Args:
        seed: See `warm_weights`.

    Returns:
        See `warm_weights`.
    """
    _be_quiet()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        return warm_weights(seed)


def _be_quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
