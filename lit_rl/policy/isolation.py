"""Is a packed segment what it is alone? Measured on the model itself, by changing one segment and looking at the rest.

Four short random segments, one of them of a single token, go through the policy in the layout it would train with.
Then one segment's tokens are replaced, and each segment is run alone by the attention the model came with.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lit_rl.data.batch import Layout, PackedBatch, collate
from lit_rl.policy.probing import first_changed_module
from lit_rl.trajectory import Trajectory

_LENGTHS = (4, 1, 5, 3)
_CHANGED = 2  # The segment that is replaced: it has neighbours on both sides.
# Largest difference in nats that rounding explains when one trajectory is computed in two shapes.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2.5e-1}
# Gradient of a segment's loss at another segment's tokens, relative to its own: exactly 0 but for rounding.
_GRADIENT_TOLERANCE = 1e-6


class Isolated(Protocol):
    """What isolation is measured on: a policy."""

    model: nn.Module

    def __call__(self, batch: PackedBatch) -> Any:
        """Returns an object with `log_probs` [M] in nats."""

    def embedding(self) -> nn.Module | None:
        """The module that turns ids into vectors, if it is known."""

    def reference_attention(self) -> Any:
        """A context in which the model runs the attention it came with."""


@dataclass(frozen=True)
class Isolation:
    """What was measured; all three numbers are 0 up to rounding for isolated segments.

    Args:
        changed: Largest change in nats of a log-probability when another segment's tokens were replaced.
        gradient: Largest gradient of a segment's loss at another segment's tokens, relative to its own.
        alone: Largest difference in nats between a segment in the microbatch and the trajectory alone.
        tolerance: Nats that rounding explains in the precision of the model.
        module: The first module whose output changed, when something did.
        layout: How the segments were laid out.
    """

    changed: float
    gradient: float
    alone: float
    tolerance: float
    module: str | None = None
    layout: Layout = "packed"

    @property
    def leaks(self) -> bool:
        """True when a segment depends on another one."""
        return not (self.changed <= self.tolerance and self.gradient <= _GRADIENT_TOLERANCE)

    @property
    def ok(self) -> bool:
        """True when segments neither depend on each other nor differ from the trajectories alone."""
        return not self.leaks and self.alone <= self.tolerance

    @property
    def message(self) -> str:
        """What was found, in a sentence or two."""
        module = "" if self.module is None else f"; the first module whose output changed is {self.module}"
        if self.leaks:
            return (
                f"segments see each other in the {self.layout} layout: replacing one segment's tokens moved another "
                f"segment's log-probabilities by {self.changed:.3g} nats and its loss has {self.gradient:.2g} of its "
                f"gradient there (attention leak, or a layer that carries state along the row){module}"
            )
        if not self.ok:
            return (
                f"segments in the {self.layout} layout differ from the trajectories alone by {self.alone:.3g} nats "
                f"(allowed: {self.tolerance:.0e}) although they do not see each other: their position numbers do not "
                f"restart, or their boundaries are off{module}"
            )
        return (
            f"segments are isolated in the {self.layout} layout: they differ from the trajectories alone by "
            f"{self.alone:.2g} nats, and do not move when another segment is replaced"
        )


def measure_isolation(
    policy: Isolated, *, layout: Layout, tolerance: float | None = None, seed: int = 0
) -> Isolation:
    """Runs the probe; the model, its gradients and the random state are left as they were.

    Args:
        policy: The policy, set to the layout and the attention in question.
        layout: How the probe's segments are laid out.
        tolerance: Nats that are put down to rounding; `None` chooses by the precision of the model.
        seed: Of the random tokens.

    Returns:
        What was measured.
    """
    device = _device(policy.model)
    trajectories, changed = _random_trajectories(policy, seed)
    batch, changed_batch = (collate(t, layout=layout).to(device) for t in (trajectories, changed))
    others = batch.scored_segments != _CHANGED
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        together = _run(policy, batch, others)
        replaced = _run(policy, changed_batch, others)
        alone = [_run_alone(policy, trajectory, device) for trajectory in trajectories]
    allowed = _tolerance(policy.model, device) if tolerance is None else tolerance
    largest = max(float(run.gradient.abs().max()) for run in alone) if together.gradient.numel() else 0.0
    result = Isolation(
        changed=_distance(together.log_probs[others], replaced.log_probs[others]),
        gradient=_leaked_gradient(together, batch, largest),
        alone=_distance(together.log_probs, torch.cat([run.log_probs for run in alone])),
        tolerance=allowed,
        layout=layout,
    )
    return result if result.ok else _with_module(result, policy, batch, changed_batch, trajectories)


@dataclass(frozen=True)
class _Run:
    log_probs: Tensor  # [M]
    gradient: Tensor  # [positions, width] at the embeddings, or empty where the embedding is not known


def _run(policy: Isolated, batch: PackedBatch, counted: Tensor) -> _Run:
    """Log-probabilities, and the gradient of the sum of the counted ones at the embeddings."""
    captured: list[Tensor] = []
    with torch.enable_grad(), _captured_embeddings(policy.embedding(), captured):
        log_probs = policy(batch).log_probs
        if not captured or not bool(counted.any()):
            return _Run(log_probs.detach(), log_probs.new_zeros(0))
        (gradient,) = torch.autograd.grad(log_probs[counted].sum(), captured[:1], allow_unused=True)
    gradient = torch.zeros_like(captured[0]) if gradient is None else gradient
    return _Run(log_probs.detach(), gradient.detach().flatten(0, -2))


def _run_alone(policy: Isolated, trajectory: Trajectory, device: torch.device) -> _Run:
    batch = collate([trajectory], layout="padded").to(device)
    with policy.reference_attention():
        return _run(policy, batch, torch.ones(batch.num_scored, dtype=torch.bool, device=device))


@contextmanager
def _captured_embeddings(embedding: nn.Module | None, captured: list[Tensor]) -> Iterator[None]:
    """Collects what the embedding returns as a leaf of the graph, so that no parameter gets a gradient."""
    if embedding is None:
        yield
        return

    def capture(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        captured.append(output.detach().requires_grad_())
        return captured[-1]

    handle = embedding.register_forward_hook(capture)
    try:
        yield
    finally:
        handle.remove()


def _leaked_gradient(run: _Run, batch: PackedBatch, scale: float) -> float:
    """Gradient at the replaced segment's tokens, which no counted log-probability may depend on."""
    if run.gradient.numel() == 0 or scale == 0.0:
        return 0.0
    start, length = (int(x[_CHANGED]) for x in (batch.segment_starts, batch.segment_lengths))
    return float(run.gradient[start : start + length].abs().max()) / scale


def _with_module(
    result: Isolation, policy: Isolated, batch: PackedBatch, changed: PackedBatch, trajectories: list[Trajectory]
) -> Isolation:
    """Runs the probe once more, looking into the model."""
    if result.leaks:
        positions = _positions(batch, [i for i in range(len(trajectories)) if i != _CHANGED])
        runs = ((batch, positions), (changed, positions))
    else:
        device = batch.input_ids.device
        index = len(trajectories) - 1
        alone = collate([trajectories[index]], layout="padded").to(device)
        runs = ((batch, _positions(batch, [index])), (alone, _positions(alone, [0])))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        module = first_changed_module(policy, policy.model, *runs)
    return Isolation(result.changed, result.gradient, result.alone, result.tolerance, module, result.layout)


def _positions(batch: PackedBatch, segments: list[int]) -> Tensor:
    starts, lengths = batch.segment_starts.tolist(), batch.segment_lengths.tolist()
    return torch.tensor([p for s in segments for p in range(starts[s], starts[s] + lengths[s])])


def _random_trajectories(policy: Isolated, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """Random tokens, and the same with every token of one segment replaced by another one."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = _vocabulary(policy)
    lengths = list(_LENGTHS)
    sizes = {size for parameter in policy.model.parameters() for size in parameter.shape}
    while sum(lengths) in sizes:  # A row as long as a feature is wide could not be told from it.
        lengths[_CHANGED] += 1
    ids = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    trajectories = [_trajectory(x) for x in ids]
    shift = torch.randint(1, vocabulary, (lengths[_CHANGED],), generator=generator)
    changed = trajectories.copy()
    changed[_CHANGED] = _trajectory((ids[_CHANGED] + shift) % vocabulary)
    return trajectories, changed


def _trajectory(ids: Tensor) -> Trajectory:
    return Trajectory(ids, torch.ones(len(ids), dtype=torch.bool), 0.0)


def _vocabulary(policy: Isolated) -> int:
    embedding = policy.embedding()
    size = getattr(embedding, "num_embeddings", None) or getattr(getattr(policy.model, "config", None), "vocab_size", 2)
    return max(2, int(size))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _tolerance(model: nn.Module, device: torch.device) -> float:
    """By the least precise number in the computation: a parameter's, or autocast's."""
    used = {parameter.dtype for parameter in model.parameters()} & _TOLERANCE.keys()
    if torch.is_autocast_enabled(device.type):
        used.add(torch.get_autocast_dtype(device.type))
    return max((_TOLERANCE[dtype] for dtype in used), default=_TOLERANCE[torch.float32])


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference; infinite where a number is not finite."""
    difference = (a - b).abs()
    return float(torch.where(difference.isfinite(), difference, torch.inf).max()) if difference.numel() else 0.0
