from __future__ import annotations

import copy
import warnings

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lit_rl import CausalLMPolicy, PackedDataModule, PolicyModule, Trajectory, collate
from lit_rl.callbacks import PackingCheck
from lit_rl.checks.packing import check_packing
from lit_rl.checks.verdict import Verdict
from lit_rl.data.batch import PackedBatch
from lit_rl.policy.attention import attention_name
from lit_rl.testing import oracle_log_probs, tiny_policy_model
from tests.helpers import quiet_trainer, random_trajectories


class RunningPositions(CausalLMPolicy):
    """The planted bug: positions count on through the row."""

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        if batch.layout == "packed":
            width = batch.input_ids.shape[1]
            batch = batch.replace(position_ids=torch.arange(width).expand_as(batch.position_ids))
        return super().hidden_states(batch)


class PlainCausalMask(CausalLMPolicy):
    """The planted bug: positions restart, but every token sees all earlier tokens of the row."""

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        if batch.layout != "packed":
            return super().hidden_states(batch)
        ones = torch.ones_like(batch.input_ids)
        with self.reference_attention():
            return self.model.base_model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=ones, use_cache=False
            )[0]


class LooksAhead(nn.Module):
    """Adds what stands at the next position, as a kernel of width 2 padded on the wrong side does."""

    def __init__(self, inner: nn.Module, share: float = 1.0) -> None:
        super().__init__()
        self.inner, self.share = inner, share

    def forward(self, hidden: Tensor) -> Tensor:
        outputs = self.inner(hidden)
        return outputs + self.share * nn.functional.pad(outputs, (0, 0, 0, 1))[:, 1:]


class Rolled(LooksAhead):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.roll(self.inner(hidden), -1, 1)


class OwnModel(nn.Module):
    """A model of one's own that does not say where its embedding is."""

    def __init__(self, kind: type[LooksAhead]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.position = (nn.Parameter(torch.randn(n, 8)) for n in (32, 64))
        self.mixer, self.lm_head = kind(nn.Linear(8, 8)), nn.Linear(8, 32, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Tensor:
        return self.mixer(self.table[input_ids] + self.position[position_ids])


def moved(policy: CausalLMPolicy, model: nn.Module) -> float:
    """Nats by which a packed batch is off."""
    generator = torch.Generator().manual_seed(3)
    attempts = [Trajectory(torch.randint(32, (n,), generator=generator), [True] * n, 0.0) for n in (7, 5, 9)]
    expected = torch.cat([oracle_log_probs(model, attempt)[1:] for attempt in attempts])
    return float((policy(collate(attempts)).log_probs - expected).abs().max().detach())


def planted(bug: type[CausalLMPolicy], architecture: str) -> CausalLMPolicy:
    """A policy that was settled as packed before the bug came in."""
    model = tiny_policy_model(architecture)
    policy = bug(model, layout="packed")
    policy._attention = CausalLMPolicy(model, layout="packed").attention
    return policy


@pytest.mark.parametrize(
    ("bug", "architecture", "message"),
    [
        (RunningPositions, "gpt2", r"do not see each other: their position numbers do not restart.*`transformer\.wpe`"),
        (RunningPositions, "opt", r"position numbers do not restart.*embed_positions`"),
        (
            PlainCausalMask,
            "gpt2",
            r"segments see each other.*attention leak.*`transformer\.h\.0\.attn` \(GPT2Attention\)",
        ),
        (PlainCausalMask, "qwen3", r"segments see each other.*`model\.layers\.0\.self_attn` \(Qwen3Attention\)"),
        (PlainCausalMask, "gemma3_text", r"segments see each other.*`model\.layers\.0\.self_attn` \(Gemma3Attention\)"),
    ],
)
def test_planted_bugs_are_caught_and_named(bug: type[CausalLMPolicy], architecture: str, message: str) -> None:
    policy = planted(bug, architecture)
    assert moved(policy, policy.model) > 0.1
    verdict = check_packing(policy)
    assert not verdict.ok
    assert verdict.figures["alone_nats"] > 0.1
    assert (verdict.figures["changed_nats"] > 0.1) == (bug is PlainCausalMask)
    assert (verdict.figures["gradient_share"] > 0) == (bug is PlainCausalMask)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(verdict.message)
    # Unsettled, such a policy is never packed.
    with pytest.raises(ValueError, match=message):
        bug(tiny_policy_model(architecture), layout="packed").resolve_layout()


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma3_text", "falcon"])
def test_without_a_bug_nothing_is_found(architecture: str) -> None:
    policy = CausalLMPolicy(tiny_policy_model(architecture))
    verdict = check_packing(policy)
    assert verdict.ok, verdict.message
    assert verdict.figures["alone_nats"] <= 1e-5
    assert verdict.figures["gradient_share"] == verdict.figures["changed_nats"] == 0.0


@pytest.mark.parametrize("layout", ["auto", "packed", "padded"])
@pytest.mark.parametrize("kind", [LooksAhead, Rolled])
def test_a_look_ahead_of_one_token_is_refused_by_the_name_of_the_module(kind: type[LooksAhead], layout: str) -> None:
    model = tiny_policy_model("qwen3")
    model.model.layers[1].mlp = kind(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=rf"not causal.*`model\.layers\.1\.mlp` \({kind.__name__}\)"):
        CausalLMPolicy(model, layout=layout).resolve_layout()
    verdict = check_packing(model)
    assert not verdict.ok
    assert verdict.figures["future_nats"] > 0.1
    assert verdict.figures["future_gradient_share"] > 0.1
    # A policy that was settled before the module came in.
    policy = CausalLMPolicy(tiny_policy_model("qwen3"), layout="packed" if layout == "auto" else layout)
    policy.resolve_layout()
    policy.model.model.layers[1].mlp = kind(policy.model.model.layers[1].mlp)
    assert "the model is not causal" in check_packing(policy).message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faint_look_ahead_shows_in_the_gradient(dtype: torch.dtype) -> None:
    policy = CausalLMPolicy(tiny_policy_model("qwen3", dtype=dtype))
    policy.resolve_layout()
    policy.model.model.layers[1].mlp = LooksAhead(policy.model.model.layers[1].mlp, 1e-3)
    verdict = check_packing(policy, tolerance=0.25)
    assert not verdict.ok
    assert "the model is not causal" in verdict.message
    assert verdict.figures["future_nats"] < 0.025


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("kind", [LooksAhead, Rolled])
def test_a_look_ahead_is_seen_where_the_embedding_is_unknown(kind: type[LooksAhead], layout: str) -> None:
    with pytest.raises(ValueError, match=rf"not causal.*`mixer` \({kind.__name__}\)"):
        CausalLMPolicy(OwnModel(kind), layout=layout).resolve_layout()


def test_padded_policies_are_checked_as_such() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = CausalLMPolicy(tiny_policy_model("mamba"))
        verdict = check_packing(policy)
    assert verdict.ok
    assert "not packed but padded" in verdict.message


def test_a_bare_model_is_left_as_it_was() -> None:
    for architecture, ok in (("gpt2", True), ("mamba", False), ("falcon", True)):
        model = tiny_policy_model(architecture).train()
        config, attention, weights = model.config.to_dict(), attention_name(model), copy.deepcopy(model.state_dict())
        dropouts = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
        state = torch.get_rng_state()
        verdict = check_packing(model)
        assert verdict.ok == ok
        assert set(verdict.figures) >= {"changed_nats", "alone_nats", "tolerance_nats"}
        assert (model.config.to_dict(), attention_name(model)) == (config, attention)
        assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == dropouts
        assert all(module.training for module in model.modules())
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_longer_segments_can_be_asked_for() -> None:
    class Forgetful(CausalLMPolicy):
        """Loses its windows, which are 4 tokens wide, when packed."""

        def hidden_states(self, batch: PackedBatch) -> Tensor:
            if batch.layout != "packed":
                return super().hidden_states(batch)
            self.model.config.sliding_window = 100
            try:
                return super().hidden_states(batch)
            finally:
                self.model.config.sliding_window = 4

    policy = Forgetful(tiny_policy_model("mistral"), layout="packed")
    assert check_packing(policy).ok
    verdict = check_packing(policy, lengths=(6, 9, 2))
    assert not verdict.ok
    assert "differ from the trajectories alone" in verdict.message
    with pytest.raises(ValueError, match=r"two segments of at least 2 tokens.*\[5, 1\]"):
        check_packing(policy, lengths=(5, 1))


def test_the_tolerance_can_be_set() -> None:
    assert not check_packing(CausalLMPolicy(tiny_policy_model("qwen3")), tolerance=0.0).ok
    with pytest.raises(TypeError, match="got str"):
        check_packing("model")  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_callback_checks_in_the_precision_of_the_run(precision: str) -> None:
    check = PackingCheck()
    trainer = quiet_trainer(callbacks=[check], precision=precision)
    trainer.fit(PolicyModule(tiny_policy_model("qwen3")), PackedDataModule(random_trajectories(8), max_tokens=64))
    assert check.verdict is not None
    assert check.verdict.ok
    assert check.verdict.figures["tolerance_nats"] == (1e-4 if precision == "32-true" else 0.25)


def test_the_callback_says_what_other_modules_can_use() -> None:
    trainer = quiet_trainer(callbacks=[PackingCheck()])
    with pytest.raises(
        MisconfigurationException, match=r"got BoringModel; for other modules call `lit_rl\.check_packing`"
    ):
        trainer.fit(BoringModel())


def test_a_verdict_is_no_boolean() -> None:
    with pytest.raises(TypeError, match=r"verdict\.ok"):
        bool(Verdict(True, "fine"))
