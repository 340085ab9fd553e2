"""Are our log-probabilities those of the model's own logits?"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.checks.verdict import Verdict
from lit_rl.data.batch import PackedBatch
from lit_rl.data.collate import collate
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.policy.isolation import probing_mode
from lit_rl.policy.probe import device_of, vocabulary_of
from lit_rl.trajectory import Trajectory

# Rounding steps between two ways to compute a logit, in units of the last place of the largest one.
_STEPS = {torch.float64: 64, torch.float32: 64, torch.float16: 2, torch.bfloat16: 2}


def check_head(policy: CausalLMPolicy, *, tokens: int = 4, tolerance: float | None = None, seed: int = 0) -> Verdict:
    """Compares the policy's log-probabilities with the log-softmax of what the model itself returns.

    The head goes around the model's own output path, for the memory. What a model does there besides one matrix
    product (a scale, a soft cap, a bias, an adapter, a library's patch) leaves the most likely token unchanged when
    it is forgotten, so that nobody notices; this check does.

    Args:
        policy: The policy; it is called as in training, so it may be sharded.
        tokens: Number of random tokens that are compared, at least 1.
        tolerance: Nats that are put down to rounding; `None` chooses by precision and size of the logits.
        seed: Of the random tokens.

    Returns:
        The verdict, with figures `difference_nats` (the largest) and `tolerance_nats`.

    Example:
        >>> from lit_rl.testing import tiny_policy_model
        >>> check_head(CausalLMPolicy(tiny_policy_model("granite"))).ok
        True
    """
    if tokens < 1:
        raise ValueError(f"`tokens` must be at least 1, got {tokens}")
    device = device_of(policy.model)
    ids = torch.randint(vocabulary_of(policy), (tokens + 1,), generator=torch.Generator().manual_seed(seed))
    batch = collate([Trajectory(ids, [True] * len(ids), 0.0)], layout="padded").to(device)
    policy.resolve_layout()
    try:
        with probing_mode(policy), torch.no_grad():
            ours = policy(batch).log_probs
            logits = policy(batch, output="model_logits")
    except ValueError as error:
        return Verdict(False, f"the model's own logits cannot be had for a comparison: {error}")
    return _compare(policy, ours, logits, batch, tolerance)


def _compare(
    policy: CausalLMPolicy, ours: Tensor, logits: Tensor, batch: PackedBatch, tolerance: float | None
) -> Verdict:
    scores = logits.double()[:, : policy.head.vocab_size]
    theirs = scores.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    if tolerance is None:
        tolerance = _rounding(policy, logits)
    difference = float((ours.double() - theirs).abs().max())
    figures = {"difference_nats": difference, "tolerance_nats": tolerance}
    if difference <= tolerance:
        return Verdict(True, f"log-probabilities agree with the model's own logits to {difference:.1e} nats", figures)
    return Verdict(
        False,
        f"log-probabilities differ from the model's own logits by {difference:.3g} nats (allowed: {tolerance:.1e}): "
        f"{type(policy.model).__name__} does more at its output than its output layer and the settings of "
        f"{policy.head} say, or another library has patched its forward pass",
        figures,
    )


def _rounding(policy: CausalLMPolicy, logits: Tensor) -> float:
    """A few units in the last place of the largest logit, in the least precise format that takes part."""
    formats = {tensor.dtype for tensor in (logits, *policy.model.parameters())} & _STEPS.keys()
    worst = max(formats, key=lambda dtype: torch.finfo(dtype).eps)
    return _STEPS[worst] * torch.finfo(worst).eps * max(1.0, float(logits.abs().max()))
