"""Log-probabilities and entropies of chosen tokens, straight from hidden states, without holding the logits.

The logits of a language model are by far the largest tensor of a training step: 20 GB in float32 for 32,768 tokens
and a vocabulary of 151,936. The head never holds them. It makes a tile of them at a time, some tokens by some of the
vocabulary, takes from it what log-probability and entropy need, and lets it go; backward makes each tile again.

The limit, and how far the head is from it. With the logits stored, forward and backward are three matrix products.
Making the logits twice is a fourth, so no head that stores nothing can be faster than 4/3 of the products alone.
`LogProbHead.loss` makes three: where a token's loss depends on its own log-probability only, the derivative is known
as soon as the token is scored. Everything between the products works in place on a tile in cache. Measured for 2,048
tokens, a vocabulary of 151,936 and a width of 1,024 in float32 on one AMD EPYC core (Zen 5): two passes take 1.39
times, and one pass 1.08 times, what the head's three products take alone; 0.65 and 0.50 times what full logits take,
because the head's products are the faster ones there (see `lit_rl.policy.head_products`). Run
`examples/benchmarks/head.py` for other sizes and machines. On CUDA nothing has been measured.

Memory, beyond inputs, their gradients and outputs. `token_log_probs` holds two tiles, two blocks of the weight's
gradient and some 30 bytes per token: about 0.1 GB on CPU and 0.4 GB on an accelerator, whatever the number of tokens,
and less than one chunk of logits (of `chunk_tokens` tokens, or 512 MiB). Where hidden states are bfloat16, their
gradient is held in float32 until it is complete. `LogProbHead.loss` holds one chunk of logits and a fifth of it
besides, and the weight's gradient in float32 if the weight is of a lower precision. By arithmetic, for 16,384 tokens of
the sizes above in bfloat16, everything included: 1.2 GB in two passes, 2.0 GB in one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_rl.policy.head_function import logits_of, one_pass_loss, score_inputs
from lit_rl.policy.head_inputs import check_count, check_number, prepare_inputs
from lit_rl.policy.head_passes import Objective
from lit_rl.policy.head_products import HeadInputs
from lit_rl.policy.output_layer import (
    LogitTransform,
    check_output_layer,
    find_output_layer,
    gather,
    gather_optional,
    read_output_layer,
)


class TokenLogProbs(NamedTuple):
    """What the head says about each token.

    Attributes:
        log_probs: Log-probability of each target, in nats, shape of the targets, float32 (float64 for float64
            inputs), never above 0, and exactly 0 for ignored targets.
        entropy: Entropy of each token's distribution, in nats, likewise; None if it was not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    entropy: bool = False,
) -> TokenLogProbs:
    """Log-probability of each target under `softmax(cap(logit_scale * (hidden @ weight.T + bias)) / temperature)`.

    Differentiable once with respect to `hidden`, `weight` and `bias`, through log-probabilities and entropies. Only
    gradients that are asked for are computed; tokens whose upstream gradients are exactly zero, and ignored ones,
    take no part in backward. Products accumulate in float32 and the softmax is float32, whatever the inputs are;
    each gradient has the dtype of its own tensor and is rounded to it once. Under autocast the factors of the
    products are first rounded to the autocast dtype, in forward and backward alike. Inputs are never changed. To
    `torch.compile` it is one operator.

    Args:
        hidden: Hidden states `[..., D]` that predict the targets; any strides. Select scored tokens beforehand.
        weight: Output weight `[V, D]`. A `DTensor` is gathered once, and its gradient is averaged over its ranks.
        targets: Token ids `[...]`; -100 marks a token that is not scored, whose hidden state is not even read.
        bias: Output bias `[V]`.
        temperature: Positive number, or one per target `[...]`.
        logit_scale: Positive multiplier of the logits.
        softcap: Bounds the logits to `softcap * tanh(logits / softcap)`, after the scale and before the temperature.
        vocab_size: Real size of the vocabulary, where the weight has more rows: they get no probability and no
            gradient. None means every row is a token.
        chunk_tokens: Tokens whose logits may exist at a time, and more than do. None chooses tiles of at most 24 MiB
            on CPU and 256 MiB elsewhere.
        entropy: Whether to compute entropies.

    Returns:
        Log-probabilities and entropies in the shape of the targets.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or value; the message names the position of a wrong target.

    Example:
        >>> hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [2.0]]).log1p()
        >>> token_log_probs(hidden, weight, torch.tensor([1])).log_probs.exp()
        tensor([0.7500])
        >>> token_log_probs(hidden, weight, torch.tensor([1]), temperature=0.5).log_probs.exp()
        tensor([0.9000])
    """
    check_count("chunk_tokens", chunk_tokens)
    inputs = prepare_inputs(
        [hidden],
        [gather(weight)],
        targets,
        bias=gather_optional(bias),
        temperature=temperature,
        logit_scale=logit_scale,
        softcap=softcap,
        vocab_size=vocab_size,
    )
    return _scores(inputs, targets.shape, chunk_tokens, entropy=entropy)


def _scores(inputs: HeadInputs, shape: torch.Size, chunk_tokens: int | None, *, entropy: bool) -> TokenLogProbs:
    log_probs, entropies = score_inputs(inputs, chunk_tokens, entropy=entropy)
    return TokenLogProbs(log_probs.reshape(shape), None if entropies is None else entropies.reshape(shape))


class LogProbHead(nn.Module):
    """A model's output layer, evaluated for chosen tokens without holding the logits.

    The output layer is read anew at each call, so that adapters may be switched in between. Plain layers and tied
    embeddings are evaluated as they are. PEFT's LoRA is evaluated as two products, so that no adapted weight is ever
    built, and `modules_to_save` as the module in force. A weight that FSDP2 keeps sharded is gathered once per call;
    its gradient is averaged over the ranks and sharded again. Inside the forward pass of a module whose weights
    FSDP2 has gathered, there is nothing left to gather.

    Args:
        output_layer: The layer that turns hidden states into logits.
        logit_scale: Positive multiplier of its result.
        softcap: Bound of the logits, applied after the scale; None for none.
        vocab_size: Real size of the vocabulary, where the layer has more rows; None uses all of them.
        chunk_tokens: Tokens whose logits may exist at a time. None chooses by bytes, and no more than there are:
            `forward` makes tiles of at most 24 MiB on CPU and 256 MiB elsewhere, `loss` keeps a chunk of 512 MiB.

    Raises:
        TypeError: The output layer is more than a matrix and a bias; the message names its type.
        ValueError: A number is not positive.

    Example:
        >>> head = LogProbHead(nn.Linear(8, 50), softcap=30.0)
        >>> hidden, targets = torch.randn(3, 8), torch.tensor([4, 49, -100])
        >>> scores = head(hidden, targets, entropy=True)
        >>> bool((scores.log_probs[:2] < 0).all()), scores.log_probs[2].item(), scores.entropy.shape
        (True, 0.0, torch.Size([3]))
        >>> log_probs = (head.logits(hidden[:2]) / 0.7).log_softmax(-1)
        >>> torch.allclose(head(hidden, targets, temperature=0.7).log_probs[0], log_probs[0, 4], atol=1e-5)
        True
    """

    def __init__(
        self,
        output_layer: nn.Module,
        *,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        vocab_size: int | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        check_output_layer(output_layer)
        check_number("logit_scale", logit_scale)
        check_number("softcap", softcap, optional=True)  # type: ignore[arg-type]
        check_count("vocab_size", vocab_size)
        check_count("chunk_tokens", chunk_tokens)
        self.output_layer = output_layer
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.vocab_size = vocab_size
        self.chunk_tokens = chunk_tokens

    @classmethod
    def from_model(
        cls, model: nn.Module, *, chunk_tokens: int | None = None, vocab_size: int | None = None
    ) -> LogProbHead:
        """The head of a model: its output layer, and scale, cap and vocabulary cut from a transformers configuration.

        Args:
            model: A transformers causal LM, possibly wrapped by PEFT, or any module with an output layer
                (`get_output_embeddings()` or `lm_head`), whose result is then taken as the logits. The layer is found
                once: add adapters and resize vocabularies before.
            chunk_tokens: See the class.
            vocab_size: See the class; None takes the size that the model itself cuts its logits to, if it does.

        Raises:
            TypeError: The model has no output layer, or one that the head cannot evaluate as the model does.

        Example:
            >>> from transformers import Gemma2Config, Gemma2ForCausalLM
            >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=11)
            >>> heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=8)
            >>> LogProbHead.from_model(Gemma2ForCausalLM(Gemma2Config(**sizes, **heads))).softcap
            30.0
        """
        config = getattr(model, "config", None)
        transform = LogitTransform() if config is None else LogitTransform.from_config(config)
        return cls(
            find_output_layer(model),
            logit_scale=transform.scale,
            softcap=transform.softcap,
            vocab_size=vocab_size or transform.vocab_size,
            chunk_tokens=chunk_tokens,
        )

    def forward(
        self, hidden: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0, entropy: bool = False
    ) -> TokenLogProbs:
        """Log-probabilities, and entropies if asked for; see `token_log_probs`.

        Args:
            hidden: Hidden states `[..., D]` that predict the targets.
            targets: Token ids `[...]`; -100 is ignored.
            temperature: Positive number, or one per target.
            entropy: Whether to compute entropies.

        Returns:
            Both in the shape of the targets, float32.
        """
        return _scores(self._inputs(hidden, targets, temperature), targets.shape, self.chunk_tokens, entropy=entropy)

    def loss(
        self, hidden: Tensor, targets: Tensor, objective: Objective, *, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Summed loss of an objective that looks at one token at a time, in one pass instead of two.

        The gradients are formed while the loss is computed and scaled in backward, so nothing is made twice: three
        matrix products instead of four. Equal to `objective(token_log_probs(...))` summed, up to rounding. Backward
        can run once, since it hands the stored gradients over.

        Args:
            hidden: Hidden states `[M, D]` that predict the targets.
            targets: Token ids `[M]`; -100 is ignored: its log-probability is 0 and passes no gradient on.
            objective: Called as `objective(log_probs, part)` for one chunk after the other, with the log-probabilities
                `[m]` of the tokens in the slice `part`; returns each token's weighted loss `[m]`, of which the
                derivative is taken by autograd. A token's loss must not depend on another token's log-probability.
            temperature: Positive number, or one per target.

        Returns:
            The sum of the losses, with gradient, and the log-probabilities `[M]`, detached.

        Raises:
            ValueError: The objective does not return one loss per token, or the targets are not `[M]`.

        Example:
            >>> head = LogProbHead(nn.Linear(8, 50))
            >>> hidden, targets = torch.randn(3, 8), torch.tensor([4, 49, 7])
            >>> advantages = torch.tensor([1.0, 0.0, -1.0])
            >>> loss, log_probs = head.loss(hidden, targets, lambda log_probs, part: -advantages[part] * log_probs)
            >>> bool(torch.isclose(loss, log_probs[2] - log_probs[0], atol=1e-6)), loss.requires_grad
            (True, True)
        """
        if targets.dim() != 1:
            raise ValueError(f"`targets` must have shape [M], got {tuple(targets.shape)}: flatten it and `hidden`.")
        return one_pass_loss(self._inputs(hidden, targets, temperature), self.chunk_tokens, objective)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits, after scale and cap and before any temperature, for sampling and checks.

        Args:
            hidden: Hidden states `[..., D]`.

        Returns:
            `[..., vocab_size]`, float32 (float64 for float64 inputs), without gradient.
        """
        targets = torch.zeros(hidden.shape[:-1], dtype=torch.long, device=hidden.device)
        return logits_of(self._inputs(hidden, targets, 1.0), self.chunk_tokens).reshape(*targets.shape, -1)

    def _inputs(self, hidden: Tensor, targets: Tensor, temperature: float | Tensor) -> HeadInputs:
        terms = read_output_layer(self.output_layer, hidden)
        return prepare_inputs(
            terms.hiddens,
            terms.weights,
            targets,
            bias=terms.bias,
            temperature=temperature,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            vocab_size=self.vocab_size,
        )

    def extra_repr(self) -> str:
        """The settings, for `print`."""
        names = ("logit_scale", "softcap", "vocab_size", "chunk_tokens")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
