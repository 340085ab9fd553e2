"""The matrix products of the log-probability head: one tile of logits, and what a tile's gradient adds up to.

A tile holds the logits of some tokens (its rows) over some of the vocabulary (its columns). Everything in the head is
made of three products with a tile: hidden states times weight rows gives it, and its gradient times the weight rows,
or times the hidden states, gives the two gradients.

Precision. Products accumulate in float32 (float64 for float64 inputs) whatever the inputs are. On CPU, factors of a
lower precision are widened one block at a time, so no float32 copy of the weight exists. On CUDA they go to the matrix
units as they are, with float32 results; a tile's gradient is then rounded to their precision too. Under autocast the
factors are first rounded to the autocast dtype, as `torch.nn.Linear` would.

Speed. On x86 CPUs the float32 products go to oneDNN, which `torch.mm` does not use for float32: on one AMD EPYC core
(Zen 5) it runs at 230 GFLOP/s where `torch.mm` runs at 90. `torch.backends.mkldnn.flags(enabled=False)` switches that
off, and so does a build of torch without oneDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Rows of a tile: a run of tokens, or the indices of some.
Rows = slice | Tensor

#: Devices that multiply operands of 16 bits into float32 results.
_MIXED_PRODUCT_DEVICES = ("cuda",)

#: Multiplications below which a call into oneDNN costs more than it saves.
_ONEDNN_MIN_MULTIPLICATIONS = 2**22


def take(values: Tensor, rows: Rows) -> Tensor:
    """The rows of `values`: a view for a slice, a copy for indices."""
    return values[rows] if isinstance(rows, slice) else values.index_select(0, rows)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """The product `left @ right` accumulated in float32 (float64 for float64).

    Args:
        left: Matrix `[m, k]`, any strides.
        right: Matrix `[k, n]` of the same dtype, any strides.

    Returns:
        A new tensor `[m, n]`, float32 for operands of at most 32 bits.

    >>> multiply(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]]))
    tensor([[11.]])
    """
    if left.dtype.itemsize < 4:
        return torch.mm(left, right, out_dtype=torch.float32)
    if left.numel() * right.shape[1] >= _ONEDNN_MIN_MULTIPLICATIONS and _uses_onednn(left):
        # Gaps between rows send oneDNN to a reference implementation that is hundreds of times slower.
        return _onednn_product(_without_gaps(left), _without_gaps(right))
    return torch.mm(left, right)


def _onednn_product(left: Tensor, right: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right.t(), None, "none", [], "")


def _without_gaps(matrix: Tensor) -> Tensor:
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


def _uses_onednn(operand: Tensor) -> bool:
    return bool(
        operand.device.type == "cpu"
        and operand.dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


@dataclass(frozen=True)
class VocabBlock:
    """Some rows of the output layer, ready to be multiplied.

    Attributes:
        columns: Their range in the vocabulary.
        weights: Their weights `[columns, D_i]`, in operand precision.
        bias: Their biases `[columns]`, or None.
    """

    columns: slice
    weights: Sequence[Tensor]
    bias: Tensor | None

    def inside(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets lie in this block, and the column of each (0 for those outside), both `[rows]`."""
        here = (targets >= self.columns.start) & (targets < self.columns.stop)
        return here, torch.where(here, targets - self.columns.start, 0)


@dataclass(frozen=True)
class HeadInputs:
    """What one call of the head computes with, detached from autograd.

    The logits are `logit_scale * (sum_i hiddens[i] @ weights[i].T + bias)`, capped, then divided by the temperature.
    A plain output layer has one pair of hidden states and weight; a low-rank adapter adds a second.

    Attributes:
        hiddens: Hidden states `[M, D_i]`.
        weights: Weights `[V, D_i]`.
        bias: Biases `[V]`, or None.
        targets: Token ids `[M]`, int64.
        row_temperature: Each token's temperature `[M]`, or None for `temperature` everywhere.
        temperature: One temperature for all tokens.
        logit_scale: Multiplier of the logits, before the cap.
        softcap: Logits become `softcap * tanh(logits / softcap)`; None leaves them alone.
        vocab_size: Real size of the vocabulary; further rows of the weights take no part.
        autocast_dtype: Precision the factors of each product are rounded to; None leaves them as they are.
    """

    hiddens: Sequence[Tensor]
    weights: Sequence[Tensor]
    bias: Tensor | None
    targets: Tensor
    row_temperature: Tensor | None
    temperature: float
    logit_scale: float
    softcap: float | None
    vocab_size: int
    autocast_dtype: torch.dtype | None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Precision of everything after the products: float32, or float64 if anything comes in float64."""
        factors = [*self.hiddens, *self.weights]
        return torch.float64 if any(factor.dtype is torch.float64 for factor in factors) else torch.float32

    @property
    def width(self) -> int:
        """Columns of all weights together."""
        return sum(weight.shape[1] for weight in self.weights)

    def _operand(self, values: Tensor, term: int) -> Tensor:
        """A factor of the `term`-th product: rounded as autocast would, and widened as far as the product needs."""
        dtype = torch.promote_types(self.hiddens[term].dtype, self.weights[term].dtype)
        if self.autocast_dtype is not None and dtype is not torch.float64:
            dtype = self.autocast_dtype
        values = values.to(dtype)
        mixed = values.device.type in _MIXED_PRODUCT_DEVICES and self.compute_dtype is torch.float32
        return values if mixed else values.to(self.compute_dtype)

    def block(self, start: int, stop: int) -> VocabBlock:
        """The rows `start` to `stop` of the output layer."""
        columns = slice(start, stop)
        bias = None if self.bias is None else self.bias[columns].to(self.compute_dtype)
        return VocabBlock(columns, [self._operand(weight[columns], i) for i, weight in enumerate(self.weights)], bias)

    def hidden_rows(self, rows: Rows) -> list[Tensor]:
        """The hidden states of `rows` as operands."""
        return [self._operand(take(hidden, rows), i) for i, hidden in enumerate(self.hiddens)]

    def tile(self, hiddens: Sequence[Tensor], block: VocabBlock) -> Tensor:
        """A new tile `[rows, columns]`: the bare logits, or `tanh(logits / softcap)` where there is a cap.

        `slope` turns an entry into a logit over temperature; applying it later saves a pass over the tile.
        """
        tile = multiply(hiddens[0], block.weights[0].t())
        for hidden, weight in zip(hiddens[1:], block.weights[1:], strict=True):
            tile += multiply(hidden, weight.t())
        if block.bias is not None:
            tile += block.bias
        if self.softcap is not None:
            tile.mul_(self.logit_scale / self.softcap).tanh_()
        return tile

    def slope(self, rows: Rows) -> Tensor | float:
        """What an entry of a tile is multiplied with to become a logit over temperature: a number, or `[rows, 1]`."""
        return self._over_temperature(self.logit_scale if self.softcap is None else self.softcap, rows)

    def inner_slope(self, rows: Rows) -> Tensor | float:
        """Derivative of the logit over temperature with respect to the product, but for the cap's `1 - tanh^2`."""
        return self._over_temperature(self.logit_scale, rows)

    def _over_temperature(self, factor: float, rows: Rows) -> Tensor | float:
        if self.row_temperature is None:
            return factor / self.temperature
        return factor / take(self.row_temperature, rows).to(self.compute_dtype).unsqueeze(1)
