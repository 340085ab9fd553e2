"""One attempt at a task as a validated record, and its round trip through `datasets.Dataset`.

Alignment, the only rule there is: every per-token array has the length of `token_ids`, and entry `i` is about
token `i` given the tokens before it in the same trajectory. Token 0 has nothing before it and is never scored.

    token_ids     [ 7,  3,  9,  4,  8 ]      prompt = 7 3, action = 9 4 8
    action_mask   [ 0,  0,  1,  1,  1 ]
    log_probs     [ -,  -, a9, a4, a8 ]      a9 = log p(9 | 7 3);  "-" is ignored, whatever it holds
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from lit_rl import trajectory_fields as fields_of

if TYPE_CHECKING:
    from datasets import Dataset


class Trajectory:
    """One attempt at a task: what was read, what was sampled, and what it was worth.

    Validated once, at construction; immutable afterwards. Lists, NumPy arrays and tensors are accepted and copied.

    Args:
        token_ids: [L] integers, the ids exactly as they were given to and sampled from the policy.
        action_mask: [L] booleans (or 0/1), true where the policy sampled the token. Token 0 is never scored.
        reward: What the attempt was worth; `None` or NaN means that nobody could score it.
        log_probs: [L] the sampler's log-probabilities in nats at the sampling temperature; entries of tokens that are
            not scored are ignored, `None` and NaN included.
        group: Id of the trajectories that share a baseline; `None` stands for a group of its own task. An integer
            becomes its digits.
        task: Stable id of the task; an integer becomes its digits.
        truncated: True (or 1) when the attempt was cut by a limit instead of ending by itself.
        temperature: Sampling temperature, one number or [L]; greater than 0.
        info: JSON-like extras (strings, numbers, booleans, lists, dicts); never read by the training code.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has the wrong length or value; the message names the trajectory and the field.

    Example:
        >>> trajectory = Trajectory([7, 3, 9, 4], [0, 0, 1, 1], reward=1.0, task="add-1")
        >>> len(trajectory), trajectory.num_scored
        (4, 2)
        >>> Trajectory([7, 3, 9, 4], [0, 1, 1], reward=1.0, task="add-1")
        Traceback (most recent call last):
        ...
        ValueError: trajectory (task 'add-1'): `action_mask` has 3 entries but `token_ids` has 4; give one per token
    """

    token_ids: Tensor
    action_mask: Tensor
    reward: float
    log_probs: Tensor | None
    group: str | None
    task: str | None
    truncated: bool
    temperature: Tensor
    info: dict[str, Any]

    # Not a dataclass: Lightning takes those apart and rebuilds them wherever a step returns one.
    def __init__(
        self,
        token_ids: Sequence[int] | Tensor,
        action_mask: Sequence[bool] | Sequence[int] | Tensor,
        reward: float | None,
        *,
        log_probs: Sequence[float | None] | Tensor | None = None,
        group: str | int | None = None,
        task: str | int | None = None,
        truncated: bool = False,
        temperature: float | Sequence[float] | Tensor = 1.0,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        where = "trajectory" if task is None else f"trajectory (task {str(task)!r})"
        ids = fields_of.token_ids(token_ids, where)
        mask = fields_of.action_mask(action_mask, len(ids), where)
        scored = mask.clone()
        scored[:1] = False
        fields = {
            "token_ids": ids,
            "action_mask": mask,
            "reward": fields_of.reward(reward, where),
            "log_probs": None if log_probs is None else fields_of.log_probs(log_probs, scored, where),
            "group": fields_of.name(group, "group", where),
            "task": fields_of.name(task, "task", where),
            "truncated": fields_of.flag(truncated, "truncated", where),
            "temperature": fields_of.temperature(temperature, len(ids), where),
            "info": fields_of.info(info, where),
        }
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a trajectory is immutable; make a new one with another `{name}`")

    def __len__(self) -> int:
        return int(self.token_ids.numel())

    def __repr__(self) -> str:
        return (
            f"Trajectory(task={self.task!r}, group={self.group!r}, tokens={len(self)}, scored={self.num_scored}, "
            f"reward={self.reward}, truncated={self.truncated})"
        )

    @property
    def scored(self) -> Tensor:
        """[L] booleans: the tokens whose log-probability enters the loss (sampled, and not token 0)."""
        scored = self.action_mask.clone()
        scored[:1] = False
        return scored

    @property
    def num_scored(self) -> int:
        """How many tokens are scored."""
        return int(self.action_mask[1:].sum())

    @property
    def is_rewarded(self) -> bool:
        """False when nobody could score the attempt."""
        return not math.isnan(self.reward)


def _to_row(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "action_mask": trajectory.action_mask.tolist(),
        "reward": trajectory.reward if trajectory.is_rewarded else None,
        "log_probs": None if trajectory.log_probs is None else trajectory.log_probs.tolist(),
        "group": trajectory.group,
        "task": trajectory.task,
        "truncated": trajectory.truncated,
        "temperature": trajectory.temperature.tolist(),
        "info": json.dumps(trajectory.info),
    }


def _from_row(row: Mapping[str, Any]) -> Trajectory:
    temperature, truncated = row.get("temperature"), row.get("truncated")
    return Trajectory(
        row["token_ids"],
        row["action_mask"],
        row["reward"],
        log_probs=row.get("log_probs"),
        group=row.get("group"),
        task=row.get("task"),
        truncated=False if truncated is None else truncated,
        temperature=1.0 if temperature is None else temperature,
        info=fields_of.info_from_row(row.get("info")),
    )


def to_dataset(trajectories: Iterable[Trajectory]) -> Dataset:
    """Writes trajectories as a `datasets.Dataset`, one row each; `.to_parquet` and `.to_json` work on the result.

    Parquet gives every number back bit for bit. `.to_json` keeps 10 decimals of `reward`, `log_probs` and
    `temperature`, and at most 15 with `.to_json(path, double_precision=15)`: log-probabilities very close to 0 lose
    digits.

    Args:
        trajectories: Any number of them; `info` becomes a JSON string, so that its keys may differ by row.

    Returns:
        A data set with the columns `token_ids`, `action_mask`, `reward` (null where unscored), `log_probs` (null
        where the sampler gave none), `group`, `task`, `truncated`, `temperature`, `info`.

    Example:
        >>> dataset = to_dataset([Trajectory([1, 2, 3], [0, 1, 1], reward=0.5, info={"turns": 1})])
        >>> [t.num_scored for t in from_dataset(dataset)]
        [2]
    """
    from datasets import Dataset, Features, List, Value

    features = Features(
        {
            "token_ids": List(Value("int64")),
            "action_mask": List(Value("bool")),
            "reward": Value("float64"),
            "log_probs": List(Value("float32")),
            "group": Value("string"),
            "task": Value("string"),
            "truncated": Value("bool"),
            "temperature": List(Value("float32")),
            "info": Value("string"),
        }
    )
    rows = [_to_row(trajectory) for trajectory in trajectories]
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


def from_dataset(dataset: Dataset) -> list[Trajectory]:
    """Reads trajectories back from a data set: the inverse of `to_dataset`.

    Args:
        dataset: Needs the columns `token_ids`, `action_mask`, `reward`; the other fields of `Trajectory` are optional,
            and so is `with_format("numpy")` or "torch". `info` is a dict, or one as a JSON string.

    Returns:
        One validated `Trajectory` per row, in order.

    Raises:
        ValueError: A column is missing, or a row is invalid; the message names the row and the field.
        TypeError: A field of a row has the wrong type.
    """
    missing = [name for name in ("token_ids", "action_mask", "reward") if name not in dataset.column_names]
    if missing:
        raise ValueError(f"the data set has no column {missing}; found {dataset.column_names}")
    return [trajectory_from_row(row, index) for index, row in enumerate(dataset)]


def trajectory_from_row(row: Mapping[str, Any], index: int) -> Trajectory:
    """Builds the trajectory of one data set row.

    Args:
        row: Column name to value, as a `datasets.Dataset` yields it.
        index: The row's number, for error messages.

    Returns:
        The validated trajectory.

    Raises:
        ValueError: The row is invalid; the message begins with its number.
        TypeError: A field has the wrong type.
    """
    try:
        return _from_row(row)
    except (TypeError, ValueError) as error:
        # Not `type(error)(...)`: subclasses such as JSONDecodeError take other arguments.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"row {index}: {error}") from error
