"""Is a packed segment what it is alone? Measured on the model itself, by changing one segment and looking at the rest.

Four short random segments, one of them of a single token, go through the policy in the layout it would train with.
Then one segment's tokens are replaced, and each segment is run alone by the attention the model came with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_rl.data.batch import Layout, PackedBatch
from lit_rl.policy.precision import least_precise
from lit_rl.policy.probe import LENGTHS, Isolated, Probe, device_of, make_probe, positions_of
from lit_rl.policy.probing import first_changed_module

# Largest difference in nats that rounding explains when one trajectory is computed in two shapes.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2.5e-1}
# Of that, what is left when both runs have the same shape: other tokens may be grouped otherwise by a router.
_SAME_SHAPE = 0.1
# Gradient of a segment's loss at another segment's tokens, relative to its own: exactly 0 but for rounding.
_GRADIENT_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Isolation:
    """What was measured; all numbers but `tolerance` are 0 up to rounding for isolated segments of a causal model.

    Args:
        changed: Largest change in nats of a log-probability when another segment's tokens were replaced.
        gradient: Largest gradient of a segment's loss at another segment's tokens, relative to its own.
        future: Largest change in nats of a log-probability when a later token of its own segment was replaced.
        ahead: Largest gradient of a segment's loss at its own last token, which predicts nothing, relative to the rest.
        alone: Largest difference in nats between a segment in the microbatch and the trajectory alone.
        padded: The same for rows of one segment with padding on the right.
        tolerance: Nats that rounding explains in the precision of the model.
        module: The first module whose output changed, when something did.
    """

    changed: float
    gradient: float
    future: float
    ahead: float
    alone: float
    padded: float
    tolerance: float
    module: str | None = None

    @property
    def leaks(self) -> bool:
        """True when a segment depends on another one."""
        return not (self.changed <= _SAME_SHAPE * self.tolerance and self.gradient <= _GRADIENT_TOLERANCE)

    @property
    def is_causal(self) -> bool:
        """True when no token depends on later ones, padding included."""
        return self.future <= _SAME_SHAPE * self.tolerance and self.ahead <= _GRADIENT_TOLERANCE

    @property
    def ok(self) -> bool:
        """True when segments neither depend on each other nor differ from the trajectories alone."""
        return not self.leaks and self.is_causal and max(self.alone, self.padded) <= self.tolerance

    @property
    def message(self) -> str:
        """What was found, in a sentence or two."""
        module = "" if self.module is None else f"; the first module whose output changed is {self.module}"
        if self.leaks:
            return (
                f"segments see each other: replacing one segment's tokens moved another segment's log-probabilities "
                f"by {self.changed:.3g} nats, and {self.gradient:.2g} of a segment's gradient is at another one's "
                f"tokens (attention leak, or a layer that carries state along the row){module}"
            )
        if not self.is_causal:
            return (
                f"the model is not causal: replacing a later token of the same segment moved a log-probability by "
                f"{self.future:.3g} nats, and {self.ahead:.2g} of a segment's gradient is at its last token, which no "
                f"prediction may see{module}"
            )
        if self.alone > self.tolerance:
            return (
                f"segments differ from the trajectories alone by {self.alone:.3g} nats (allowed: "
                f"{self.tolerance:.0e}) although they do not see each other: their position numbers do not restart, "
                f"or their boundaries are off{module}"
            )
        if not self.ok:
            return (
                f"padded rows differ from the trajectories alone by {self.padded:.3g} nats (allowed: "
                f"{self.tolerance:.0e}): the model looks at its padding, or treats its attention by name{module}"
            )
        return (
            f"segments are isolated: they differ from the trajectories alone by {self.alone:.2g} nats, and do not "
            "move when another segment is replaced"
        )


def measure_isolation(
    policy: Isolated,
    *,
    layout: Layout,
    tolerance: float | None = None,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
) -> Isolation:
    """Runs the probe, within `probing_mode`; no parameter gets a gradient.

    Args:
        policy: The policy, set to the layout and the attention in question.
        layout: How the probe's segments are laid out.
        tolerance: Nats that are put down to rounding; `None` chooses by the precision of the model.
        seed: Of the random tokens.
        lengths: Tokens of the probe's segments.

    Returns:
        What was measured.
    """
    device = device_of(policy.model)
    allowed = rounding(policy.model, device) if tolerance is None else tolerance
    probe = make_probe(policy, layout, seed=seed, device=device, lengths=lengths)
    others = probe.batch.scored_segments != probe.replaced
    together = _run(policy, probe.batch, others)
    with torch.no_grad():
        replaced, padded = (policy(x).log_probs for x in (probe.changed, probe.padded))
        first, later = (policy(x).log_probs for x in (probe.first, probe.future))
    runs = [_run_alone(policy, batch) for batch in probe.alone]
    alone = torch.cat([run.log_probs for run in runs])
    largest = max((float(run.gradient.abs().max()) for run in runs if run.gradient.numel()), default=0.0)
    result = Isolation(
        changed=_distance(together.log_probs[others], replaced[others]),
        gradient=_share_at(together, positions_of(probe.batch, [probe.replaced]), largest),
        future=_distance(first, later),
        ahead=_share_at(together, _last_positions(probe), largest),
        alone=_distance(together.log_probs, alone),
        padded=_distance(padded, alone),
        tolerance=allowed,
    )
    return result if result.ok else replace(result, module=_culprit(result, policy, probe))


@contextmanager
def probing_mode(policy: Any) -> Iterator[None]:
    """Within it, the model is in training mode where that is deterministic, else in evaluation mode, with a warning.

    What is probed should be what is trained, and the fast paths of some layers depend on the mode. Recomputation of
    layers is off, because gradients are asked for at single tensors. Flags and random state are restored.

    Args:
        policy: The policy to be probed, set to padded rows.
    """
    flags = {module: module.training for module in policy.modules()}
    recomputed = [module for module in policy.modules() if getattr(module, "gradient_checkpointing", False) is True]
    device = device_of(policy.model)
    with torch.inference_mode(False), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            policy.train()
            for module in recomputed:
                module.gradient_checkpointing = False
            random = _random_module(policy)
            if random is not None:
                rank_zero_warn(
                    f"the model is random in training mode, although dropout is off: {random} gives two results for "
                    "one input, so the ratio of two passes is noise; look for jitter or sampling in its configuration"
                )
                policy.eval()
            yield
        finally:
            for module, flag in flags.items():
                module.training = flag
            for module in recomputed:
                module.gradient_checkpointing = True


def _random_module(policy: Any) -> str | None:
    """The first module that does not repeat itself on one row of one segment."""
    batch = make_probe(policy, "padded", seed=0, device=device_of(policy.model)).alone[0]
    positions = list(range(batch.num_tokens))
    with torch.no_grad():
        return first_changed_module(policy, policy.model, (batch, positions), (batch, positions))


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


def _run_alone(policy: Isolated, batch: PackedBatch) -> _Run:
    with policy.reference_attention():
        return _run(policy, batch, torch.ones(batch.num_scored, dtype=torch.bool, device=batch.input_ids.device))


@contextmanager
def _captured_embeddings(embedding: nn.Module | None, captured: list[Tensor]) -> Iterator[None]:
    """Collects what the embedding returns as a leaf of the graph, so that no parameter gets a gradient."""
    if embedding is None:
        yield
        return

    def capture(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        captured.append(output.detach().requires_grad_())
        return captured[-1].clone()  # Some models scale their embeddings in place, which a leaf does not allow.

    handle = embedding.register_forward_hook(capture)
    try:
        yield
    finally:
        handle.remove()


def _share_at(run: _Run, positions: list[int], scale: float) -> float:
    """Gradient at tokens that no counted log-probability may depend on."""
    if run.gradient.numel() == 0 or scale == 0.0:
        return 0.0
    return float(run.gradient[positions].abs().max()) / scale


def _last_positions(probe: Probe) -> list[int]:
    """Flat index of the last token of each segment that predicts something, the replaced one's left out."""
    lengths = probe.batch.segment_lengths.tolist()
    chosen = [index for index, length in enumerate(lengths) if length > 1 and index != probe.replaced]
    return [positions_of(probe.batch, [index])[-1] for index in chosen]


def _culprit(result: Isolation, policy: Isolated, probe: Probe) -> str | None:
    """Runs the two batches that disagree once more, looking into the model."""
    batch, segments = probe.batch, range(len(probe.alone))
    last = len(probe.alone) - 1
    if result.leaks:
        others = [segment for segment in segments if segment != probe.replaced]
        first, second = (batch, positions_of(batch, others)), (probe.changed, positions_of(batch, others))
    elif not result.is_causal:
        early = [p for s in segments for p in positions_of(batch, [s])[:-1]]
        first, second = (batch, early), (probe.future, early)
    elif result.alone > result.tolerance:
        first, second = (batch, positions_of(batch, [last])), (probe.alone[last], positions_of(probe.alone[last], [0]))
    else:
        first = (probe.padded, positions_of(probe.padded, [last]))
        second = (probe.alone[last], positions_of(probe.alone[last], [0]))
    with torch.no_grad():
        return first_changed_module(policy, policy.model, first, second)


def rounding(model: nn.Module, device: torch.device) -> float:
    """Nats that rounding explains, by the least precise number in the computation."""
    return _TOLERANCE[least_precise(model, device)]


def _distance(a: Tensor, b: Tensor) -> float:
    """Largest difference; infinite where a number is not finite."""
    difference = (a - b).abs()
    return float(torch.where(difference.isfinite(), difference, torch.inf).max()) if difference.numel() else 0.0
