"""What the loss of one token is worth in its optimizer step, decided once on the whole step.

Microbatches and ranks only add: a step's loss is the sum over its scored tokens of weight x loss, so no split into
microbatches or ranks can change it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_rl.options import as_number

Normalization = Literal["token_mean", "sequence_mean", "group_mean", "constant", "sequence_constant"]
Denominator = Literal["all", "live"]


def loss_weights(
    counts: Sequence[int] | Tensor,
    groups: Sequence[Hashable] | None = None,
    *,
    mode: Normalization = "token_mean",
    constant: float | None = None,
    live: Sequence[bool] | Tensor | None = None,
    denominator: Denominator = "all",
) -> Tensor:
    """Weight of one scored token of each trajectory of a step, over all its microbatches and ranks.

    With n_i scored tokens in trajectory i, N in the step, N_g in its group, B trajectories and P groups that have
    any scored token, and C = `constant`:

    - "token_mean": 1 / N (DAPO, verl's token-mean)
    - "sequence_mean": 1 / (B n_i) (the original GRPO)
    - "group_mean": 1 / (P N_g) (prompt mean)
    - "constant": 1 / C (independent of what else is in the step)
    - "sequence_constant": 1 / (B C) (Dr. GRPO with C = the length limit)

    A step without scored tokens has weights of 0, never a division by a small number.

    Args:
        counts: [n] scored tokens of each trajectory of the step.
        groups: [n] group ids; needed for "group_mean".
        mode: See above.
        constant: C, finite and greater than 0; needed for the two constant modes and refused by the others.
        live: [n] which trajectories have a non-zero advantage; needed for denominator "live".
        denominator: "all" counts every scored token; "live" only those of live trajectories, and gives the others
            weight 0.

    Returns:
        float64 [n]: the weight that each scored token of trajectory i carries.

    Raises:
        ValueError: An argument is missing, superfluous, of another length, negative or infinite.

    Example:
        >>> loss_weights([2, 1]).tolist()[0] * 3
        1.0
        >>> loss_weights([2, 1], mode="sequence_mean").tolist()
        [0.25, 0.5]
    """
    tokens = torch.as_tensor(counts).to(torch.float64)
    _check(tokens, groups, mode, constant, live, denominator)
    if denominator == "live":
        tokens = tokens * torch.as_tensor(live).to(torch.float64)
    counted = (tokens > 0).to(torch.float64)
    if mode == "token_mean":
        divisors = tokens.sum().expand_as(tokens)
    elif mode == "sequence_mean":
        divisors = counted.sum() * tokens
    elif mode == "group_mean":
        divisors = _group_divisors(tokens, list(groups or []))
    elif mode == "constant":
        divisors = torch.full_like(tokens, float(constant or 0))
    else:
        divisors = counted.sum() * float(constant or 0) * torch.ones_like(tokens)
    return torch.where(counted > 0, 1.0 / divisors.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def _group_divisors(tokens: Tensor, groups: list[Hashable]) -> Tensor:
    number = {group: index for index, group in enumerate(dict.fromkeys(groups))}
    group_of = torch.tensor([number[group] for group in groups], dtype=torch.int64)
    per_group = torch.zeros(len(number), dtype=torch.float64).index_add(0, group_of, tokens)
    return (per_group > 0).sum() * per_group[group_of]


def _check(
    tokens: Tensor, groups: Sequence[Hashable] | None, mode: str, constant: float | None, live: object, denominator: str
) -> None:
    if mode not in get_args(Normalization):
        raise ValueError(f"`mode` must be one of {get_args(Normalization)}, got {mode!r}")
    if denominator not in get_args(Denominator):
        raise ValueError(f"`denominator` must be one of {get_args(Denominator)}, got {denominator!r}")
    if tokens.dim() != 1 or not bool(((tokens >= 0) & tokens.isfinite()).all()):
        raise ValueError(f"`counts` must be a flat list of finite numbers of at least 0, got {tokens.tolist()}")
    if mode in ("constant", "sequence_constant"):
        number = as_number(constant)
        if number is None or not 0 < number < math.inf:
            raise ValueError(f"mode {mode!r} needs `constant`, a finite number greater than 0, got {constant!r}")
    elif constant is not None:
        raise ValueError(f"`constant` is {constant}, but mode {mode!r} takes none; remove it or use mode 'constant'")
    if mode == "group_mean" and (groups is None or len(groups) != tokens.numel()):
        got = "none" if groups is None else len(groups)
        raise ValueError(
            f"mode 'group_mean' needs one entry of `groups` for each of {tokens.numel()} counts, got {got}"
        )
    if denominator == "live" and (live is None or len(torch.as_tensor(live)) != tokens.numel()):
        raise ValueError(f"denominator 'live' needs `live` with one entry for each of {tokens.numel()} counts")
