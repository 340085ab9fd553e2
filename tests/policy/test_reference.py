"""The KL term, the sampler correction and the trajectory-level ratio, against one trajectory at a time in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_rl import PackedDataModule, PolicyModule, Trajectory, group_advantages
from lit_rl.callbacks import GradientNormalizationCheck
from lit_rl.testing import oracle_gradient, oracle_log_probs, tiny_policy_model
from tests.helpers import KeepGradients, quiet_trainer, random_trajectories

TRAJECTORIES = random_trajectories(14, seed=3)
COUNT = sum(t.num_scored for t in TRAJECTORIES)


def advantages_of(trajectories):
    return group_advantages([t.reward for t in trajectories], [t.group for t in trajectories]).advantages.tolist()


def first_gradient(model, trajectories=TRAJECTORIES, *, max_tokens=20, data=None, **module):
    keep = KeepGradients()
    policy = PolicyModule(copy.deepcopy(model), **({"learning_rate": 0.0} | module))
    trainer = quiet_trainer(precision="64-true", callbacks=[keep])
    trainer.fit(policy, PackedDataModule(trajectories, max_tokens=max_tokens, **(data or {})))
    return keep.steps[0], {name: float(value) for name, value in trainer.callback_metrics.items()}


def assert_equal(actual, expected):
    assert expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.parametrize("objective", ["reinforce", "clipped_ratio", "supervised", "own"])
@pytest.mark.parametrize("max_tokens", [12, 1000])
def test_gradient_of_the_kl_term(objective, max_tokens):
    model, frozen = tiny_policy_model(seed=0), tiny_policy_model(seed=1)
    reference = [oracle_log_probs(frozen, t)[t.scored].detach() for t in TRAJECTORIES]
    advantages = advantages_of(TRAJECTORIES)

    def loss(log_probs, i):
        log_ratio = reference[i] - log_probs
        kl = log_ratio.exp() - 1 - log_ratio
        policy = -log_probs if objective == "supervised" else -advantages[i] * log_probs
        return (policy + 0.3 * kl).sum() / COUNT

    arguments = {"kl_coefficient": 0.3, "reference": copy.deepcopy(frozen), "max_tokens": max_tokens}
    if objective == "own":

        class Own(PolicyModule):
            def objective(self, log_probs, batch):
                assert batch.reference_log_probs.shape == log_probs.shape
                return -batch.advantages * log_probs

        keep = KeepGradients()
        module = Own(copy.deepcopy(model), learning_rate=0.0, kl_coefficient=0.3, reference=copy.deepcopy(frozen))
        trainer = quiet_trainer(precision="64-true", callbacks=[keep, GradientNormalizationCheck()])
        trainer.fit(module, PackedDataModule(TRAJECTORIES, max_tokens=max_tokens))
        actual = keep.steps[0]
    else:
        actual, metrics = first_gradient(model, objective=objective, **arguments)
        now = [oracle_log_probs(model, t)[t.scored].detach() for t in TRAJECTORIES]
        log_ratio = torch.cat(reference) - torch.cat(now)
        assert metrics["train/reference_kl"] == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()), rel=1e-6)
    assert_equal(actual, oracle_gradient(model, TRAJECTORIES, loss))


def test_dead_groups_stay_in_the_loss_because_of_the_kl_term():
    dead = random_trajectories(8, seed=1, reward=1.0)
    model, frozen = tiny_policy_model(seed=0), tiny_policy_model(seed=1)
    module = PolicyModule(copy.deepcopy(model), kl_coefficient=0.1, reference=frozen)
    assert module.loss_on == "scored"
    gradients, metrics = first_gradient(
        model, dead, objective="reinforce", kl_coefficient=0.1, reference=tiny_policy_model(seed=1)
    )
    assert metrics["train/live_tokens"] == 0.0
    assert metrics["train/steps_without_signal"] == 0.0
    assert max(float(g.abs().max()) for g in gradients.values()) > 0


def test_the_reference_is_the_model_before_training_and_stays_it():
    module = PolicyModule(tiny_policy_model(), learning_rate=1e-2, kl_coefficient=0.1)
    start = copy.deepcopy(module.policy.model.state_dict())
    seen = []

    class Watch(KeepGradients):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(float(trainer.callback_metrics["train/reference_kl"]))

    trainer = quiet_trainer(max_epochs=3, callbacks=[Watch()])
    trainer.fit(module, PackedDataModule(TRAJECTORIES, max_tokens=1000))
    assert seen[0] == 0.0
    assert min(seen[1:]) > 0.0
    for name, value in module.reference.model.state_dict().items():
        assert torch.equal(value, start[name])
    assert not any(p.requires_grad for p in module.reference.parameters())
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for p in module.policy.parameters()}


def test_a_resumed_run_keeps_its_reference(tmp_path):
    def run(epochs, checkpoint=None):
        module = PolicyModule(tiny_policy_model(), learning_rate=1e-2, kl_coefficient=0.1)
        trainer = quiet_trainer(max_epochs=epochs)
        trainer.fit(module, PackedDataModule(TRAJECTORIES, max_tokens=24), ckpt_path=checkpoint, weights_only=True)
        return module, trainer

    whole, _ = run(4)
    _, half = run(2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = run(4, tmp_path / "half.ckpt")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_path_is_loaded_and_hyperparameters_say_so(tmp_path):
    tiny_policy_model(seed=1).save_pretrained(tmp_path)
    module = PolicyModule(tiny_policy_model(seed=0), kl_coefficient=0.1, reference=str(tmp_path))
    expected = dict(tiny_policy_model(seed=1).named_parameters())
    for name, value in module.reference.model.named_parameters():
        assert torch.equal(value, expected[name])
    assert module.hparams["reference"] == str(tmp_path)
    assert (
        "reference" not in PolicyModule(tiny_policy_model(), kl_coefficient=0.1, reference=module.policy.model).hparams
    )


def test_adapters_switched_off_are_the_reference():
    peft = pytest.importorskip("peft")
    base = tiny_policy_model()
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    next(p for n, p in model.named_parameters() if "lora_A" in n).requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with_adapters = [oracle_log_probs(model, t)[t.scored].detach() for t in TRAJECTORIES]
    without = [oracle_log_probs(base, t)[t.scored] for t in TRAJECTORIES]
    log_ratio = torch.cat(without).detach() - torch.cat(with_adapters)
    module = PolicyModule(model, learning_rate=1e-2, kl_coefficient=0.5)
    assert module.reference is None
    trainer = quiet_trainer(precision="64-true")
    trainer.fit(module, PackedDataModule(TRAJECTORIES, max_tokens=24))
    expected = float((log_ratio.exp() - 1 - log_ratio).mean())
    assert expected > 0.1
    assert float(trainer.callback_metrics["train/reference_kl"]) == pytest.approx(expected, rel=1e-5)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert moved == {name for name, flag in flags.items() if flag}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_gradient_of_the_sampler_correction(mode, level):
    model, limit = tiny_policy_model(), 1.5
    advantages = advantages_of(TRAJECTORIES)

    def loss(log_probs, i):
        sampler = TRAJECTORIES[i].log_probs[TRAJECTORIES[i].scored].double()
        log_ratio = log_probs.detach() - sampler
        ratio = (log_ratio.sum() if level == "sequence" else log_ratio).exp()
        inside = (ratio >= 1 / limit) & (ratio <= limit)
        weight = ratio.clamp(max=limit) if mode == "truncate" else ratio * inside
        return -(weight * advantages[i] * log_probs).sum() / COUNT

    for objective in ("reinforce", "clipped_ratio"):
        arguments = {"sampler_correction": mode, "correction_level": level, "correction_limit": limit}
        actual, metrics = first_gradient(model, objective=objective, **arguments)
        assert_equal(actual, oracle_gradient(model, TRAJECTORIES, loss))
        assert 0.0 <= metrics["train/sampler_weight"] <= limit


def test_correction_is_taken_before_the_first_update():
    weights = []

    class Look(PolicyModule):
        def _sampler_weights(self, batch):
            found = super()._sampler_weights(batch)
            weights.append((batch.trajectory_index.tolist(), found.tolist()))
            return found

    module = Look(tiny_policy_model(), learning_rate=0.5, sampler_correction="truncate", objective="reinforce")
    assert module.needs_old_log_probs
    reference = tiny_policy_model()
    data = PackedDataModule(TRAJECTORIES, max_tokens=1000, steps_per_iteration=2)
    quiet_trainer(precision="64-true").fit(module, data)
    for indices, found in weights:
        expected = [
            (oracle_log_probs(reference, TRAJECTORIES[i]) - TRAJECTORIES[i].log_probs)[TRAJECTORIES[i].scored]
            for i in indices
        ]
        assert found == pytest.approx(torch.cat(expected).exp().clamp(max=2.0).tolist(), rel=1e-4)


def test_a_step_whose_tokens_are_all_masked_by_the_correction_changes_nothing():
    far = [
        Trajectory(t.token_ids, t.action_mask, t.reward, group=t.group, log_probs=t.log_probs - 9.0)
        for t in random_trajectories(8, seed=2)
    ]
    model = tiny_policy_model()
    module = PolicyModule(copy.deepcopy(model), learning_rate=0.1, weight_decay=0.5, sampler_correction="mask")
    with pytest.warns(UserWarning, match="is exactly 0"):
        quiet_trainer().fit(module, PackedDataModule(far, max_tokens=1000))
    assert module.steps_without_signal == 1
    for name, value in module.policy.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("max_tokens", [12, 1000])
def test_gspo_against_one_trajectory_at_a_time(max_tokens):
    model, clip = tiny_policy_model(), {"clip_low": 0.02, "clip_high": 0.03}
    moved = [
        Trajectory(
            t.token_ids, t.action_mask, t.reward, group=t.group, temperature=t.temperature,
            log_probs=oracle_log_probs(model, t).detach() + 0.02 * (i % 5 - 2),
        )
        for i, t in enumerate(TRAJECTORIES)
    ]  # fmt: skip
    advantages, some = advantages_of(moved), sum(t.num_scored > 0 for t in moved)
    clipped = []

    def loss(log_probs, i):
        old = moved[i].log_probs[moved[i].scored].double()
        ratio = (log_probs - old).mean().exp()
        within = ratio.clamp(1 - clip["clip_low"], 1 + clip["clip_high"])
        clipped.append(bool(ratio * advantages[i] > within * advantages[i]))
        return -torch.minimum(ratio * advantages[i], within * advantages[i]) / some

    expected = oracle_gradient(model, moved, loss)
    assert 0 < sum(clipped) < len(clipped)
    actual, metrics = first_gradient(
        model, moved, objective="gspo", normalization="sequence_mean", max_tokens=max_tokens,
        data={"old_log_probs": "sampler"}, **clip,
    )  # fmt: skip
    assert_equal_but_for_float32(actual, expected)
    assert 0.9 < metrics["train/ratio"] < 1.1


def assert_equal_but_for_float32(actual, expected):
    """Old log-probabilities travel as float32."""
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_what_looks_at_whole_trajectories_is_not_computed_in_slices():
    model = tiny_policy_model()
    assert PolicyModule(model).token_local
    assert PolicyModule(model, sampler_correction="mask").token_local
    assert not PolicyModule(model, objective="gspo").token_local
    assert not PolicyModule(model, sampler_correction="mask", correction_level="sequence").token_local

    class Own(PolicyModule):
        def objective(self, log_probs, batch):
            return -batch.advantages * log_probs

    class Local(Own):
        token_local = True

    class Below(Local):
        pass

    class Again(Below):
        def objective(self, log_probs, batch):
            return -log_probs

    assert [kind(model).token_local for kind in (Own, Local, Below, Again)] == [False, True, True, False]


def test_clips_are_those_of_the_objective_unless_given():
    model = tiny_policy_model()
    assert (PolicyModule(model).clip_low, PolicyModule(model).clip_high) == (0.2, 0.2)
    gspo = PolicyModule(model, objective="gspo", clip_high=1e-3)
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kl_coefficient": -0.1}, "`kl_coefficient` must be at least 0"),
        ({"reference": tiny_policy_model()}, "`kl_coefficient` is 0"),
        ({"sampler_correction": "clip"}, "`sampler_correction` must be one of"),
        ({"correction_level": "row"}, "`correction_level` must be one of"),
        ({"correction_limit": 1.0}, "`correction_limit` must be greater than 1"),
        ({"sampler_correction": "mask", "objective": "supervised"}, "nothing to correct"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be at least 0"),
    ],
)
def test_arguments_that_cannot_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        PolicyModule(tiny_policy_model(), **arguments)


def test_references_that_cannot_work():
    model = tiny_policy_model()
    with pytest.raises(ValueError, match="is the model that is trained"):
        PolicyModule(model, kl_coefficient=0.1, reference=model)
    for reference, message in (
        (tiny_policy_model(vocab_size=40), "share a vocabulary"),
        (tiny_policy_model("mamba"), "the reference cannot follow the policy"),
    ):
        module = PolicyModule(tiny_policy_model(), kl_coefficient=0.1, reference=reference)
        with pytest.raises(ValueError, match=message):
            quiet_trainer().fit(module, PackedDataModule(TRAJECTORIES, max_tokens=24))
    padded = PolicyModule(tiny_policy_model("mamba"), kl_coefficient=0.1, reference=tiny_policy_model())
    with pytest.warns(UserWarning, match="padded"):
        quiet_trainer().fit(padded, PackedDataModule(TRAJECTORIES, max_tokens=24))


def test_a_correction_needs_something_to_correct():
    module = PolicyModule(tiny_policy_model(), sampler_correction="truncate")
    data = PackedDataModule(TRAJECTORIES, max_tokens=24, old_log_probs="sampler")
    with pytest.raises(MisconfigurationException, match="would correct nothing"):
        quiet_trainer().fit(module, data)
    unknown = random_trajectories(8, log_probs=None)
    module = PolicyModule(tiny_policy_model(), sampler_correction="truncate")
    with pytest.raises(ValueError, match="has no `sampler_log_probs`"):
        quiet_trainer().fit(module, PackedDataModule(unknown, max_tokens=24))
