"""Reward functions in the form users already have, as a single-turn environment."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lit_rl.options import as_integer
from lit_rl.rollout.environment import Environment, Turn
from lit_rl.rollout.reward_calls import RewardCountError, RewardFunction, call_reward, rewards_by_name, weights_of


class Tokenizer(Protocol):
    """The two directions of a tokenizer that are needed: a prompt's text to ids, and a completion's ids to text."""

    def __call__(self, text: str) -> Any:
        """Encodes a text; the result has the ids under "input_ids"."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> Any:
        """Turns ids into text."""
        ...


class SingleTurn:
    """Environments for tasks with one answer, scored by `reward(prompts, completions, **columns)`.

    The convention is TRL's: a reward function gets lists with one entry per episode and returns a list with one
    number per episode, or `None` where it does not apply. It is called once for all answers that this process
    collected in an iteration, with the arguments it names (all of them if it has `**kwargs`):

    - ``prompts``: the task's prompt as it is in the task;
    - ``completions``: the decoded answer; ``[{"role": "assistant", "content": answer}]`` for a prompt of messages;
      the ids themselves without a tokenizer;
    - ``prompt_ids`` and ``completion_ids``: the ids that were read and sampled;
    - every other field of the task under its own name, for example ``answer``.

    Text is made from ids once, for the reward functions; no id is ever made from the text of an answer. The reward
    of a trajectory is the weighted sum over the functions that apply; if none does, it is unscored. The parts are in
    `info["rewards"]`, the text in `info["completion"]`. When a call fails, each answer is scored alone, so that the
    error names its task and, where unscored trajectories are allowed, only that answer is lost.

    Args:
        rewards: One reward function, several, or several by name. Names default to the functions' own.
        tokenizer: A transformers tokenizer, or anything with its call and `decode`; `None` where prompts are ids.
        weights: One per reward function; `None` weighs each by 1.
        prompt: The field of a task that holds the prompt: text, messages (a list of dicts with "role" and
            "content", through the chat template), or token ids.
        chat_template: Further arguments for `tokenizer.apply_chat_template`.

    Raises:
        TypeError: A reward function cannot be called or does not say what arguments it takes, or `weights` is no list
            of numbers.
        ValueError: There is no reward function, or the number of weights is another.

    Example:
        >>> def count(completions, wanted):                          # ids, as there is no tokenizer
        ...     return [float(ids.count(id_)) for ids, id_ in zip(completions, wanted)]
        >>> environment = SingleTurn(count)()
        >>> environment.reset({"id": "a", "prompt": [1, 2], "wanted": 7})
        [1, 2]
        >>> turn = environment.step([7, 7, 3])
        >>> turn.reward, turn.info["rewards"]
        (2.0, {'count': 2.0})
    """

    def __init__(
        self,
        rewards: RewardFunction | Sequence[RewardFunction] | Mapping[str, RewardFunction],
        tokenizer: Tokenizer | None = None,
        *,
        weights: Sequence[float] | None = None,
        prompt: str = "prompt",
        chat_template: Mapping[str, Any] | None = None,
    ) -> None:
        self.rewards = rewards_by_name(rewards)
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.chat_template = dict(chat_template or {})
        self.weights = dict(zip(self.rewards, weights_of(weights, len(self.rewards)), strict=True))

    def __call__(self) -> Environment:
        """Makes a fresh episode."""
        return _Answer(self)

    def step_together(self, environments: Sequence[_Answer], actions: Sequence[Sequence[int]]) -> list[Any]:
        """Scores many answers in one call of each reward function.

        Args:
            environments: Episodes after their reset.
            actions: The sampled ids of each.

        Returns:
            For each episode its turn, or the exception that its answer alone raises.
        """
        answers = [list(action) for action in actions]
        texts = [self._decode(answer) for answer in answers]
        try:
            return self._score(environments, answers, texts)
        except Exception as error:
            failure = error
            if len(environments) == 1:
                return [error]
        turns: list[Any] = []
        for environment, answer, text in zip(environments, answers, texts, strict=True):
            try:
                turns += self._score([environment], [answer], [text])
            except RewardCountError as again:
                # The numbers of the call that the user knows of, not those of this one.
                turns.append(failure if isinstance(failure, RewardCountError) else again)
            except Exception as again:
                turns.append(again)
        failed = sum(isinstance(turn, Exception) for turn in turns)
        if failed == 0:
            # Nothing is wrong with any single answer, so the function failed on all of them together.
            return [failure] * len(environments)
        if failed < len(turns):
            warnings.warn(
                f"a reward function failed on {len(turns)} answers together ({failure}); each was scored alone, so "
                "rewards that compare answers with each other mean nothing here",
                stacklevel=2,
            )
        return turns

    def encode(self, task: Mapping[str, Any]) -> list[int]:
        """The ids of a task's prompt.

        Args:
            task: Has the field named by `prompt`.

        Returns:
            The ids; a prompt that is ids already comes back unchanged.

        Raises:
            ValueError: The field is missing, or the prompt is text and there is no tokenizer.
            TypeError: The prompt is neither text, nor messages, nor ids.
        """
        if self.prompt not in task:
            raise ValueError(f"the task has no field {self.prompt!r} (found {sorted(task)}); name it with `prompt=`")
        prompt = task[self.prompt]
        if _is_ids(prompt):
            return [int(token_id) for token_id in prompt]
        if not (isinstance(prompt, str) or _is_messages(prompt)):
            raise TypeError(f"the prompt must be text, a list of messages or token ids (integers), got {prompt!r}")
        if self.tokenizer is None:
            raise ValueError(f"the prompt is text ({prompt!r}) and there is no tokenizer; pass `tokenizer=`")
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        options = {"add_generation_prompt": True, **self.chat_template, "tokenize": True, "return_dict": False}
        return list(self.tokenizer.apply_chat_template(prompt, **options))  # type: ignore[attr-defined]

    def _decode(self, answer: list[int]) -> Any:
        return answer if self.tokenizer is None else self.tokenizer.decode(answer, skip_special_tokens=True)

    def _score(self, environments: Sequence[_Answer], answers: Sequence[list[int]], texts: Sequence[Any]) -> list[Turn]:
        columns = self._columns(environments, answers, texts)
        parts = {name: call_reward(name, function, columns, len(answers)) for name, function in self.rewards.items()}
        return [
            self._turn({name: values[index] for name, values in parts.items()}, text)
            for index, text in enumerate(texts)
        ]

    def _columns(
        self, environments: Sequence[_Answer], answers: Sequence[list[int]], texts: Sequence[Any]
    ) -> dict[str, list[Any]]:
        tasks = [environment.task for environment in environments]
        prompts = [task[self.prompt] for task in tasks]
        names = {name: None for task in tasks for name in task if name != self.prompt}
        columns = {name: [task.get(name) for task in tasks] for name in names}
        columns["prompts"] = prompts
        columns["completions"] = [
            [{"role": "assistant", "content": text}] if _is_messages(prompt) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns["prompt_ids"] = [environment.prompt_ids for environment in environments]
        columns["completion_ids"] = list(answers)
        return columns

    def _turn(self, parts: dict[str, float | None], text: Any) -> Turn:
        applied = [self.weights[name] * value for name, value in parts.items() if value is not None]
        info = {"rewards": parts} if self.tokenizer is None else {"rewards": parts, "completion": text}
        return Turn(done=True, reward=sum(applied) if applied else None, info=info)


class _Answer(Environment):
    """One episode of one turn."""

    def __init__(self, settings: SingleTurn) -> None:
        self.settings = settings

    def reset(self, task: Mapping[str, Any]) -> Sequence[int]:
        self.task = task
        self.prompt_ids = self.settings.encode(task)
        return list(self.prompt_ids)

    def step(self, token_ids: Sequence[int]) -> Turn:
        turn = self.settings.step_together([self], [token_ids])[0]
        if isinstance(turn, Exception):
            raise turn
        return turn


def _is_ids(prompt: Any) -> bool:
    if isinstance(prompt, (str, Mapping)) or not hasattr(prompt, "__len__") or len(prompt) == 0:
        return False
    return all(as_integer(item) is not None for item in prompt)


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )
