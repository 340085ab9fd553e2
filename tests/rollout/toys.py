"""Small environments, engines and networks whose every step is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.policy.causal_lm import CausalLMPolicy
from lit_rl.rollout.engine import Completion
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.testing import tiny_policy_model

END = 2


def tiny_policy(architecture: str = "qwen3", **overrides: Any) -> CausalLMPolicy:
    return CausalLMPolicy(tiny_policy_model(architecture, **overrides))


def make_tasks(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"id": f"task-{number}", "number": number, **fields} for number in range(count)]


class Dialogue(Environment):
    """Answers each action with tokens that depend on all actions so far; over after `turns` turns.

    Prompts and observations have different lengths, so contexts are ragged in every turn.
    """

    log: list[Dialogue] = []  # noqa: RUF012 - every instance, for the tests to look at

    def __init__(self) -> None:
        self.actions: list[list[int]] = []
        self.closed = 0
        Dialogue.log.append(self)

    def reset(self, task: Mapping[str, Any]) -> Sequence[int]:
        self.task = dict(task)
        return [1, *[3 + task["number"] % 20] * (1 + task["number"] % 4)]

    def step(self, token_ids: Sequence[int]) -> Turn:
        self.actions.append(list(token_ids))
        if len(self.actions) >= self.task.get("turns", 3):
            return Turn(done=True, reward=float(sum(map(sum, self.actions)) % 2), info={"said": len(token_ids)})
        total = sum(map(sum, self.actions))
        return Turn([3 + total % 29] * (total % 3))

    def close(self) -> None:
        self.closed += 1


class ScriptedEngine:
    """Says the given actions, one per call, whatever it reads; cut where a limit is shorter."""

    def __init__(self, *turns: Sequence[int], truncated: bool = False) -> None:
        self.turns = turns
        self.truncated = truncated
        self.prompts: list[list[list[int]]] = []
        self.seeds: list[list[int]] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float,
        seeds: Sequence[int],
    ) -> list[Completion]:
        action = list(self.turns[len(self.prompts) % len(self.turns)])
        self.prompts.append([list(prompt) for prompt in prompts])
        self.seeds.append(list(seeds))
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        said = [action[:limit] for limit in limits]
        return [Completion(ids, [-0.5] * len(ids), self.truncated or len(ids) < len(action)) for ids in said]


class Chain(nn.Module):
    """The user's own network: after token i comes token `following[i]`, nearly for sure."""

    def __init__(self, following: Mapping[int, int], vocabulary: int = 12) -> None:
        super().__init__()
        self.lm_head = nn.Linear(vocabulary, vocabulary, bias=False)
        nn.init.eye_(self.lm_head.weight)
        table = torch.zeros(vocabulary, vocabulary)
        for token, successor in following.items():
            table[token, successor] = 60.0
        self.register_buffer("table", table)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.table[input_ids]


class OwnNetwork(nn.Module):
    """The user's own causal network, with positions learned up to 40; remembers the shapes it was called with."""

    def __init__(self, vocabulary: int = 16, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(40, width)
        self.mix = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocabulary)
        self.widths: list[int] = []

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        self.widths.append(input_ids.shape[1])
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        weights = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=hidden.dtype).tril()
        mean = weights @ hidden / weights.sum(1, keepdim=True)
        return hidden + torch.tanh(self.mix(mean))
