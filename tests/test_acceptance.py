"""What a user gets wrong, and what the library says."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl import CausalLMPolicy, PackedDataModule, PolicyModule, SingleTurn, Trajectory
from lit_rl.testing import tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories


def fit(data=None, module=None, **trainer):
    module = module or PolicyModule(tiny_policy_model(), learning_rate=1e-2)
    running = quiet_trainer(**trainer)
    running.fit(module, data or PackedDataModule(random_trajectories(16, seed=1), max_tokens=24))
    return module, running


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncated": "masked"}, "`truncated` must be one of"),
        ({"partition": "group"}, "`partition` must be one of"),
        ({"old_log_probs": "none"}, "`old_log_probs` must be one of"),
        ({"overlong": "cut"}, "`overlong` must be one of"),
        ({"baseline": "median"}, "`baseline` must be one of"),
        ({"eps": -1.0}, "`eps` must be at least 0"),
        ({"trajectories_per_step": 0}, "`trajectories_per_step` must be at least 1"),
        ({"validation_attempts": 0}, "`validation_attempts` must be at least 1"),
        ({"steps_per_iteration": 2, "trajectories_per_step": 4}, "give one of them"),
    ],
)
def test_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        PackedDataModule(random_trajectories(4), max_tokens=16, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_on": "all"}, "`loss_on` must be one of"),
        ({"normalization": "mean"}, "`normalization` must be one of"),
        ({"normalization": "constant"}, "needs `constant`"),
        ({"warmup_steps": -1}, "`warmup_steps` must be at least 0"),
    ],
)
def test_module_options_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyModule(tiny_policy_model(), **options)


def test_ids_and_lengths_beyond_the_model_name_the_trajectory():
    wrong_id = [Trajectory([1, 40], [0, 1], 1.0, task="a"), Trajectory([1, 2], [0, 1], 0.0, task="a")]
    with pytest.raises(ValueError, match=r"trajectory 0 \(task 'a'\) has the token id 40.*up to 31"):
        fit(PackedDataModule(wrong_id, max_tokens=16))
    too_long = [Trajectory([1] * 70, [0] + [1] * 69, float(i), task="a") for i in range(2)]
    with pytest.raises(ValueError, match=r"trajectory 0 \(task 'a'\) has 70 tokens, but the model has 64 positions"):
        fit(PackedDataModule(too_long, max_tokens=100), PolicyModule(tiny_policy_model("gpt2")))


class Poison(Callback):
    """Breaks the weights after the checks at the start have passed."""

    def on_train_start(self, trainer, pl_module) -> None:
        with torch.no_grad():
            next(pl_module.parameters()).fill_(float("nan"))


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_trajectory():
    with pytest.raises(ValueError, match=r"the loss of a step is nan: trajectory \d+ .* weights were not updated"):
        fit(callbacks=[Poison()])


class Wrong(PolicyModule):
    result = staticmethod(lambda log_probs, batch: None)

    def objective(self, log_probs, batch):
        return self.result(log_probs, batch)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda log_probs, batch: None, TypeError, "`objective` returned NoneType"),
        (lambda log_probs, batch: log_probs.tolist(), TypeError, "`objective` returned list"),
        (lambda log_probs, batch: log_probs.detach(), ValueError, "losses without gradient"),
        (lambda log_probs, batch: log_probs.sum(), ValueError, "one loss per scored token"),
    ],
)
def test_what_an_objective_must_return(result, error, message):
    module = Wrong(tiny_policy_model())
    module.result = result
    with pytest.raises(error, match=message):
        fit(module=module)


def test_an_objective_may_rely_on_old_log_probs_with_one_step():
    class Ratio(PolicyModule):
        def objective(self, log_probs, batch):
            return -(log_probs - batch.old_log_probs).exp() * batch.advantages

    module, _ = fit(module=Ratio(tiny_policy_model(), learning_rate=1e-2))
    assert torch.isfinite(torch.cat([p.flatten() for p in module.parameters()])).all()


def test_the_number_of_microbatches_is_chosen_anew_for_every_fit():
    data = PackedDataModule(random_trajectories(16, seed=1), max_tokens=24)
    _, trainer = fit(data, accumulate_grad_batches=9)
    assert data.iteration.plan.microbatches_per_step == 9
    assert trainer.accumulate_grad_batches == 9
    fit(data)
    assert data.iteration.plan.microbatches_per_step < 9


def test_limits_inside_a_step_and_cut_trajectories_are_said():
    with pytest.warns(UserWarning, match="ends inside a step"):
        fit(limit_train_batches=1)
    long = [Trajectory([3] * 30, [0] + [1] * 29, float(i), task="a") for i in range(2)]
    data = PackedDataModule(long, max_tokens=20, overlong="truncate")
    with pytest.warns(UserWarning, match="0 were dropped and 2 were cut"):
        fit(data)
    assert data.rollout_statistics["cut"] == 2.0


def test_settings_that_cannot_work():
    with pytest.raises(ValueError, match="there are no trajectories"):
        PackedDataModule([], max_tokens=8)
    with pytest.raises(TypeError, match=r"compile it in place with `model.compile\(\)`"):
        CausalLMPolicy(torch.compile(tiny_policy_model()))
    module = PolicyModule(tiny_policy_model())
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="would never step"):
        fit(module=module)


def test_a_reward_function_that_answers_for_all_with_one_is_an_error():
    def mean(completions, **columns):
        return [sum(map(len, completions)) / len(completions)]

    factory = SingleTurn(mean)
    episodes = [factory() for _ in range(3)]
    for number, episode in enumerate(episodes):
        episode.reset({"id": str(number), "prompt": [1, 2]})
    turns = factory.step_together(episodes, [[3], [4], [5]])
    assert [str(turn) for turn in turns] == [
        "reward 'mean' returned 1 values for 3 completions; return one for each"
    ] * 3
