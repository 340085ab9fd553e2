"""TokenThroughputMonitor under a clock of the test's own: every figure can be checked by hand."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl import PolicyModule, Trajectory
from lit_rl.callbacks.throughput import TokenThroughputMonitor
from lit_rl.data.collate import collate, filler_batch
from lit_rl.testing import tiny_policy_model
from lit_rl.throughput import ModelShape, measured_assumptions, model_flops
from tests.callbacks.stubs import StubDataModule, StubModule, attempt, loader
from tests.distributed.launch import launch
from tests.helpers import quiet_trainer

SHAPE = ModelShape.decoder(hidden=8, layers=1, vocabulary=10, feed_forward=16, query_heads=2)


class Ticks:
    """A clock that only moves when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class SlowModule(StubModule):
    """Half a second per microbatch, and 7 seconds of compilation in the first one of a process."""

    def __init__(self, ticks: Ticks) -> None:
        super().__init__()
        self.ticks, self.compiled = ticks, False

    def training_step(self, batch, batch_idx):
        self.ticks.pass_by(0.5 if self.compiled else 7.5)
        self.compiled = True
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.ticks.pass_by(2.0)


class SlowDataModule(StubDataModule):
    """Iterations whose loader takes 13 seconds: 10 of rollout, 2 of old log-probs, 1 of neither."""

    def __init__(self, ticks: Ticks, make, **options) -> None:
        super().__init__(make, **options)
        self.ticks = ticks
        self.rollout_seconds = self.old_log_probs_seconds = 0.0

    def train_dataloader(self):
        made = super().train_dataloader()
        self.ticks.pass_by(13.0)
        self.rollout_seconds, self.old_log_probs_seconds = 10.0, 2.0
        return made


def pairs(epoch):
    """Two live groups of lengths 5 and 3, and one without advantage; 3 and 1 tokens are scored."""
    made = []
    for name in ("a", "b"):
        made += [attempt(1.0, length=5, group=name), attempt(0.0, length=3, group=name)]
    return [*made, attempt(1.0, length=6, group="c"), attempt(1.0, length=6, group="c")]


def run(ticks, *, monitor=None, epochs=1, options=None, callbacks=(), ckpt_path=None, **trainer):
    monitor = monitor or TokenThroughputMonitor(SHAPE, peak_tflops=1e-6, clock=ticks)
    data = SlowDataModule(ticks, pairs, **({"max_tokens": 8, "num_steps": 2} | (options or {})))
    running = quiet_trainer(
        max_epochs=epochs, reload_dataloaders_every_n_epochs=1, callbacks=[monitor, *callbacks], **trainer
    )
    running.fit(SlowModule(ticks), data, ckpt_path=ckpt_path)
    return monitor, {name.removeprefix("throughput/"): v.item() for name, v in running.callback_metrics.items()}


def test_every_phase_of_an_iteration():
    ticks = Ticks()
    _, metrics = run(ticks)
    # Two steps of one microbatch each (a group of 8 tokens is a full budget): 7.5 s with compilation, then 0.5 s.
    seconds = {"rollout": 10, "old_log_probs": 2, "first_step": 7.5, "update": 0.5, "validation": 0, "waiting": 1}
    assert {phase: metrics[f"{phase}_seconds"] for phase in seconds} == seconds
    assert metrics["gpu_hours"] == pytest.approx(21 / 3600)
    assert metrics["gpu_hours_rollout"] == pytest.approx(10 / 3600)
    # Rolled out: 4 x (5 + 3) / 2 + 2 x 6 = 28 tokens, of which 3 + 1 + 3 + 1 + 4 + 4 = 16 sampled.
    assert metrics["rollout_tokens_per_second"] == pytest.approx(2.8)
    assert metrics["rollout_sampled_tokens_per_second"] == pytest.approx(1.6)
    assert metrics["tokens_per_trajectory"] == pytest.approx(28 / 6)
    assert metrics["policy_share"] == pytest.approx(16 / 28)
    # Scored before the update: the 16 tokens of the live groups.
    assert metrics["old_log_probs_tokens_per_second"] == pytest.approx(8.0)
    scoring = model_flops(SHAPE, [5, 3, 5, 3], scored=8, work="forward").model
    assert metrics["old_log_probs_mfu"] == pytest.approx(scoring / 2.0 / 1e6)
    # The second step alone: 8 tokens, 4 scored and live, in half a second.
    assert metrics["update_tokens_per_second"] == pytest.approx(16)
    assert metrics["update_live_tokens_per_second"] == pytest.approx(8)
    flops = model_flops(SHAPE, [5, 3], scored=4)
    assert metrics["update_mfu"] == pytest.approx(flops.model / 0.5 / 1e6)
    assert metrics["update_hfu"] == pytest.approx((flops.model + flops.head / 3) / 0.5 / 1e6)
    assert metrics["update_tflops_per_segment"] == pytest.approx(flops.model / 2 / 1e12)
    assert metrics["peak_tflops"] == pytest.approx(1e-6)


def test_a_rollout_that_serves_two_epochs_is_counted_once():
    ticks = Ticks()
    monitor = TokenThroughputMonitor(SHAPE, peak_tflops=1e-6, clock=ticks)
    running = quiet_trainer(max_epochs=2, callbacks=[monitor])
    running.fit(SlowModule(ticks), SlowDataModule(ticks, pairs, max_tokens=8, num_steps=2))
    assert monitor.gpu_seconds["rollout"] == 10.0
    assert sum(monitor.gpu_seconds.values()) == ticks.now - 100.0


def test_dead_trajectories_count_in_mfu_but_not_in_useful_mfu():
    _, metrics = run(Ticks(), epochs=2, options={"loss_on": "scored", "num_steps": 1, "max_tokens": 28})
    every = model_flops(SHAPE, [5, 3, 5, 3, 6, 6], scored=16).model
    live = model_flops(SHAPE, [5, 3, 5, 3], scored=8).model
    assert metrics["update_mfu"] == pytest.approx(every / 0.5 / 1e6)
    assert metrics["update_useful_mfu"] == pytest.approx(live / 0.5 / 1e6)


def test_padding_and_fillers_raise_no_utilization():
    ticks = Ticks()
    padded = collate([attempt(1.0, length=5), attempt(1.0, length=3)], layout="padded", advantages=[1.0, 1.0])
    flat = collate([attempt(1.0, length=5), attempt(1.0, length=3)], advantages=[1.0, 1.0])
    found = []
    for batches in ([flat, padded, filler_batch()], [flat, flat, flat]):
        running = quiet_trainer(callbacks=[TokenThroughputMonitor(SHAPE, peak_tflops=1e-6, clock=ticks)])
        running.fit(SlowModule(ticks), loader(batches))
        found.append({name.removeprefix("throughput/"): v.item() for name, v in running.callback_metrics.items()})
    # One second each: 8 real tokens in 10 positions and one of a filler, against 16 in 16.
    assert [metrics["update_positions_per_second"] for metrics in found] == [11, 16]
    assert [metrics["update_tokens_per_second"] for metrics in found] == [8, 16]
    assert found[1]["update_mfu"] == pytest.approx(2 * found[0]["update_mfu"])
    assert "rollout_tokens_per_second" not in found[0]


def test_validation_is_a_phase_of_its_own():
    ticks = Ticks()
    data = SlowDataModule(ticks, pairs, max_tokens=8, num_steps=2)
    data.val_dataloader = lambda: loader([0, 1])
    monitor = TokenThroughputMonitor(SHAPE, clock=ticks)
    running = quiet_trainer(callbacks=[monitor], num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=1)
    running.fit(SlowModule(ticks), data)
    assert monitor.gpu_seconds["validation"] == 4.0
    assert monitor.gpu_seconds["update"] == 0.5
    assert sum(monitor.gpu_seconds.values()) == ticks.now - 100.0


def same_load(accumulate, world_size):
    """The same load on every rank: eight microbatches of 30 tokens, after a first step that is left out."""
    strategy = DDPStrategy(process_group_backend="gloo") if world_size > 1 else "auto"
    batches = [collate([attempt(1.0, length=30, prompt=10)], advantages=[1.0]) for _ in range(8 + accumulate)]
    ticks = Ticks()
    running = quiet_trainer(
        devices=world_size,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        callbacks=[TokenThroughputMonitor(SHAPE, peak_tflops=1e-6, clock=ticks)],
    )
    running.fit(SlowModule(ticks), loader(batches))
    return {name.removeprefix("throughput/"): value.item() for name, value in running.callback_metrics.items()}


class SaveAt(Callback):
    """Saves after a given optimizer step."""

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            self.step = -1


@pytest.mark.parametrize("step", [2, 3])
def test_a_resumed_run_adds_to_what_it_restored(tmp_path, step):
    path, ticks = tmp_path / "run.ckpt", Ticks()
    run(ticks, epochs=3, callbacks=[SaveAt(step, path)])
    # Step 2 ends iteration 0 after 21 s; step 3 comes 13 + 0.5 s later.
    saved = torch.load(path, weights_only=True)["callbacks"]
    (state,) = [value for name, value in saved.items() if "TokenThroughputMonitor" in name]
    before = {2: 21.0, 3: 34.5}[step]
    assert sum(state["gpu_seconds"].values()) == pytest.approx(before)
    later = Ticks()
    monitor, _ = run(later, epochs=3, ckpt_path=path)
    assert sum(monitor.gpu_seconds.values()) == pytest.approx(before + later.now - 100.0)
    # The first step of each process is apart: 7.5 s in both.
    assert monitor.gpu_seconds["first_step"] == pytest.approx(15.0)


class Boom(Callback):
    """Ends the fit in its second iteration."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_end(self, trainer, *arguments):
        if trainer.current_epoch == 1:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=repr)
def test_the_pause_after_an_interrupted_fit_is_no_gpu_time(error):
    ticks = Ticks()
    monitor = TokenThroughputMonitor(SHAPE, peak_tflops=1e-6, clock=ticks)
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        run(ticks, monitor=monitor, epochs=3, callbacks=[Boom(error)])
    assert sum(monitor.gpu_seconds.values()) == pytest.approx(ticks.now - 100.0)
    before = sum(monitor.gpu_seconds.values())
    ticks.pass_by(3600.0)
    assert sum(monitor.state_dict()["gpu_seconds"].values()) == pytest.approx(before)
    _, metrics = run(ticks, monitor=monitor)
    assert sum(monitor.gpu_seconds.values()) == pytest.approx(before + 21.0)
    # The interrupted iteration's work is not in the rates of the next one.
    assert metrics["update_tokens_per_second"] == pytest.approx(16)


def test_teardown_alone_stops_the_clock():
    ticks = Ticks()
    monitor = TokenThroughputMonitor(SHAPE, peak_tflops=1e-6, clock=ticks)
    trainer, module = quiet_trainer(), StubModule()
    monitor.on_fit_start(trainer, module)
    ticks.pass_by(2.0)
    monitor.teardown(trainer, module, "fit")
    ticks.pass_by(3600.0)
    assert sum(monitor.state_dict()["gpu_seconds"].values()) == 2.0


def test_an_unknown_device_means_no_utilization_and_one_message():
    ticks = Ticks()
    with pytest.warns(UserWarning, match=r"no dense peak is known for device 'cpu'.*peak_tflops") as caught:
        _, metrics = run(ticks, epochs=2, monitor=TokenThroughputMonitor(SHAPE, clock=ticks))
    assert len([w for w in caught if "dense peak" in str(w.message)]) == 1
    assert not [name for name in metrics if "mfu" in name or "peak" in name]
    assert metrics["update_tokens_per_second"] > 0


def test_a_module_without_a_config_still_gets_tokens_per_second():
    ticks = Ticks()
    with pytest.warns(UserWarning, match=r"no FLOPs and no MFU: the module has no transformers config"):
        _, metrics = run(ticks, epochs=2, monitor=TokenThroughputMonitor(peak_tflops=1.0, clock=ticks))
    assert metrics["update_tokens_per_second"] == pytest.approx(16)
    assert "update_mfu" not in metrics


def test_the_message_names_peak_and_convention(caplog):
    ticks = Ticks()
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run(ticks, monitor=TokenThroughputMonitor(SHAPE, peak_tflops=500.0, attention="causal_half", clock=ticks))
    assert "500 TFLOP/s dense (given)" in caplog.text
    assert "causal_half" in caplog.text


def test_the_log_of_a_real_run_feeds_a_plan(tmp_path):
    """A real policy, its shape found by itself, its own clock; the CSV replaces assumptions."""
    ticks = Ticks()
    data = SlowDataModule(ticks, real_pairs, max_tokens=8, num_steps=2)
    logger = CSVLogger(tmp_path, name="", version="")
    monitor = TokenThroughputMonitor(peak_tflops=1e-3)
    running = quiet_trainer(callbacks=[monitor], max_epochs=2, logger=logger, reload_dataloaders_every_n_epochs=1)
    running.fit(PolicyModule(tiny_policy_model(), learning_rate=1e-3), data)
    found = measured_assumptions(tmp_path / "metrics.csv")
    assert found["gpus"] == 1
    assert found["tokens"] == pytest.approx(28 / 6)
    assert found["rollout_rate"] == pytest.approx(2.8)
    assert found["update_rate"] > 0
    assert monitor._shape.parameters == sum(p.numel() for p in tiny_policy_model().parameters())


def real_pairs(epoch):
    return [Trajectory(t.token_ids, t.action_mask, t.reward, group=t.group, log_probs=t.log_probs) for t in pairs(0)]


def test_adapters_are_recognized():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_policy_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    )
    module = PolicyModule(model)
    monitor = TokenThroughputMonitor(peak_tflops=1.0)
    monitor.on_fit_start(quiet_trainer(), module)
    assert monitor._adapter_weights == monitor._shape.adapter_weights(2)


def test_other_batches_and_values_are_refused():
    ticks = Ticks()
    running = quiet_trainer(callbacks=[TokenThroughputMonitor(SHAPE, peak_tflops=1.0, clock=ticks)])

    class Module(SlowModule):
        def training_step(self, batch, batch_idx):
            return self.weight.sum()

    with pytest.raises(MisconfigurationException, match="got Tensor"):
        running.fit(Module(ticks), loader([torch.zeros(2)]))
    with pytest.raises(ValueError, match="`peak_tflops` must be greater than 0"):
        TokenThroughputMonitor(peak_tflops=0.0)
    with pytest.raises(FileNotFoundError, match="no config"):
        TokenThroughputMonitor("no-such-model").on_fit_start(quiet_trainer(), StubModule())


def test_it_can_be_written_in_yaml():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(TokenThroughputMonitor, "monitor")
    given = ["--monitor.model=qwen3-8b", "--monitor.peak_tflops=989.4", "--monitor.attention=causal_half"]
    monitor = parser.instantiate_classes(parser.parse_args(given)).monitor
    assert (monitor.model, monitor.peak_tflops, monitor.attention) == ("qwen3-8b", 989.4, "causal_half")


@pytest.fixture(scope="module")
def on_two_ranks():
    printed = launch("tests.callbacks.throughput_worker", [], processes=2)
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULTS ")]
    return json.loads(line.removeprefix("RESULTS "))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_tokens_per_second_double_with_the_ranks_and_mfu_does_not(on_two_ranks, accumulate):
    one, two = same_load(accumulate, 1), on_two_ranks[str(accumulate)]
    # Eight microbatches of 30 tokens, 20 of them scored, in 8 x 0.5 s on each rank.
    assert one["update_tokens_per_second"] == pytest.approx(60)
    assert two["update_tokens_per_second"] == pytest.approx(120)
    assert one["update_mfu"] == pytest.approx(model_flops(SHAPE, [30] * 8, scored=160).model / 4 / 1e6)
    assert two["update_mfu"] == pytest.approx(one["update_mfu"])
    assert two["gpu_hours"] == pytest.approx(2 * one["gpu_hours"])
    assert (one["devices"], two["devices"]) == (1, 2)
