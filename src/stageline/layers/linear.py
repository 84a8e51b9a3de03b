"""Linear layers, with weights as checkpoints hold them: [out_features, in_features].

One idea: the matmul hides behind `Linear`, so packed or quantised weights can take its place without a model noticing.
On a CPU, bfloat16 weights are packed once, at load, and only the packed form is kept: for this project's own kernels
(`stageline.kernels.gemm`), where a row's result depends on no other row; or for oneDNN where there are none or where
the machine has matrix tiles (AMX), which only oneDNN uses.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from stageline import kernels
from stageline.kernels.gemm import Gemm
from stageline.layers.activation import GELU_TANH, SILU, activate_and_mul


class Linear:
    """y = x Wᵀ + b.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._route = _fastest_route(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in_features]. Returns: [rows, out_features]."""
        return self._route.multiply(x)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The same, float32, and not rounded on the way where that costs nothing."""
        return self._route.multiply_in_float32(x)

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Where each row's largest result of `in_float32` stands, of equals the first: int64 [rows].

        None where finding it takes no less than computing and looking through all results.
        """
        return self._route.largest(x)


class GatedLinear:
    """activation(gate(x)) * up(x): the first half of a gated MLP, in one pass over both matrices where kernels can.

    Args:
        weight: [2 * size, in_features], the gate first.
        bias: [2 * size] or None.
        activation: as `ModelSpec.activation` spells it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = SILU) -> None:
        gemm = _gemm_for(weight)
        self._route: _OwnGatedRoute | _SeparateGatedRoute = (
            _SeparateGatedRoute(weight, bias, activation)
            if gemm is None
            else _OwnGatedRoute(gemm, weight, bias, activation)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in_features]. Returns: [rows, size]."""
        return self._route.multiply(x)


class TiedLinear(Linear):
    """A linear layer whose weight also serves as a table of rows: one copy of a matrix that model ends share."""

    def __init__(self, weight: torch.Tensor) -> None:
        gemm = _gemm_for(weight)
        self._route: _OwnRoute | _TorchRoute = (
            _TorchRoute(weight, None) if gemm is None else _OwnRoute(gemm, weight, None)
        )

    def rows(self, row_numbers: torch.Tensor) -> torch.Tensor:
        """row_numbers: int64 [n]. Returns: these rows of the weight, [n, in_features]."""
        return self._route.rows(row_numbers)


class _Route(Protocol):
    def multiply(self, x: torch.Tensor) -> torch.Tensor: ...
    def multiply_in_float32(self, x: torch.Tensor) -> torch.Tensor: ...
    def largest(self, x: torch.Tensor) -> torch.Tensor | None: ...


def _fastest_route(weight: torch.Tensor, bias: torch.Tensor | None) -> _Route:
    if (gemm := _gemm_for(weight)) is not None:
        return _OwnRoute(gemm, weight, bias)
    if weight.is_cpu and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return _OneDnnRoute(weight, bias)
    return _TorchRoute(weight, bias)


def _gemm_for(weight: torch.Tensor) -> Gemm | None:
    """This project's kernels where they are the fastest route, which they are at every number of rows or not at all."""
    if weight.dtype != torch.bfloat16 or torch.cpu._is_amx_tile_supported():
        return None
    library = kernels.library(weight.device, weight.dtype)
    return library.gemm if library is not None and library.has_fast_linear else None


class _OwnRoute:
    def __init__(self, gemm: Gemm, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._gemm = gemm
        self._packed = gemm.pack(weight, bias)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemm.linear(x, self._packed)

    def multiply_in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemm.linear(x, self._packed, torch.float32)

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        places, _ = self._gemm.largest(x, self._packed)
        return places

    def rows(self, row_numbers: torch.Tensor) -> torch.Tensor:
        return self._gemm.unpack(self._packed, row_numbers)


class _OneDnnRoute:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def multiply_in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x).float()

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        return None


class _TorchRoute:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def multiply_in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x).float()

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        return None

    def rows(self, row_numbers: torch.Tensor) -> torch.Tensor:
        return F.embedding(row_numbers, self._weight)


class _OwnGatedRoute:
    def __init__(self, gemm: Gemm, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        self._gemm = gemm
        self._packed = gemm.pack(weight, bias, is_gated=True)
        self._is_gelu = activation == GELU_TANH

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemm.gated(x, self._packed, self._is_gelu)


class _SeparateGatedRoute:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> None:
        self._gate_up = Linear(weight, bias)
        self._activation = activation

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return activate_and_mul(self._gate_up(x), self._activation)
