"""Matrices of GGUF's quantised weights, packed for integer dot products, and the linear layer over them.

One idea: GGML's types are of four kinds, all w = scale * (number - offset) or scale * number + minimum with unsigned
numbers in blocks of 32. A matrix is cut into panels of 64 rows; a panel's numbers are one stream, block by block, in
the order in which the kernel reads them: 16 rows side by side, four numbers of each at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F

from stageline.kernels.huge_pages import HugePages
from stageline.kernels.program import Argument, result

BLOCK = 32
_PANEL, _GROUP, _AT_ONCE = 64, 16, 4
_NUM_GROUPS, _STEPS = _PANEL // _GROUP, BLOCK // _AT_ONCE
_RUN_ELEMENTS = 2**22

# A row of activations and what is known of its blocks must fit into the kernel's scratch.
MAX_COLUMNS = 128 * 1024

_POINTER, _SIZE, _FLAG = Argument.POINTER, Argument.SIZE, Argument.FLAG
SIGNATURES: dict[str, list[Argument]] = {
    "quantized_linear": [_POINTER, _POINTER, Argument.NUM_TOKENS, _POINTER, _FLAG, _FLAG, _FLAG],
    "quantized_gated": [_POINTER, _POINTER, Argument.NUM_TOKENS, _POINTER, _FLAG, _FLAG, _FLAG],
    "quantized_largest": [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _FLAG, _FLAG],
    "quantized_rows": [_POINTER, _POINTER, _SIZE, _POINTER, _FLAG],
}
RECORDABLE = ("quantized_linear", "quantized_gated")


class Kind(IntEnum):
    """How a block of 32 numbers makes weights; the C++ side has the same numbers.

    FOUR_BITS: scale * (number - 8). FOUR_BITS_MINIMUM: scale * number + minimum. EIGHT_BITS: scale * (number - 128).
    EIGHT_BITS_HALVES: the same with a scale for each half of the block.
    """

    FOUR_BITS = 0
    FOUR_BITS_MINIMUM = 1
    EIGHT_BITS = 2
    EIGHT_BITS_HALVES = 3

    @property
    def is_four_bits(self) -> bool:
        return self in (Kind.FOUR_BITS, Kind.FOUR_BITS_MINIMUM)

    @property
    def num_scales(self) -> int:
        """Float16 numbers of a block: scale; scale and minimum; or two scales."""
        return 1 if self in (Kind.FOUR_BITS, Kind.EIGHT_BITS) else 2


@dataclass(frozen=True)
class QuantizedMatrix:
    """A packed matrix [num_rows, num_columns].

    Args:
        numbers: uint8 [panels, blocks, groups, 4 or 8, 16, 4]; in four bits, place k of a block shares its byte with
            place k + 16, which has the upper half.
        scales: float16 [panels, blocks, groups, scales of a block, 16].
    """

    kind: Kind
    num_rows: int
    num_columns: int
    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def empty(kind: Kind, num_rows: int, num_columns: int, memory: HugePages) -> QuantizedMatrix:
        """A matrix to be filled with `pack_rows`. num_columns: a multiple of 32."""
        assert num_columns % BLOCK == 0
        panels, blocks, steps = -(-num_rows // _PANEL), num_columns // BLOCK, _STEPS // (2 if kind.is_four_bits else 1)
        numbers = memory.empty((panels, blocks, _NUM_GROUPS, steps, _GROUP, _AT_ONCE), torch.uint8)
        scales = memory.empty((panels, blocks, _NUM_GROUPS, kind.num_scales, _GROUP), torch.float16)
        return QuantizedMatrix(kind, num_rows, num_columns, numbers, scales)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.num_rows, self.num_columns

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return self.numbers.numel() + 2 * self.scales.numel()

    def pack_rows(self, first: int, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        """Fill rows from `first` on, a multiple of 64.

        Args:
            numbers: uint8 [rows, num_columns]; fewer rows than a multiple of 64 only at the matrix's end.
            scales: [rows, blocks, scales of a block], finite in float16.
        """
        rows, panel = numbers.shape[0], first // _PANEL
        panels, blocks = -(-rows // _PANEL), self.num_columns // BLOCK
        missing = panels * _PANEL - rows
        assert first % _PANEL == 0 and (missing == 0 or first + rows == self.num_rows)
        padded = F.pad(numbers, (0, 0, 0, missing)) if missing else numbers
        words = padded.view(torch.int32).view(panels, _NUM_GROUPS, _GROUP, blocks, _STEPS).permute(0, 3, 1, 4, 2)
        if self.kind.is_four_bits:
            words = words[..., : _STEPS // 2, :] | (words[..., _STEPS // 2 :, :] << 4)
        self.numbers[panel : panel + panels].view(torch.int32).squeeze(-1).copy_(words)
        padded = F.pad(scales, (0, 0, 0, 0, 0, missing)) if missing else scales
        padded = padded.view(panels, _NUM_GROUPS, _GROUP, blocks, self.kind.num_scales)
        self.scales[panel : panel + panels].copy_(padded.permute(0, 3, 1, 4, 2))

    def columns(self, runs: Sequence[range], memory: HugePages) -> QuantizedMatrix | None:
        """A copy of these columns, in that memory; None if a block crosses an edge."""
        if any(run.start % BLOCK or len(run) % BLOCK for run in runs):
            return None
        places = torch.tensor([column // BLOCK for run in runs for column in run[::BLOCK]])
        num_columns = sum(map(len, runs))
        return self._selected(1, places, QuantizedMatrix.empty(self.kind, self.num_rows, num_columns, memory))

    def panels(self, runs: Sequence[range], memory: HugePages) -> QuantizedMatrix | None:
        """A copy of these rows, in that memory; None if a panel crosses an edge."""
        if any(run.start % _PANEL or len(run) % _PANEL for run in runs):
            return None
        places = torch.tensor([row // _PANEL for run in runs for row in run[::_PANEL]])
        num_rows = sum(map(len, runs))
        return self._selected(0, places, QuantizedMatrix.empty(self.kind, num_rows, self.num_columns, memory))

    def reorder_rows(self, order: torch.Tensor) -> None:
        """Put the row at order[n] at place n. Args: order: int64 [num_rows], each row once."""
        places = torch.arange(self.numbers.shape[0] * _PANEL)
        places[: self.num_rows] = order
        for packed, by_rows in ((self.numbers, (0, 2, 4, 1, 3, 5)), (self.scales, (0, 2, 4, 1, 3))):
            rows = packed.permute(by_rows)
            rows.copy_(rows.flatten(0, 2)[places].view(rows.shape))

    def _selected(self, dimension: int, places: torch.Tensor, matrix: QuantizedMatrix) -> QuantizedMatrix:
        torch.index_select(self.numbers, dimension, places, out=matrix.numbers)
        torch.index_select(self.scales, dimension, places, out=matrix.scales)
        return matrix

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        """places: int64 [n]. Returns: these rows of the matrix, float32 [n, num_columns]."""
        panel, group, row = places // _PANEL, places % _PANEL // _GROUP, places % _GROUP
        numbers = self.numbers[panel, :, group, :, row].flatten(2)
        scales = self.scales[panel, :, group, :, row].float()
        if self.kind.is_four_bits:
            numbers = torch.cat((numbers & 15, numbers >> 4), dim=-1)
        wide = numbers.float()
        if self.kind == Kind.FOUR_BITS_MINIMUM:
            wide = wide * scales[..., :1] + scales[..., 1:]
        else:
            offset = 8 if self.kind == Kind.FOUR_BITS else 128
            parts = (wide - offset).view(*scales.shape, BLOCK // self.kind.num_scales)
            wide = parts * scales.unsqueeze(-1)
        return wide.view(places.shape[0], self.num_columns)


class _MatrixStruct(ctypes.Structure):
    _fields_ = [("numbers", c_void_p), ("scales", c_void_p), ("num_rows", c_int64), ("kind", c_int64)]


def matrix_structs(matrices: Sequence[QuantizedMatrix]) -> ctypes.Array[_MatrixStruct]:
    """The matrices as C++ reads them; they must outlive what is returned."""
    return (_MatrixStruct * len(matrices))(
        *[_MatrixStruct(m.numbers.data_ptr(), m.scales.data_ptr(), m.num_rows, m.kind) for m in matrices]
    )


class _PlanStruct(ctypes.Structure):
    _fields_ = [("matrices", c_void_p), ("bias", c_void_p), ("num_matrices", c_int64), ("num_columns", c_int64)]


@dataclass(frozen=True)
class QuantizedKernels:
    """One variant's functions, as in SIGNATURES."""

    linear: Callable[..., None]
    gated: Callable[..., None]
    largest: Callable[..., None]
    rows: Callable[..., None]


class QuantizedProduct:
    """x times the rows of some matrices, in one call of a kernel.

    The result of a row of x is the same, bit for bit, whatever other rows there are.

    Args:
        kernels: None computes with torch.
        matrices: with the same number of columns.
        bias: [rows of all matrices] or None.
    """

    def __init__(
        self,
        kernels: QuantizedKernels | None,
        matrices: Sequence[QuantizedMatrix],
        bias: torch.Tensor | None = None,
    ) -> None:
        self.matrices = tuple(matrices)
        self.num_rows = sum(matrix.num_rows for matrix in matrices)
        self.num_columns = matrices[0].num_columns
        assert all(matrix.num_columns == self.num_columns for matrix in matrices) and self.num_columns <= MAX_COLUMNS
        assert bias is None or bias.shape == (self.num_rows,)
        self._kernels = kernels
        self._bias = None if bias is None else bias.float().contiguous()
        self._structs = matrix_structs(matrices)
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._plan = _PlanStruct(ctypes.addressof(self._structs), bias_pointer, len(matrices), self.num_columns)
        self._plan_pointer = ctypes.addressof(self._plan)

    def linear(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the matrices give, side by side.

        Args:
            x: bfloat16 or float32 [rows, num_columns], on the CPU.
            dtype: of the result; float32 if x is.
        Returns: [rows, num_rows].
        """
        rows = self._checked_rows(x)
        if self._kernels is None:
            return self._linear_with_torch(x).to(dtype)
        takes_bf16, gives_bf16 = x.dtype == torch.bfloat16, dtype == torch.bfloat16
        assert takes_bf16 or not gives_bf16
        x = x.contiguous()
        out = result((rows, self.num_rows), dtype)
        self._kernels.linear(
            self._plan_pointer, x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads(), takes_bf16, gives_bf16
        )
        return out

    def gated(self, x: torch.Tensor, is_gelu: bool = False) -> torch.Tensor:
        """silu of what the first matrix gives, times what the second gives; there are two, of the same size.

        Args:
            x: as for `linear`.
            is_gelu: gelu, by its tanh formula, in place of silu.
        Returns: [rows, num_rows / 2], of x's dtype.
        """
        rows, size = self._checked_rows(x), self.num_rows // 2
        assert len(self.matrices) == 2 and self.matrices[0].num_rows == size
        if self._kernels is None:
            gate, up = self._linear_with_torch(x).chunk(2, dim=-1)
            activated = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
            return activated.mul_(up).to(x.dtype)
        x = x.contiguous()
        out = result((rows, size), x.dtype)
        self._kernels.gated(
            self._plan_pointer, x.data_ptr(), rows, out.data_ptr(), torch.get_num_threads(), is_gelu,
            x.dtype == torch.bfloat16,
        )  # fmt: skip
        return out

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Where each row's largest result stands, of equals the first, without writing the others; of one matrix.

        Args: x: as for `linear`. Returns: int64 [rows]; None if there is no kernel for it.
        """
        rows = self._checked_rows(x)
        if self._kernels is None or len(self.matrices) > 1:
            return None
        x = x.contiguous()
        threads = torch.get_num_threads()
        places, values = torch.empty(threads, rows, dtype=torch.int64), torch.empty(threads, rows)
        self._kernels.largest(
            self._plan_pointer, x.data_ptr(), rows, places.data_ptr(), values.data_ptr(), threads,
            x.dtype == torch.bfloat16,
        )  # fmt: skip
        return places[0]

    def rows(self, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of the only matrix, made floating-point.

        Args:
            places: int64 [n], each below the number of rows.
            dtype: bfloat16 or float32.
        Returns: [n, num_columns].
        """
        [matrix] = self.matrices
        assert places.dtype == torch.int64 and places.ndim == 1 and dtype in (torch.bfloat16, torch.float32)
        if self._kernels is None:
            return matrix.rows(places).to(dtype)
        places = places.contiguous()
        out = torch.empty(places.shape[0], self.num_columns, dtype=dtype)
        gives_bf16 = dtype == torch.bfloat16
        self._kernels.rows(self._plan_pointer, places.data_ptr(), places.shape[0], out.data_ptr(), gives_bf16)
        return out

    def _checked_rows(self, x: torch.Tensor) -> int:
        rows, columns = x.shape
        assert columns == self.num_columns and x.is_cpu and x.dtype in (torch.bfloat16, torch.float32)
        return rows

    def _linear_with_torch(self, x: torch.Tensor) -> torch.Tensor:
        """The same rounding of x, but products in float32, of weights made anew each time. Returns: float32."""
        blocks = x.float().reshape(x.shape[0], self.num_columns // BLOCK, BLOCK)
        bounds = blocks.abs().amax(-1, keepdim=True)
        largest = torch.full_like(bounds, 127.0)
        to_numbers = torch.where(bounds > 0, largest / bounds, 0.0)
        rounded = ((blocks * to_numbers).round_() * (bounds / largest)).flatten(1)
        parts = []
        for matrix in self.matrices:
            at_once = max(1, _RUN_ELEMENTS // self.num_columns)
            for first in range(0, matrix.num_rows, at_once):
                places = torch.arange(first, min(first + at_once, matrix.num_rows))
                parts.append(rounded @ matrix.rows(places).T)
        product = torch.cat(parts, dim=1)
        return product if self._bias is None else product + self._bias
