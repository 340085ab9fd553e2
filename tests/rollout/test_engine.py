from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch

from lit_rl.data.collate import collate
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.rollout import decoding_choice
from lit_rl.rollout.decoding import CachedDecoder
from lit_rl.rollout.decoding_choice import choose_decoding
from lit_rl.rollout.engine import Completion, Engine, TransformersEngine
from lit_rl.testing import oracle_log_probs, tiny_policy_model
from lit_rl.trajectory import Trajectory
from tests.rollout.toys import Chain, OwnNetwork, tiny_policy

PROMPTS = [[1, 5, 6], [1, 7], [1, 5, 6, 8, 9, 4, 3, 10], [1, 5, 6], [4]]
LIMITS = [9, 6, 7, 8, 11]
SEEDS = [3, 4, 5, 6, 7]


def generate(policy: CausalLMPolicy, *, batch_size: int | None = None, temperature: float = 0.8) -> list[Completion]:
    engine = TransformersEngine(policy, end_ids=[2, 9], batch_size=batch_size)
    return engine.generate(PROMPTS, max_new_tokens=LIMITS, temperature=temperature, seeds=SEEDS)


def largest_error(policy: CausalLMPolicy, completions: Sequence[Completion], temperature: float = 0.8) -> float:
    errors = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = [*prompt, *completion.token_ids]
        mask = [0] * len(prompt) + [1] * len(completion.token_ids)
        oracle = oracle_log_probs(policy.model, Trajectory(ids, mask, 1.0, temperature=temperature))[len(prompt) :]
        errors.append((oracle - torch.tensor(completion.log_probs, dtype=torch.float64)).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "gemma2", "bloom", "gpt_neo", "granite", "lfm2", "rwkv"])
def test_log_probabilities_are_those_of_one_sequence_alone(architecture: str) -> None:
    policy = tiny_policy(architecture)
    assert largest_error(policy, generate(policy)) < 1e-5


def test_log_probabilities_of_a_float64_model_are_float64() -> None:
    policy = tiny_policy(dtype=torch.float64)
    # The oracle rounds the temperature to float32, so a temperature that needs no rounding.
    assert largest_error(policy, generate(policy, temperature=0.75), temperature=0.75) < 1e-12


@pytest.mark.parametrize("batch_size", [1, 3])
def test_completions_do_not_depend_on_the_batch(batch_size: int) -> None:
    policy = tiny_policy()
    together, apart = generate(policy), generate(policy, batch_size=batch_size)
    assert [c.token_ids for c in together] == [c.token_ids for c in apart]
    assert [c.truncated for c in together] == [c.truncated for c in apart]
    for one, other in zip(together, apart, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_completions_come_back_in_the_order_of_the_prompts() -> None:
    engine = TransformersEngine(CausalLMPolicy(Chain({3: 4, 4: 5, 5: 6, 6: 7, 7: 8, 8: 2})), end_ids=[2])
    prompts = [[7], [3, 3, 3], [8, 8], [5, 5, 5, 5], [4]]
    found = engine.generate(prompts, max_new_tokens=9, temperature=1.0, seeds=[0] * 5)
    assert [c.token_ids for c in found] == [[8, 2], [4, 5, 6, 7, 8, 2], [2], [6, 7, 8, 2], [5, 6, 7, 8, 2]]


def test_every_end_token_ends_and_is_kept() -> None:
    engine = TransformersEngine(CausalLMPolicy(Chain({5: 9, 9: 0, 4: 5, 6: 8, 8: 0})), end_ids={8, 9})
    found = engine.generate([[4], [6]], max_new_tokens=5, temperature=1.0, seeds=[0, 0])
    assert [c.token_ids for c in found] == [[5, 9], [8]]
    assert [c.truncated for c in found] == [False, False]


def test_truncation_is_a_flag_and_not_the_length() -> None:
    policy = CausalLMPolicy(Chain({3: 4, 4: 5, 5: 2, 6: 7, 7: 6}))
    engine = TransformersEngine(policy, end_ids=[2])
    ended, cut = engine.generate([[3], [6]], max_new_tokens=3, temperature=1.0, seeds=[0, 0])
    assert (ended.token_ids, ended.truncated) == ([4, 5, 2], False)
    assert (cut.token_ids, cut.truncated) == ([7, 6, 7], True)


def test_without_end_tokens_only_the_limit_ends() -> None:
    engine = TransformersEngine(tiny_policy(), end_ids=())
    found = engine.generate(PROMPTS, max_new_tokens=LIMITS, temperature=1.0, seeds=SEEDS)
    assert [len(c.token_ids) for c in found] == LIMITS
    assert all(c.truncated for c in found)


def test_the_seed_decides() -> None:
    engine = TransformersEngine(tiny_policy(), end_ids=())
    seeds = [1, 2, 1, 3]
    first, second, third, fourth = engine.generate([[1]] * 4, max_new_tokens=12, temperature=1.0, seeds=seeds)
    assert first == third
    assert len({tuple(c.token_ids) for c in (first, second, fourth)}) == 3


def test_equal_prompts_are_read_once() -> None:
    policy = tiny_policy()
    choose_decoding(policy)
    shapes: list[tuple[int, ...]] = []
    embedding = policy.embedding()
    assert embedding is not None
    embedding.register_forward_hook(lambda _module, inputs, _output: shapes.append(tuple(inputs[0].shape)))
    engine = TransformersEngine(policy, end_ids=())
    engine.generate([[1, 5]] * 6 + [[4]] * 2, max_new_tokens=2, temperature=1.0, seeds=range(8))
    assert shapes == [(2, 2), (8, 1)]


def test_finished_rows_leave_the_batch() -> None:
    rows: list[int] = []
    network = Chain({3: 2, 4: 5, 5: 2, 6: 7, 7: 8, 8: 2})
    network.lm_head.register_forward_pre_hook(lambda _module, inputs: rows.append(inputs[0].shape[0]))
    policy = CausalLMPolicy(network)
    head_logits = policy.head.logits
    policy.head.logits = lambda hidden: (rows.append(hidden.shape[0]), head_logits(hidden))[1]  # type: ignore[method-assign]
    TransformersEngine(policy, end_ids=[2]).generate([[3], [4], [6]], max_new_tokens=9, temperature=1.0, seeds=[0] * 3)
    assert rows[-3:] == [3, 2, 1]


def test_modes_gradients_and_random_state_are_left_alone() -> None:
    policy = tiny_policy()
    policy.train()
    policy.model.model.layers[1].eval()
    modes = {name: module.training for name, module in policy.named_modules()}
    state = torch.random.get_rng_state()
    generate(policy)
    assert {name: module.training for name, module in policy.named_modules()} == modes
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled()
    # A tensor made in inference mode and kept anywhere in the model would fail here.
    policy(collate([Trajectory([1, 5, 6], [0, 1, 1], 1.0)])).log_probs.sum().backward()


def test_sampled_in_evaluation_mode() -> None:
    policy = tiny_policy()
    policy.train()
    policy.model.model.layers[0].register_forward_hook(lambda module, *_: modes.append(module.training))
    modes: list[bool] = []
    generate(policy)
    assert modes
    assert not any(modes)


def test_the_ratio_to_training_is_one() -> None:
    policy = tiny_policy()
    completions = generate(policy, temperature=0.7)
    trajectories = [
        Trajectory(
            [*prompt, *c.token_ids],
            [0] * len(prompt) + [1] * len(c.token_ids),
            1.0,
            log_probs=[0.0] * len(prompt) + c.log_probs,
            temperature=0.7,
        )
        for prompt, c in zip(PROMPTS, completions, strict=True)
    ]
    batch = collate(trajectories)
    log_probs = policy(batch).log_probs
    assert policy.layout == "packed"
    assert (log_probs - batch.sampler_log_probs).abs().max().item() < 1e-5


def test_own_network_runs_the_prefix_again() -> None:
    torch.manual_seed(0)
    network = OwnNetwork()
    policy = CausalLMPolicy(network)
    assert choose_decoding(policy) == "prefix"
    network.widths.clear()
    engine = TransformersEngine(policy, end_ids=())
    prompts = [[1, 2, 3, 4, 5], [6]]
    # Together 39 columns: more than the 40 positions if the long prompt's width stayed after it has left.
    found = engine.generate(prompts, max_new_tokens=[2, 39], temperature=0.5, seeds=[8, 9])
    assert network.widths == [5, 6, *range(3, 40)]
    for prompt, completion in zip(prompts, found, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = network.lm_head(network(ids, torch.arange(ids.shape[1])[None]))[0, :-1] / 0.5
        plain = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0][len(prompt) - 1 :]
        assert completion.log_probs == pytest.approx(plain.tolist(), abs=1e-5)


def test_models_that_do_not_stand_left_padding_are_grouped_by_length() -> None:
    policy = tiny_policy("mamba")
    with pytest.warns(UserWarning, match="equal length"):
        assert choose_decoding(policy) == "equal_lengths"
    assert largest_error(policy, generate(policy)) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_decoding(policy)


def test_a_cache_that_does_not_do_its_work_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: CachedDecoder, token_ids: torch.Tensor) -> torch.Tensor:
        self.cache = None
        return real(self, token_ids)

    real = CachedDecoder.advance
    monkeypatch.setattr(CachedDecoder, "advance", forgetful)
    policy = tiny_policy()
    with pytest.warns(UserWarning, match="whole prefix again"):
        assert choose_decoding(policy) == "prefix"
    assert largest_error(policy, generate(policy)) < 1e-5


def test_a_model_whose_cache_raises_is_decoded_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise NotImplementedError("no selection of rows")

    monkeypatch.setattr(CachedDecoder, "keep", broken)
    with pytest.warns(UserWarning, match="no selection of rows"):
        assert choose_decoding(tiny_policy()) == "prefix"


def test_short_prompts_are_not_padded_beyond_the_context() -> None:
    # GPT-Neo looks its causal mask up by column; 64 columns are all it has.
    policy = tiny_policy("gpt_neo")
    engine = TransformersEngine(policy, end_ids=())
    found = engine.generate([[3] * 62, [4, 5]], max_new_tokens=[2, 62], temperature=1.0, seeds=[1, 2])
    assert [len(c.token_ids) for c in found] == [2, 62]


@pytest.mark.parametrize("precision", ["weights", "autocast"])
def test_half_precision_samples_as_it_trains(precision: str) -> None:
    policy = tiny_policy(dtype=torch.bfloat16 if precision == "weights" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        assert choose_decoding(policy) == "padded"
        completions = generate(policy, temperature=0.7)
        trajectories = [
            Trajectory(prompt + c.token_ids, [0] * len(prompt) + [1] * len(c.token_ids), 1.0, temperature=0.7)
            for prompt, c in zip(PROMPTS, completions, strict=True)
        ]
        trained = torch.cat([policy(collate([trajectory])).log_probs.detach() for trajectory in trajectories])
    sampled = torch.tensor([value for c in completions for value in c.log_probs])
    assert trained.dtype == torch.float32
    # Rounding of bfloat16 hidden states, in nats; another precision of the sampler would show as a bias as well.
    assert (trained - sampled).abs().max().item() < 0.15
    assert (trained - sampled).mean().abs().item() < 0.02


def test_adapters_are_sampled_from() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        tiny_policy_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    policy = CausalLMPolicy(adapted)
    assert choose_decoding(policy) == "padded"
    assert largest_error(policy, generate(policy)) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "`temperature` must be finite and greater than 0, got 0.0"),
        ({"temperature": float("nan")}, "greater than 0, got nan"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1], [3, 32]]}, "prompt 1 holds the id 32; expected 0 to 31"),
        ({"prompts": [[-1], [3]]}, "prompt 0 holds the id -1"),
        ({"max_new_tokens": [4, 0]}, "`max_new_tokens` of prompt 1 is 0"),
        ({"max_new_tokens": [4]}, "2 prompts, 1 limits and 2 seeds"),
        ({"seeds": [1]}, "2 prompts, 2 limits and 1 seeds"),
    ],
)
def test_bad_calls_are_refused(change: dict, message: str) -> None:
    arguments = {"prompts": [[1], [3]], "max_new_tokens": 4, "temperature": 1.0, "seeds": [1, 2]} | change
    prompts = arguments.pop("prompts")
    with pytest.raises(ValueError, match=message):
        TransformersEngine(tiny_policy(), end_ids=[2]).generate(prompts, **arguments)


def test_bad_settings_are_refused() -> None:
    policy = tiny_policy()
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        TransformersEngine(policy, end_ids=[2], batch_size=0)
    with pytest.raises(TypeError, match="`end_ids` must be a collection"):
        TransformersEngine(policy, end_ids=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got '</s>'"):
        TransformersEngine(policy, end_ids=["</s>"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"`batch_size` must be an integer of at least 1, got 1\.5"):
        TransformersEngine(policy, end_ids=[2], batch_size=1.5)  # type: ignore[arg-type]
    for limit in (1.5, [1.5], "1"):
        with pytest.raises(TypeError, match="`max_new_tokens` must be an integer, or one per prompt, got"):
            TransformersEngine(policy, end_ids=[2]).generate([[1]], max_new_tokens=limit, temperature=1.0, seeds=[1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`temperature` must be a number"):
        TransformersEngine(policy, end_ids=[2]).generate([[1]], max_new_tokens=1, temperature="1", seeds=[1])  # type: ignore[arg-type]


def test_broken_weights_are_named() -> None:
    policy = tiny_policy()
    choose_decoding(policy)
    with torch.no_grad():
        policy.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="logits are not finite"):
        generate(policy)


def test_no_prompts_no_completions() -> None:
    assert (
        TransformersEngine(tiny_policy(), end_ids=[2]).generate([], max_new_tokens=3, temperature=1.0, seeds=[]) == []
    )


def test_the_engine_is_an_engine() -> None:
    assert isinstance(TransformersEngine(tiny_policy(), end_ids=[2]), Engine)
    assert not isinstance(object(), Engine)


def test_choices_do_not_keep_policies_alive() -> None:
    import gc

    policy = tiny_policy()
    choose_decoding(policy)
    before = len(decoding_choice._choices)
    del policy
    gc.collect()
    assert len(decoding_choice._choices) < before
