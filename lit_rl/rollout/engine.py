"""Who generates: the `Engine` protocol, and an engine that samples from the policy itself.

An engine from elsewhere only needs `generate`. With a server that returns ids and log-probabilities:

    class ServerEngine:
        def __init__(self, url, end_ids): ...

        def synchronize(self, policy):                     # optional; called on every rank before each collection
            push_weights(self.url, policy.model.state_dict())

        def generate(self, prompts, *, max_new_tokens, temperature, seeds):
            answers = self.client.complete(prompts, max_new_tokens, temperature, seeds, stop_ids=self.end_ids)
            return [Completion(a.ids, a.log_probs, truncated=a.finish_reason == "length") for a in answers]

Its log-probabilities must be those of the sampled ids at the sampling temperature, over the whole vocabulary: no
top-k, top-p or penalties, which change the distribution that is sampled but not the one that is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lit_rl.options import as_integer, check_at_least
from lit_rl.rollout.decoding import generation_mode, model_context
from lit_rl.rollout.decoding_choice import choose_decoding, make_decoder, vocabulary_of
from lit_rl.rollout.sampling import sample_tokens, uniforms
from lit_rl.rollout.validation import check_end_ids, check_temperature

if TYPE_CHECKING:
    from lit_rl.policy.causal_lm import CausalLMPolicy


@dataclass
class Completion:
    """What was sampled after one prompt.

    Args:
        token_ids: The sampled ids, at least one, the end token included; arrays and tensors will do.
        log_probs: For each of them, its log-probability in nats at the sampling temperature; likewise.
        truncated: True when a limit stopped it; False when it ended with an end token, also exactly at the limit.

    Example:
        >>> Completion([5, 9], [-0.5, -0.1], truncated=False).token_ids
        [5, 9]
    """

    token_ids: list[int]
    log_probs: list[float]
    truncated: bool


@runtime_checkable
class Engine(Protocol):
    """Anything that continues prompts. It may also have `synchronize(policy)`, to fetch the current weights."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float,
        seeds: Sequence[int],
    ) -> list[Completion]:
        """Continues each prompt until an end token or its limit.

        Args:
            prompts: B sequences of token ids, none of them empty.
            max_new_tokens: The most tokens to sample, for all or for each prompt, at least 1.
            temperature: Greater than 0.
            seeds: B integers in [0, 2**63); the same prompt with the same seed gives the same completion.

        Returns:
            B completions in the order of the prompts.
        """
        ...


class TransformersEngine:
    """Samples from the policy in this process.

    A transformers model keeps its own attention and key-value cache. Any other network is run on the whole prefix
    again for every token, which is exact and slower. Sampling is stateless: a completion depends on its prompt and
    seed alone, up to the rounding of the network, whatever else is in the batch. Nothing here touches torch's global
    generators, and every module gets its training mode back.

    Args:
        policy: The policy; its current weights are used in every call.
        end_ids: Ids that end a completion; empty means that only the limit does.
        batch_size: The most prompts generated together; `None` takes all at once.

    Raises:
        TypeError: An end id or `batch_size` is not an integer.
        ValueError: `batch_size` is below 1 or an end id is negative.

    Example:
        >>> from lit_rl.policy.causal_lm import CausalLMPolicy
        >>> from lit_rl.testing import tiny_policy_model
        >>> engine = TransformersEngine(CausalLMPolicy(tiny_policy_model()), end_ids=[2])
        >>> first, again = engine.generate([[1, 5], [1, 5]], max_new_tokens=4, temperature=1.0, seeds=[7, 7])
        >>> first == again
        True
    """

    def __init__(self, policy: CausalLMPolicy, *, end_ids: Collection[int], batch_size: int | None = None) -> None:
        check_at_least(1, batch_size=batch_size)
        self.policy = policy
        self.end_ids = check_end_ids(end_ids)
        self.batch_size = batch_size
        self.on_tokens: Callable[[int], None] | None = None
        """Called with the number of tokens sampled after every step, for progress bars."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float,
        seeds: Sequence[int],
    ) -> list[Completion]:
        """Continues each prompt; see `Engine.generate`.

        Raises:
            TypeError: The limit is no integer, or the temperature is no number.
            ValueError: A prompt, limit, seed or the temperature cannot be used, or the logits are not finite.
        """
        temperature = check_temperature(temperature)
        limits = _limits(max_new_tokens, len(prompts))
        _check_prompts(prompts, limits, seeds, vocabulary_of(self.policy))
        completions: dict[int, Completion] = {}
        with generation_mode(self.policy):
            for batch in self._batches([len(prompt) for prompt in prompts], limits):
                rows = self._generate_batch(
                    [prompts[i] for i in batch], [limits[i] for i in batch], temperature, [seeds[i] for i in batch]
                )
                completions.update(zip(batch, rows, strict=True))
        return [completions[index] for index in range(len(prompts))]

    def _batches(self, lengths: list[int], limits: list[int]) -> Iterator[list[int]]:
        """Prompts of similar length together, which saves padding; of equal length where the model needs that."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        separate = choose_decoding(self.policy) == "equal_lengths"
        context = model_context(self.policy.model) or sys.maxsize
        batch: list[int] = []
        for index in order:
            length, limit = lengths[index], limits[index]
            widest = length if not batch else lengths[batch[0]]
            # Some models index a table by column, and left padding moves a short prompt to the right.
            too_wide = widest + limit > context >= length + limit
            if batch and (len(batch) == self.batch_size or too_wide or (separate and length != widest)):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _generate_batch(
        self, prompts: list[Sequence[int]], limits: list[int], temperature: float, seeds: list[int]
    ) -> list[Completion]:
        longest = max(limits)
        decoder = make_decoder(self.policy, choose_decoding(self.policy))
        hidden = decoder.start(prompts, longest)
        # Apple's GPUs know no float64, so there the tokens are drawn on the CPU.
        device = torch.device("cpu") if hidden.device.type == "mps" else hidden.device
        uniform = uniforms(seeds, longest).to(device)
        limit = torch.tensor(limits, device=device)
        end_ids = torch.tensor(self.end_ids, dtype=torch.int64, device=device)
        open_rows = torch.arange(len(prompts), device=device)
        record = _Record(len(prompts), longest, device)
        for step in range(longest):
            logits = self.policy.head.logits(hidden).to(device)
            ids, log_probs = sample_tokens(logits, temperature, uniform[step, open_rows])
            record.append(step, open_rows, ids, log_probs)
            if self.on_tokens is not None:
                self.on_tokens(ids.numel())
            ended = torch.isin(ids, end_ids)
            going_on = ~(ended | (limit[open_rows] <= step + 1))
            if not bool(going_on.all()):
                record.finish(step, open_rows[~going_on], ended[~going_on])
                kept = going_on.nonzero().squeeze(-1)
                if kept.numel() == 0:
                    break
                open_rows, ids = open_rows[kept], ids[kept]
                decoder.keep(kept)
            hidden = decoder.advance(ids)
        return record.completions()


class _Record:
    """What was sampled so far: columns are steps, rows are prompts, on the device of the model."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.ids = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(rows, columns, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)

    def append(self, step: int, rows: Tensor, ids: Tensor, log_probs: Tensor) -> None:
        self.ids[rows, step] = ids
        self.log_probs[rows, step] = log_probs.double()

    def finish(self, step: int, rows: Tensor, ended: Tensor) -> None:
        self.lengths[rows] = step + 1
        self.ended[rows] = ended

    def completions(self) -> list[Completion]:
        if not bool(torch.isfinite(self.log_probs).all()):
            row = int((~torch.isfinite(self.log_probs)).any(dim=1).nonzero()[0])
            raise ValueError(
                f"the policy's logits are not finite (while continuing prompt {row} of its batch): its weights hold "
                "NaN or infinity, or its activations overflow; look at the last optimizer steps"
            )
        columns = zip(self.ids.tolist(), self.log_probs.tolist(), self.lengths.tolist(), strict=True)
        return [
            Completion(ids[:length], log_probs[:length], truncated=not ended)
            for (ids, log_probs, length), ended in zip(columns, self.ended.tolist(), strict=True)
        ]


def _limits(max_new_tokens: Any, count: int) -> list[int]:
    """One limit per prompt, from one for all or one for each."""
    for_all = as_integer(max_new_tokens)
    if for_all is not None:
        return [for_all] * count
    limits = [as_integer(limit) for limit in max_new_tokens] if isinstance(max_new_tokens, Iterable) else [None]
    if None in limits:
        raise TypeError(f"`max_new_tokens` must be an integer, or one per prompt, got {max_new_tokens!r}")
    return limits  # type: ignore[return-value]


def _check_prompts(
    prompts: Sequence[Sequence[int]], limits: list[int], seeds: Sequence[int], vocabulary: int | None
) -> None:
    if not len(prompts) == len(limits) == len(seeds):
        raise ValueError(
            f"got {len(prompts)} prompts, {len(limits)} limits and {len(seeds)} seeds; give one of each per prompt"
        )
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; give at least 1 token, for example the begin token")
        if limit < 1:
            raise ValueError(f"`max_new_tokens` of prompt {index} is {limit}; expected at least 1")
        if min(prompt) < 0 or (vocabulary is not None and max(prompt) >= vocabulary):
            outside = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(f"prompt {index} holds the id {outside}; expected 0 to {(vocabulary or 1 << 63) - 1}")
