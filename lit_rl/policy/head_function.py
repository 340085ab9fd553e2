"""The log-probability head as autograd and `torch.compile` see it.

Scoring and its gradient are two custom operators. They are opaque to `torch.compile`, so a compiled model that
contains them stays one graph whatever the number of tokens, and they run with autocast off: the precision of the
products is one of their arguments. The one-pass loss is an `autograd.Function`, because it calls the user's objective.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_rl.policy.head_passes import (
    Gradients,
    Objective,
    differentiate_scores,
    score,
    score_and_differentiate,
)
from lit_rl.policy.head_products import HeadInputs
from lit_rl.policy.head_tiles import RowGradients, RowStatistics, TileShape, full_logits

# The fields of `HeadInputs`, in its order: an operator's arguments are spelled out in its schema.
_INPUTS = (
    "Tensor[] hiddens, Tensor[] weights, Tensor? bias, Tensor targets, Tensor? row_temperature, float temperature, "
    "float logit_scale, float? softcap, int vocab_size, ScalarType? autocast_dtype"
)
_NUM_INPUTS = _INPUTS.count(",") + 1


@torch.library.custom_op(
    "lit_rl::token_log_probs",
    mutates_args=(),
    schema=f"({_INPUTS}, int? chunk_tokens, bool entropy) -> (Tensor, Tensor, Tensor)",
)
def _token_log_probs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities `[M]`, entropies (`[M]`, or `[0]` if not asked for), statistics for backward `[3 or 4, M]`."""
    inputs = HeadInputs(*arguments[:_NUM_INPUTS])
    chunk_tokens, entropy = arguments[_NUM_INPUTS:]
    with torch.autocast(inputs.targets.device.type, enabled=False):
        scores = score(inputs, TileShape.choose(inputs, chunk_tokens), entropy=entropy)
    entropies = scores.log_probs.new_empty(0) if scores.entropy is None else scores.entropy
    return scores.log_probs, entropies, scores.statistics.stack()


@_token_log_probs.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, entropy = HeadInputs(*arguments[:_NUM_INPUTS]), arguments[-1]
    count = inputs.targets.shape[0]
    log_probs = inputs.targets.new_empty(count, dtype=inputs.compute_dtype)
    statistics = log_probs.new_empty(4 if entropy else 3, count)
    return log_probs, log_probs.new_empty(count if entropy else 0), statistics


@torch.library.custom_op(
    "lit_rl::token_log_probs_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, int? chunk_tokens, Tensor statistics, Tensor? log_prob_gradient, Tensor? entropy_gradient, "
    "bool[] needs) -> Tensor[]",
)
def _token_log_probs_backward(*arguments: Any) -> list[Tensor]:
    """Gradients of hidden states, weights and bias in their own precision; empty where `needs` asks for none."""
    inputs = HeadInputs(*arguments[:_NUM_INPUTS])
    chunk_tokens, statistics, log_prob_gradient, entropy_gradient, needs = arguments[_NUM_INPUTS:]
    compute = inputs.compute_dtype
    if log_prob_gradient is None:
        log_prob_gradient = torch.zeros_like(inputs.targets, dtype=compute)
    entropy_gradient = None if entropy_gradient is None else entropy_gradient.to(compute)
    upstream = RowGradients(log_prob_gradient.to(compute), entropy_gradient)
    with torch.autocast(inputs.targets.device.type, enabled=False):
        shape = TileShape.choose(inputs, chunk_tokens)
        gradients = differentiate_scores(inputs, shape, RowStatistics.unstack(statistics), upstream, needs)
    found = [*gradients.hiddens, *gradients.weights, gradients.bias]
    own = [*inputs.hiddens, *inputs.weights, inputs.bias]
    return [
        statistics.new_empty(0) if gradient is None or tensor is None else gradient.to(tensor.dtype)
        for gradient, tensor in zip(found, own, strict=True)
    ]


@_token_log_probs_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    inputs, statistics, needs = HeadInputs(*arguments[:_NUM_INPUTS]), arguments[_NUM_INPUTS + 1], arguments[-1]
    own = [*inputs.hiddens, *inputs.weights, inputs.bias]
    return [
        statistics.new_empty(0) if tensor is None or not needed else tensor.new_empty(tensor.shape)
        for tensor, needed in zip(own, needs, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hiddens, weights, bias, targets, row_temperature, *rest = inputs
    ctx.num_terms = len(hiddens)
    ctx.settings = rest
    ctx.save_for_backward(*hiddens, *weights, bias, targets, row_temperature, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    terms = ctx.num_terms
    *factors, bias, targets, row_temperature, statistics = ctx.saved_tensors
    *settings, entropy = ctx.settings
    needs_hiddens, needs_weights, needs_bias = ctx.needs_input_grad[:3]
    gradients: list[Tensor | None] = list(
        _token_log_probs_backward(
            factors[:terms],
            factors[terms:],
            bias,
            targets,
            row_temperature,
            *settings,
            statistics,
            log_prob_gradient,
            entropy_gradient if entropy else None,
            [*needs_hiddens, *needs_weights, needs_bias],
        )
    )
    needs = [*needs_hiddens, *needs_weights, needs_bias]
    gradients = [gradient if needed else None for gradient, needed in zip(gradients, needs, strict=True)]
    nothing = [None] * (2 + len(ctx.settings))
    return gradients[:terms], gradients[terms : 2 * terms], gradients[-1], *nothing


def _refuse_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        "The log-probability head can be differentiated once: its backward pass recomputes the logits and keeps no "
        "graph. Compute second derivatives from full logits instead."
    )


_token_log_probs.register_autograd(_backward, setup_context=_setup_context)
_token_log_probs_backward.register_autograd(_refuse_second_derivative)


def score_inputs(inputs: HeadInputs, chunk_tokens: int | None, *, entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Differentiable log-probabilities `[M]` and, if asked for, entropies `[M]`."""
    fields = (getattr(inputs, name) for name in HeadInputs.__dataclass_fields__)
    log_probs, entropies, _ = _token_log_probs(*fields, chunk_tokens, entropy)
    return log_probs, entropies if entropy else None


@torch.compiler.disable
@torch.no_grad()
def logits_of(inputs: HeadInputs, chunk_tokens: int | None) -> Tensor:
    """All logits `[M, vocab_size]`, at temperature 1, without gradient."""
    with torch.autocast(inputs.targets.device.type, enabled=False):
        return full_logits(inputs, TileShape.choose(inputs, chunk_tokens))


class _OnePassLoss(torch.autograd.Function):
    """Loss of a token-local objective whose gradients are formed while it is computed."""

    @staticmethod
    def forward(
        ctx: Any, inputs: HeadInputs, shape: TileShape, objective: Objective, needs: list[bool], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        terms = len(inputs.hiddens)
        detached: list[Any] = [None if tensor is None else tensor.detach() for tensor in tensors]
        *factors, bias = detached
        inputs = replace(inputs, hiddens=factors[:terms], weights=factors[terms:], bias=bias)
        with torch.autocast(inputs.targets.device.type, enabled=False):
            outcome = score_and_differentiate(inputs, shape, objective, needs)
        ctx.gradients = outcome.gradients
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        ctx.mark_non_differentiable(outcome.log_probs)
        return outcome.loss, outcome.log_probs

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "`LogProbHead.loss` can be differentiated once: drop `create_graph=True`. Compute second derivatives "
                "from full logits instead."
            )
        # The stored gradients are scaled in place and handed over: a copy would double the largest of them.
        gradients: Gradients | None = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError(
                "`LogProbHead.loss` keeps its gradients for one backward pass. Call it again, or use "
                "`token_log_probs`, which recomputes them."
            )
        found = [*gradients.hiddens, *gradients.weights, gradients.bias]
        scaled = [
            None if gradient is None else gradient.mul_(loss_gradient).to(dtype)
            for gradient, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return None, None, None, None, *scaled


@torch.compiler.disable
def one_pass_loss(inputs: HeadInputs, chunk_tokens: int | None, objective: Objective) -> tuple[Tensor, Tensor]:
    """The summed loss, differentiable once, and the log-probabilities `[M]`, detached."""
    tensors = [*inputs.hiddens, *inputs.weights, inputs.bias]
    needs = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    shape = TileShape.choose_chunk(inputs, chunk_tokens)
    return _OnePassLoss.apply(inputs, shape, objective, needs, *tensors)
