"""Finds the module of a model that is to blame for a changed output, with forward hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Changes below this share of the largest value are rounding.
_RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_Seen = tuple[list[Tensor], list[Tensor]]  # what went in, what came out, at the positions in question


def first_changed_module(
    run: Callable[[Any], Any], model: nn.Module, first: tuple[Any, list[int]], second: tuple[Any, list[int]]
) -> str | None:
    """Runs two batches and names the first module that turns equal inputs into different outputs.

    Args:
        run: Runs the model on a batch.
        model: The model whose modules are watched.
        first: A batch with `input_ids` [rows, width], and the n flat positions to look at.
        second: The same for the other run, with as many positions.

    Returns:
        Name and type, such as "`layers.0.self_attn` (Qwen3Attention)"; failing such a module, the first one whose
        output changed; `None` when none did.
    """
    names = {module: name for name, module in model.named_modules()}
    before, after = (_watch(run, model, batch, positions) for batch, positions in (first, second))
    changed = [key for key in before if key in after and _differ(before[key][1], after[key][1])]
    culprits = [key for key in changed if not _differ(before[key][0], after[key][0])]
    if not changed:
        return None
    module = (culprits or changed)[0][0]
    return f"`{names[module] or 'the model'}` ({type(module).__name__})"


def _watch(
    run: Callable[[Any], Any], model: nn.Module, batch: Any, positions: list[int]
) -> dict[tuple[nn.Module, int], _Seen]:
    """Inputs and outputs by module and number of the call, in the order in which the calls returned."""
    seen: dict[tuple[nn.Module, int], _Seen] = {}
    entered: list[list[Tensor]] = []
    shape = tuple(batch.input_ids.shape)

    # Inputs are copied on the way in: some modules change them in place.
    def enter(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        entered.append(_select([inputs, named], shape, positions))

    def leave(module: nn.Module, _inputs: Any, output: Any) -> None:
        call = sum(1 for key in seen if key[0] is module)
        seen[module, call] = (entered.pop(), _select(output, shape, positions))

    handles = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in model.modules()]
    handles += [module.register_forward_hook(leave) for module in model.modules()]
    try:
        run(batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _select(values: Any, shape: tuple[int, ...], positions: list[int]) -> list[Tensor]:
    """The tensors in a nested structure that have a dimension per position, at these positions."""
    leaves = torch.utils._pytree.tree_leaves(values)
    selected = (_at(leaf.detach(), shape, positions) for leaf in leaves if isinstance(leaf, Tensor))
    return [tensor for tensor in selected if tensor is not None]


def _at(tensor: Tensor, shape: tuple[int, ...], positions: list[int]) -> Tensor | None:
    rows, width = shape
    index = torch.tensor(positions, device=tensor.device)
    if tensor.dim() and tensor.shape[0] == rows * width:
        return tensor[index]
    if tensor.dim() > 1 and tensor.shape[0] == rows:
        for dimension in range(1, tensor.dim()):
            if tensor.shape[dimension] == width:
                return tensor.movedim(dimension, 1)[index // width, index % width]
    return None


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) != len(second) or any(_differs(a, b) for a, b in zip(first, second, strict=True))


def _differs(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    difference = (a - b).abs()
    return not bool((difference <= _RELATIVE[a.dtype] * a.abs().max()).all())


def raising_module(error: BaseException, model: nn.Module) -> str | None:
    """Names the innermost module of a model in whose method an error was raised.

    Args:
        error: The error, as it was caught.
        model: The model that was running.

    Returns:
        Name and type as in `first_changed_module`, or `None` when no module of the model was running.
    """
    names = {module: name for name, module in model.named_modules()}
    found: str | None = None
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in names:
            found = f"`{names[module] or 'the model'}` ({type(module).__name__})"
        trace = trace.tb_next
    return found


def check_finite(model: nn.Module) -> None:
    """Refuses a model with weights that are no numbers.

    Args:
        model: Any module.

    Raises:
        ValueError: A parameter holds NaN or an infinity; the message names the first such.

    Example:
        >>> check_finite(nn.Linear(2, 2))
    """
    for name, tensor in model.named_parameters():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() and not tensor.is_meta else 0
        if bad:
            raise ValueError(
                f"the model computes no numbers: {bad} of {tensor.numel()} values of `{name}` are NaN or infinite; "
                "load weights from before they broke, or look for a precision that overflows"
            )
