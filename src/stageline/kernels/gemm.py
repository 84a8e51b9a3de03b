"""Linear layers in bfloat16 over weights that are packed once, as functions of tensors. Checked here, not in C++.

One idea: `PackedWeight` is the only form in which a weight is kept, so it serves every number of rows, a gated MLP's
first half in one pass, an LM head, and the rows of an embedding that shares the head's matrix. A row's result is the
same, bit for bit, whatever other rows there are and however many threads share the work (as many as torch may use).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stageline.kernels.huge_pages import HugePages
from stageline.kernels.program import Argument, Kernel, result

PANEL = 32

_POINTER, _SIZE, _FLAG = Argument.POINTER, Argument.SIZE, Argument.FLAG
_TOKENS = Argument.NUM_TOKENS
SIGNATURES: dict[str, list[Argument]] = {
    "gemm": [_POINTER] * 4 + [_SIZE, _TOKENS, _SIZE, _SIZE] + [_FLAG] * 2,
    "gemm_gated": [_POINTER] * 4 + [_SIZE, _TOKENS, _SIZE, _SIZE] + [_FLAG] * 2,
    "gemm_largest": [_POINTER] * 5 + [_SIZE] * 4 + [_FLAG],
    "gemm_pack": [_POINTER] * 3 + [_SIZE] * 2 + [_FLAG],
    "gemm_unpack": [_POINTER] * 3 + [_SIZE] * 2,
}
RECORDABLE = ("gemm", "gemm_gated")


@dataclass(frozen=True)
class PackedWeight:
    """A weight and its bias, ready for `Gemm`.

    Args:
        panels: bfloat16 [panels, in_features / 2 rounded up, 32 columns, 2].
        bias: bfloat16, one per row of the weight, or None.
        out_features: columns of the result.
        in_features: columns of x.
        is_gated: packed for `Gemm.gated`, else for the other functions.
        addresses: of panels and bias. A call takes microseconds, and asking a tensor is a part of that.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    in_features: int
    is_gated: bool
    addresses: tuple[int, int | None]


class Gemm:
    """One variant's functions. Not more than one thread may pack at a time; the others may be called from several.

    Args:
        functions: by name, as in SIGNATURES.
    """

    def __init__(self, functions: dict[str, Kernel]) -> None:
        self._gemm = functions["gemm"]
        self._gated = functions["gemm_gated"]
        self._largest = functions["gemm_largest"]
        self._pack = functions["gemm_pack"]
        self._unpack = functions["gemm_unpack"]
        self._memory = HugePages()

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None, is_gated: bool = False) -> PackedWeight:
        """Args:
        weight: bfloat16 [out_features, in_features]; if gated [2 * out_features, in_features], the gate first.
        bias: bfloat16, one per row of the weight.
        """
        rows, in_features = weight.shape
        assert weight.dtype == torch.bfloat16 and in_features > 0 and (not is_gated or rows % 2 == 0)
        assert bias is None or (bias.shape == (rows,) and bias.dtype == torch.bfloat16)
        weight = _even(weight).contiguous()
        out_features, columns = (rows // 2, PANEL // 2) if is_gated else (rows, PANEL)
        steps = weight.shape[1] // 2
        panels = self._memory.empty((-(-out_features // columns), steps, PANEL, 2), torch.bfloat16)
        zeros = torch.zeros(2 * steps, dtype=torch.bfloat16)
        self._pack(weight.data_ptr(), panels.data_ptr(), zeros.data_ptr(), out_features, steps, is_gated)
        bias = None if bias is None else bias.contiguous()
        addresses = panels.data_ptr(), None if bias is None else bias.data_ptr()
        return PackedWeight(panels, bias, out_features, in_features, is_gated, addresses)

    def unpack(self, weight: PackedWeight, rows: torch.Tensor) -> torch.Tensor:
        """rows: int64 [n], below out_features. Returns: these rows of the weight, bfloat16 [n, in_features]."""
        assert not weight.is_gated and rows.dtype == torch.int64 and rows.ndim == 1
        rows = rows.contiguous()
        steps = weight.panels.shape[1]
        out = torch.empty(rows.shape[0], 2 * steps, dtype=torch.bfloat16)
        self._unpack(weight.panels.data_ptr(), rows.data_ptr(), out.data_ptr(), rows.shape[0], steps)
        return out[:, : weight.in_features]

    def linear(self, x: torch.Tensor, weight: PackedWeight, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """x Wᵀ + b, summed in float32 and rounded once.

        Args:
            x: bfloat16 [rows, in_features].
            dtype: bfloat16 or float32, the result's.
        Returns: [rows, out_features].
        """
        assert not weight.is_gated and dtype in (torch.bfloat16, torch.float32)
        x, rows, stride = _words(x, weight)
        out = result((rows, weight.out_features), dtype)
        self._gemm(
            x.data_ptr(), *weight.addresses, out.data_ptr(), stride, rows, weight.out_features,
            (weight.in_features + 1) // 2, torch.get_num_threads(), dtype == torch.bfloat16,
        )  # fmt: skip
        return out

    def gated(self, x: torch.Tensor, weight: PackedWeight, is_gelu: bool = False) -> torch.Tensor:
        """silu(gate(x)) * up(x), summed and multiplied in float32 and rounded once.

        Args:
            x: bfloat16 [rows, in_features].
            is_gelu: gelu, by its tanh formula, in place of silu.
        Returns: bfloat16 [rows, out_features].
        """
        assert weight.is_gated
        x, rows, stride = _words(x, weight)
        out = result((rows, weight.out_features), torch.bfloat16)
        self._gated(
            x.data_ptr(), *weight.addresses, out.data_ptr(), stride, rows, weight.out_features,
            (weight.in_features + 1) // 2, torch.get_num_threads(), is_gelu,
        )  # fmt: skip
        return out

    def largest(self, x: torch.Tensor, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of `linear`'s float32 results in each row, of equals the first; the others are not written.

        Args: x: bfloat16 [rows, in_features]. Returns: int64 [rows] places and float32 [rows] values.
        """
        assert not weight.is_gated
        x, rows, stride = _words(x, weight)
        threads = torch.get_num_threads()
        places, values = torch.empty((threads, rows), dtype=torch.int64), torch.empty((threads, rows))
        self._largest(
            x.data_ptr(), *weight.addresses, places.data_ptr(), values.data_ptr(), stride, rows, weight.out_features,
            (weight.in_features + 1) // 2, threads,
        )  # fmt: skip
        return places[0], values[0]


def _words(x: torch.Tensor, weight: PackedWeight) -> tuple[torch.Tensor, int, int]:
    """x as the kernels read it, in words of two elements. Returns: x, its rows, and words from row to row."""
    rows, columns = x.shape
    assert x.dtype == torch.bfloat16 and columns == weight.in_features
    if columns % 2 == 0:
        if x.is_contiguous():
            return x, rows, columns // 2
        if x.stride(1) == 1 and x.stride(0) % 2 == 0:
            return x, rows, x.stride(0) // 2
    return _even(x).contiguous(), rows, (columns + 1) // 2


def _even(matrix: torch.Tensor) -> torch.Tensor:
    return F.pad(matrix, (0, 1)) if matrix.shape[1] % 2 else matrix
