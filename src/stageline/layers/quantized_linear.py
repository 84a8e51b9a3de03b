"""Linear layers over weights that stay quantised, and the embedding that may share one with the LM head.

One idea: what the projections of one input give stands side by side, so a run of quantised matrices, of whatever types,
is one call of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline import kernels
from stageline.kernels.quantized import QuantizedMatrix, QuantizedProduct
from stageline.layers.activation import GELU_TANH, SILU, activate_and_mul
from stageline.layers.embedding import rounded
from stageline.layers.linear import GatedLinear, Linear


class QuantizedLinear(Linear):
    """y = x Wᵀ + b, rounded to the compute dtype once.

    Args:
        matrices: the rows of W, one below the other; each may be of another type.
        dtype: the compute dtype.
        bias: [out_features] or None.
    """

    def __init__(
        self, matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        self._product = _product(matrices, dtype, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.linear(x, x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.linear(x, torch.float32)

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        return self._product.largest(x)


class QuantizedGatedLinear(GatedLinear):
    """activation(gate(x)) * up(x), rounded to the compute dtype once.

    Args:
        gate, up: [size, in_features].
        dtype: the compute dtype.
        bias: [2 * size], the gate's first, or None.
        activation: as `ModelSpec.activation` spells it.
    """

    def __init__(
        self,
        gate: QuantizedMatrix,
        up: QuantizedMatrix,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        activation: str = SILU,
    ) -> None:
        self._product = _product([gate, up], dtype, bias)
        self._is_gelu = activation == GELU_TANH

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product.gated(x, self._is_gelu)


def _product(
    matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, bias: torch.Tensor | None = None
) -> QuantizedProduct:
    library = kernels.library(torch.device("cpu"), dtype)
    return QuantizedProduct(None if library is None else library.quantized, matrices, bias)


class SideBySide(Linear):
    """Linear layers of one input as one: for parts of which some are quantised and some are not."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self._parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.in_float32(x) for part in self._parts], dim=-1)

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        return None


class LinearThenGate(GatedLinear):
    """activation(gate(x)) * up(x), in two passes.

    Args:
        gate_up: both projections, the gate first.
        activation: as `ModelSpec.activation` spells it.
    """

    def __init__(self, gate_up: Linear, activation: str = SILU) -> None:
        self._gate_up = gate_up
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return activate_and_mul(self._gate_up(x), self._activation)


class QuantizedEmbedding:
    """Looks up a row per token and makes only these rows floating-point.

    Args:
        matrix: [vocab, hidden].
        dtype: the compute dtype.
        scale: what rows are multiplied by.
    """

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._matrix = matrix
        self._product = _product([matrix], dtype)
        self._dtype = dtype
        self._scale = rounded(scale, dtype)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns: [tokens, hidden]."""
        rows = self._product.rows(token_ids, self._dtype)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def as_projection(self) -> Linear:
        """The same matrix as the LM head's projection."""
        return QuantizedLinear([self._matrix], self._dtype)
