"""All monitors and the curriculum on real rollouts of a tiny policy, stopped and resumed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_rl.callbacks import PaddingMonitor, PassRateCurriculum, SamplerRatioMonitor, ZeroAdvantageMonitor
from lit_rl.data.datamodule import PackedDataModule
from lit_rl.policy.module import PolicyModule
from lit_rl.rollout.collect import rollouts
from lit_rl.rollout.rewards import SingleTurn
from lit_rl.testing import tiny_config
from tests.helpers import quiet_trainer

PREFIXES = ("curriculum", "padding", "sampler_ratio", "zero_advantage")
TASKS = [{"id": f"say-{number}", "prompt": [1, number], "number": number} for number in range(3, 19)]


def says_number(completions: Sequence[Sequence[int]], number: Sequence[int], **columns: Any) -> list[float]:
    return [float(wanted in ids) for ids, wanted in zip(completions, number, strict=True)]


def hopeless(completions: Sequence[Sequence[int]], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def run(
    epochs: int = 4, reward: Any = says_number, ckpt_path: Path | None = None, saver: Any = None, **curriculum: Any
) -> tuple[PolicyModule, PassRateCurriculum, dict[str, float]]:
    settings = {"tasks_per_iteration": 5, "group_size": 6, "end_ids": [2], "max_new_tokens": 5}
    data = PackedDataModule(rollouts(SingleTurn(reward), TASKS, **settings), max_tokens=48, steps_per_iteration=2)
    chooser = PassRateCurriculum(**({"low": 0.05, "high": 0.95, "estimator": "beta_posterior"} | curriculum))
    callbacks = [chooser, ZeroAdvantageMonitor(), PaddingMonitor(), SamplerRatioMonitor()]
    torch.manual_seed(0)
    module = PolicyModule(tiny_config(), learning_rate=1e-2)
    trainer = quiet_trainer(
        max_epochs=epochs,
        callbacks=callbacks if saver is None else [*callbacks, saver],
        enable_checkpointing=saver is not None,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    metrics = trainer.callback_metrics.items()
    return module, chooser, {name: value.item() for name, value in metrics if name.split("/")[0] in PREFIXES}


def test_what_is_logged_fits_together() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, chooser, metrics = run()
    assert not [w for w in caught if any(word in str(w.message) for word in ("ratio", "pool", "zero advantage"))]
    assert {name.split("/")[0] for name in metrics} == set(PREFIXES)
    # the policy that trains is the one that sampled
    assert metrics["sampler_ratio/outside_20_percent"] == 0.0
    assert metrics["sampler_ratio/max"] < 1e-4
    assert metrics["curriculum/observed_live_share"] == pytest.approx(1.0 - metrics["zero_advantage/groups"])
    assert metrics["curriculum/episodes_sampled"] == 4 * 5 * 6
    assert metrics["padding/real"] + metrics["padding/skipped"] == pytest.approx(30 * metrics["padding/length_mean"])
    assert metrics["padding/positions"] == metrics["padding/real"] + metrics["padding/filler"]
    assert chooser.sampler is not None
    assert chooser.sampler.report.rounds == 1


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    module, chooser, metrics = run(saver=saver)
    assert chooser.sampler is not None
    for name in ("step=3.ckpt", "step=6.ckpt"):
        again, resumed, repeated = run(ckpt_path=tmp_path / name)
        assert resumed.sampler is not None
        assert repeated == metrics
        assert resumed.sampler.estimates() == chooser.sampler.estimates()
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))


def test_dynamic_sampling_ends_with_hopeless_tasks() -> None:
    with pytest.warns(UserWarning, match=r"0 of 5 live groups in 3 rounds \(limit=3\); it tried 15 tasks: 15 all_fail"):
        _, chooser, metrics = run(1, hopeless, dynamic_limit=3, low=0.0, high=1.0)
    assert metrics["zero_advantage/groups"] == metrics["zero_advantage/all_fail"] == 1.0
    assert metrics["curriculum/episodes"] == 15 * 6
    assert metrics["curriculum/episodes_saved"] == -10 * 6
    assert chooser.sampler is not None
    assert chooser.sampler.report.rounds == 3
