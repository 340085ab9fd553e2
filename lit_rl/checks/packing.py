"""Are packed segments what the trajectories are alone? Measured on the user's own model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lit_rl.checks.verdict import Verdict
from lit_rl.policy.attention import own_attention
from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.policy.dropout import switch_off_dropout
from lit_rl.policy.isolation import Isolation, measure_isolation, probing_mode
from lit_rl.policy.probe import LENGTHS


def check_packing(
    policy: nn.Module, *, tolerance: float | None = None, seed: int = 0, lengths: Sequence[int] = LENGTHS
) -> Verdict:
    """Runs a few short random segments packed, alone, and with one of them replaced.

    Isolation holds when no log-probability and no gradient of a segment moves with another segment's tokens or with
    later tokens of its own, and when each segment's log-probabilities are those of the trajectory alone. The model,
    its gradients, its attention, its mode and the random state are left as they were.

    Args:
        policy: A `CausalLMPolicy`, checked in the layout it trains with; or a causal LM, checked as to whether it
            can be packed at all.
        tolerance: Nats that are put down to rounding; `None` chooses by the precision of the model.
        seed: Of the random tokens.
        lengths: Tokens of the segments, two of them at least 2. Windows, chunks and selections of keys that a model
            uses from some length on are only seen by segments beyond that length.

    Returns:
        The verdict. Its message names the first module that is to blame; its figures are `changed_nats`,
        `gradient_share`, `future_nats`, `future_gradient_share`, `alone_nats`, `padded_nats` and `tolerance_nats`
        (see `Isolation`).

    Raises:
        TypeError: `policy` is no module, or a model without the pieces that `CausalLMPolicy` needs.

    Example:
        >>> from lit_rl.testing import tiny_policy_model
        >>> check_packing(tiny_policy_model("qwen3")).ok
        True
        >>> verdict = check_packing(tiny_policy_model("mamba"))
        >>> verdict.ok, "backbone.layers.0.mixer" in verdict.message
        (False, True)
    """
    if isinstance(policy, CausalLMPolicy):
        return _check_policy(policy, tolerance, seed, lengths)
    if not isinstance(policy, nn.Module):
        raise TypeError(f"`policy` must be a CausalLMPolicy or a causal LM, got {type(policy).__name__}")
    restore_dropout = switch_off_dropout(policy)
    try:
        inner = policy.get_base_model() if hasattr(policy, "get_base_model") else policy  # type: ignore[operator]
        with own_attention(inner):
            return _check_policy(CausalLMPolicy(policy, layout="packed"), tolerance, seed, lengths)
    finally:
        restore_dropout()


def _check_policy(policy: CausalLMPolicy, tolerance: float | None, seed: int, lengths: Sequence[int]) -> Verdict:
    try:
        layout = policy.resolve_layout()
    except ValueError as error:
        return Verdict(False, str(error), {} if policy.isolation is None else _figures(policy.isolation))
    with probing_mode(policy):
        result = measure_isolation(policy, layout=layout, tolerance=tolerance, seed=seed, lengths=lengths)
    kept_apart = "packed" if layout == "packed" else "not packed but padded, in rows of one"
    return Verdict(result.ok, f"trajectories are {kept_apart} ({policy.attention}): {result.message}", _figures(result))


def _figures(result: Isolation) -> dict[str, float]:
    return {
        "changed_nats": result.changed,
        "gradient_share": result.gradient,
        "future_nats": result.future,
        "future_gradient_share": result.ahead,
        "alone_nats": result.alone,
        "padded_nats": result.padded,
        "tolerance_nats": result.tolerance,
    }
