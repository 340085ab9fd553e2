"""Reward functions in the form users already have, as a single-turn environment."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lit_rl.rollout.environment import Environment, Turn

RewardFunction = Callable[..., Sequence[float | None]]


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
        TypeError: A reward function cannot be called, or `weights` are not numbers.
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
        self.rewards = _by_name(rewards)
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.chat_template = dict(chat_template or {})
        self.weights = dict(zip(self.rewards, _weights(weights, len(self.rewards)), strict=True))

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
            raise TypeError(f"the prompt must be text, a list of messages or token ids, got {prompt!r}")
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
        parts = {name: _call(name, function, columns, len(answers)) for name, function in self.rewards.items()}
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


def _by_name(rewards: Any) -> dict[str, RewardFunction]:
    if isinstance(rewards, Mapping):
        named = dict(rewards)
    else:
        functions = [rewards] if callable(rewards) else list(rewards)
        named = {}
        for function in functions:
            name = getattr(function, "__name__", type(function).__name__)
            copies = sum(other.split("#")[0] == name for other in named)
            named[f"{name}#{copies + 1}" if copies else name] = function
    if not named:
        raise ValueError("`rewards` is empty; give at least one reward function")
    for name, function in named.items():
        if not callable(function):
            raise TypeError(f"reward {name!r} is {function!r}, expected a function `reward(prompts, completions, ...)`")
    return named


def _weights(weights: Any, count: int) -> list[float]:
    numbers = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(numbers) != count:
        raise ValueError(f"`weights` has {len(numbers)} entries for {count} reward functions; give one for each")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"`weights` must be finite, got {numbers}")
    return numbers


def _call(name: str, function: RewardFunction, columns: Mapping[str, list[Any]], count: int) -> list[float | None]:
    """Calls one reward function with what it asks for, and checks what it returns."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {parameter.name for parameter in parameters}
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.name not in columns and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing:
        raise ValueError(f"reward {name!r} asks for {missing}, but the tasks only give {sorted(columns)}")
    result = function(**{key: list(values) for key, values in columns.items() if takes_all or key in named})
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(f"reward {name!r} returned {result!r}, expected a list with one number or None per completion")
    if len(values) != count:
        raise ValueError(f"reward {name!r} returned {len(values)} values for {count} completions; return one for each")
    return [_number(name, value) for value in values]


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"reward {name!r} returned {value!r}, expected a number or None")
    number = float(value)
    if math.isinf(number):
        raise ValueError(f"reward {name!r} returned {number}; expected a finite number, or None where it cannot score")
    return None if math.isnan(number) else number


def _is_ids(prompt: Any) -> bool:
    if isinstance(prompt, (str, Mapping)) or not hasattr(prompt, "__len__") or len(prompt) == 0:
        return False
    return all(hasattr(item, "__index__") and not isinstance(item, bool) for item in prompt)


def _is_messages(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )
