"""Everything that depends on the Trainer's strategy: the only file that knows DDP from FSDP2."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def check_strategy(trainer: Trainer) -> None:
    """Refuses strategies under which the gradient of a step would not be the one that was planned.

    Args:
        trainer: The Trainer about to fit.

    Raises:
        MisconfigurationException: The strategy shards without FSDP2, splits single layers, or has its own
            accumulation; the message says what to use.
    """
    strategy = trainer.strategy
    advice = "use `strategy=ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1)` (FSDP2) or 'ddp'"
    if isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy)):
        raise MisconfigurationException(f"`{type(strategy).__name__}` is not supported; {advice}")
    if isinstance(strategy, ModelParallelStrategy):
        if trainer.world_size != data_parallel_rank_and_size(trainer)[1]:
            raise MisconfigurationException(f"tensor parallelism is not supported; {advice}")
    elif trainer.world_size > 1 and not isinstance(strategy, DDPStrategy):
        raise MisconfigurationException(f"`{type(strategy).__name__}` is not supported; {advice}")


def data_parallel_rank_and_size(trainer: Trainer) -> tuple[int, int]:
    """This process's place among those that see different data.

    Args:
        trainer: A Trainer whose processes have been launched.

    Returns:
        (rank, world size), (0, 1) on a single device.
    """
    place = trainer.distributed_sampler_kwargs
    return (0, 1) if place is None else (int(place["rank"]), int(place["num_replicas"]))


def gradient_multiplier(trainer: Trainer) -> int:
    """What a summed loss is multiplied with so that the accumulated gradient is its plain sum.

    Lightning divides every loss by `accumulate_grad_batches` (K), and DDP and FSDP2 average gradients over the
    ranks (W); this is the one place where both are undone.

    Args:
        trainer: The Trainer that runs the step.

    Returns:
        K x W.
    """
    return trainer.accumulate_grad_batches * data_parallel_rank_and_size(trainer)[1]


def planning_objective(trainer: Trainer) -> Literal["lockstep", "rank_total"]:
    """What to balance: FSDP2 waits for the slowest rank in every microbatch, DDP only at the end of a step."""
    return "lockstep" if isinstance(trainer.strategy, ModelParallelStrategy) else "rank_total"


def sum_over_ranks(trainer: Trainer, values: Tensor) -> Tensor:
    """Adds a tensor up over all ranks.

    Args:
        trainer: The Trainer that runs the step.
        values: Any shape; float64 is kept.

    Returns:
        The sum, the same on every rank.
    """
    reduced = trainer.strategy.reduce(values.clone(), reduce_op="sum")
    return reduced if isinstance(reduced, Tensor) else values


def gather_over_ranks(value: Any) -> list[Any]:
    """Collects one picklable object per rank.

    Args:
        value: This rank's.

    Returns:
        One entry per rank, in rank order; `[value]` without a process group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Euclidean norm of the gradient over all parameters, before clipping; sharded gradients are gathered.

    Args:
        parameters: Parameters without a gradient count as 0.

    Returns:
        The norm, the same on every rank.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    norm = torch.nn.utils.get_total_norm(gradients)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def scales_gradients(trainer: Trainer) -> bool:
    """True where losses are scaled for float16, so that a gradient that is not finite only means a skipped step."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


class HeldSigterm:
    """Holds SIGTERM back until all ranks are at the same place.

    Lightning's handler broadcasts from wherever the signal finds a rank. Between other collectives that pairs with
    one of those, and the ranks wait for their time-out. Here the signal only leaves a note; the ranks tell each other
    with a number that travels in every step anyway, and then all of them run Lightning's handler at the same place.

    Example:
        >>> HeldSigterm().received
        0.0
    """

    def __init__(self) -> None:
        self.received = 0.0
        self._handler: Any = None

    def hold(self, trainer: Trainer) -> None:
        """Takes the place of the present handler, which the Trainer puts back itself when it is done.

        Args:
            trainer: One that has registered its own handler; on one process, or if it does not fit, nothing is done.
        """
        if trainer.world_size == 1 or trainer.state.fn != TrainerFn.FITTING:
            return
        handler = signal.getsignal(signal.SIGTERM)
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and callable(handler) and handler != self._note:
            self.received, self._handler = 0.0, handler
            signal.signal(signal.SIGTERM, self._note)

    def release(self) -> None:
        """Lets Lightning have the signal, after which it ends the run; all ranks have to call this together."""
        if self._handler is not None:
            self._handler(signal.SIGTERM, None)

    def _note(self, *arguments: Any) -> None:
        self.received = 1.0

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module is not the one that trains, and must not copy the Trainer along.
        return {"received": 0.0, "_handler": None}


def is_sharding(trainer: Trainer | None) -> bool:
    """True under FSDP2."""
    return trainer is not None and isinstance(trainer.strategy, ModelParallelStrategy)


def shard_policy(policy: nn.Module, trainer: Trainer | None) -> None:
    """Shards a policy with FSDP2 when the Trainer's strategy asks for it, and does nothing otherwise.

    Each transformer layer is gathered by itself; embeddings, final norm and output layer belong to the root, whose
    weights stay gathered from the root's forward until its backward, so the head reads them at no extra cost.

    Args:
        policy: The module whose `forward` the training step calls.
        trainer: The Trainer in use, if any.
    """
    if trainer is None or not isinstance(trainer.strategy, ModelParallelStrategy) or isinstance(policy, FSDPModule):
        return
    # FSDP2 keeps each rank's own slice, so that replicas which were initialised differently would never agree.
    policy.to(trainer.strategy.root_device)
    for tensor in [*policy.parameters(), *policy.buffers()]:
        torch.distributed.broadcast(tensor.detach(), src=0)
    mesh = trainer.strategy.device_mesh["data_parallel"]
    for layer in _layers(policy):
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)


def _layers(policy: nn.Module) -> list[nn.Module]:
    lists = [module for module in policy.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    outermost: list[nn.Module] = []
    for candidate in lists:
        inside = any(candidate is inner for layer in outermost for inner in layer.modules())
        if not inside:
            outermost.extend(candidate)
    return outermost


@contextmanager
def gathered_parameters(policy: nn.Module) -> Iterator[None]:
    """Holds the full weights of an FSDP2-sharded policy on this device while the context is open.

    Generation calls the model once per token and each rank a different number of times; with the weights gathered
    once there is no collective inside, so ranks need not keep step. Without FSDP2 it does nothing.

    Args:
        policy: The module, sharded or not.
    """
    sharded = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in sharded[:1]:
        # The root has to be the first that FSDP2 sets up, and generation does not pass through its forward.
        module._get_fsdp_state()._lazy_init()
    for module in sharded:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in sharded:
            module.set_reshard_after_forward(module is not policy, recurse=False)
            module.reshard()
