"""Which way of decoding is right for a model: measured on the model itself, before the first rollout."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rl.rollout.decoding import CachedDecoder, Decoder, PrefixDecoder, generation_mode

if TYPE_CHECKING:
    from lit_rl.policy.causal_lm import CausalLMPolicy

# "padded": with a cache, prompts of any lengths together; "equal_lengths": with a cache, only prompts of one length
# together; "prefix": without a cache.
Decoding = Literal["padded", "equal_lengths", "prefix"]
# transformers 5 renamed the argument and the output; models of either generation are spoken to in their own words.
_CACHE_ARGUMENTS = ("cache", "past_key_values")
# Typical difference of hidden states, relative to their size, that rounding explains.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}
_PROMPT_LENGTHS: dict[Decoding, tuple[int, ...]] = {"padded": (2, 5, 4), "equal_lengths": (4, 4, 4)}
_choices: WeakKeyDictionary[nn.Module, Decoding] = WeakKeyDictionary()


def choose_decoding(policy: CausalLMPolicy) -> Decoding:
    """Finds the fastest way of decoding that gives the hidden states of the plain forward pass.

    A few random tokens are decoded, rows leaving on the way, and compared with every prefix run alone. Some models
    with recurrent layers do not stand padding on the left, or a cache whose rows are selected. Measured once per
    policy.

    Args:
        policy: The policy.

    Returns:
        "padded" for nearly every transformers model; "prefix" for every other network.

    Example:
        >>> from lit_rl.policy.causal_lm import CausalLMPolicy
        >>> from lit_rl.testing import tiny_policy_model
        >>> choose_decoding(CausalLMPolicy(tiny_policy_model()))
        'padded'
    """
    if policy not in _choices:
        with generation_mode(policy):
            _choices[policy] = _measure(policy)
    return _choices[policy]


def make_decoder(policy: CausalLMPolicy, decoding: Decoding) -> Decoder:
    """Makes the decoder for one batch of prompts.

    Args:
        policy: The policy.
        decoding: As `choose_decoding` found it.

    Returns:
        A fresh decoder.
    """
    network = network_of(policy)
    cache_argument = None if decoding == "prefix" else _cache_argument(network)
    if cache_argument is None:
        return PrefixDecoder(network)
    return CachedDecoder(network, cache_argument)


def network_of(policy: CausalLMPolicy) -> nn.Module:
    """What computes the hidden states of a policy."""
    from lit_rl.policy.backbone import backbone_of

    return backbone_of(policy.model)


def _cache_argument(network: nn.Module) -> str | None:
    """How a transformers model calls its cache; `None` for networks without one."""
    from transformers import PreTrainedModel

    accepted = inspect.signature(network.forward).parameters
    if not isinstance(network, PreTrainedModel) or "attention_mask" not in accepted:
        return None
    return next((name for name in _CACHE_ARGUMENTS if name in accepted), None)


def _measure(policy: CausalLMPolicy) -> Decoding:
    if _cache_argument(network_of(policy)) is None:
        return "prefix"
    reasons = []
    for decoding, lengths in _PROMPT_LENGTHS.items():
        try:
            error, allowed = _difference(policy, decoding, lengths)
        except Exception as exception:
            reasons.append(f"{type(exception).__name__}: {exception}")
            continue
        if error <= allowed:
            if reasons:
                rank_zero_warn(
                    f"{type(policy.model).__name__} does not stand padding on the left ({reasons[0]}): only prompts of "
                    "equal length are generated together, which is slower"
                )
            return decoding
        reasons.append(f"hidden states are off by {error:.2g} of their size")
    rank_zero_warn(
        f"{type(policy.model).__name__} cannot be decoded with its cache ({reasons[-1]}): every token runs the whole "
        "prefix again, which is slower"
    )
    return "prefix"


def _difference(policy: CausalLMPolicy, decoding: Decoding, lengths: Sequence[int]) -> tuple[float, float]:
    """Typical difference to the plain forward pass relative to its size, and how much rounding explains."""
    vocabulary = vocabulary_of(policy) or 2
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = [draw(length) for length in lengths]
    prompts.append(prompts[-1])  # equal prompts are read once
    added = [draw(len(prompts)) for _ in range(3)]
    decoder = make_decoder(policy, decoding)
    rows = list(range(len(prompts)))
    found = [decoder.start(prompts, len(added))]
    wanted = [_alone(policy, prompts)]
    for step, new in enumerate(added):
        prompts = [[*prompt, new[row]] for row, prompt in zip(rows, prompts, strict=True)]
        found.append(decoder.advance(torch.tensor([new[row] for row in rows], device=found[0].device)))
        wanted.append(_alone(policy, prompts))
        if step == 0:  # the first row leaves
            rows, prompts = rows[1:], prompts[1:]
            decoder.keep(torch.arange(1, len(rows) + 1, device=found[0].device))
    reference = torch.cat(wanted).cpu().double()
    error = (torch.cat(found).cpu().double() - reference).abs().median() / reference.abs().median().clamp(min=1e-30)
    return float(error), _rounding(network_of(policy))


def _rounding(network: nn.Module) -> float:
    """What the least precise number in the computation explains: a parameter's, or autocast's."""
    used = {parameter.dtype for parameter in network.parameters()}
    device = next(network.parameters()).device.type
    if torch.is_autocast_enabled(device):
        used.add(torch.get_autocast_dtype(device))
    return max(_TOLERANCE.get(dtype, 0.0) for dtype in used)


def _alone(policy: CausalLMPolicy, prompts: Sequence[Sequence[int]]) -> Tensor:
    """[prompts, D]: the last hidden state of each prompt, run by itself without a cache."""
    network = network_of(policy)
    return torch.cat([PrefixDecoder(network).start([prompt], 0) for prompt in prompts])


def vocabulary_of(policy: CausalLMPolicy) -> int | None:
    """How many ids the model can read, where it says so."""
    return getattr(policy.embedding(), "num_embeddings", None)
