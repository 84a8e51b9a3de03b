"""Reads one rank's part of a checkpoint: a family asks for the shapes of a smaller model, and gets the right parts.

One idea: a part of a tensor is an entry like any other, with another place and shape, so that only its bytes are read.
Where blocks of quantised numbers cross its edges, the whole tensor is read and cut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace

from stageline.checkpoint.checkpoint import TensorEntry
from stageline.checkpoint.encodings import ENCODINGS
from stageline.checkpoint.tensor_shards import Cut, RankCuts
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import QuantizedMatrix
from stageline.weights.reader import CheckpointReader, part_of


class ShardedReader:
    """A `WeightReader` of one rank; shapes that it is asked for are of the rank's part.

    Args:
        whole: of the checkpoint.
    """

    def __init__(self, whole: CheckpointReader, cuts: RankCuts) -> None:
        self._whole = whole
        self._cuts = cuts

    @property
    def dtype(self) -> torch.dtype:
        return self._whole.dtype

    @property
    def device(self) -> torch.device:
        return self._whole.device

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._read(name, shape, self.dtype)

    def read_float32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._read(name, shape, torch.float32)

    def read_part(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        cut = self._cuts.cut_of(name)
        if cut is None:
            return self._whole.read_part(name, shape, index)
        entry = part_of(self._whole.entry(name, (shape[0], *_whole_shape(shape[1:], cut))), index)
        return self._read_cut(entry, cut, self.dtype)

    def read_transposed_part(
        self, name: str, shape: tuple[int, int, int], index: int, runs: Sequence[slice]
    ) -> list[torch.Tensor] | list[QuantizedMatrix]:
        cut = self._cuts.cut_of(name)
        if cut is None:
            return self._whole.read_transposed_part(name, shape, index, runs)
        own, (num_in, num_out) = cut.runs[0], _whole_shape(shape[1:], cut)
        whole_shape = (shape[0], num_in, num_out)
        if cut.dimension == 1:  # of the transposed matrix, rows
            shifted = [slice(own.start + (rows.start or 0), own.stop, rows.step) for rows in runs]
            return self._whole.read_transposed_part(name, whole_shape, index, shifted)
        matrices = self._whole.read_transposed_part(name, whole_shape, index, runs, memory=HugePages())
        columns = Cut(1, cut.runs, cut.full_size)
        return [self._cut_matrix(matrix, columns) for matrix in matrices]  # type: ignore[return-value]

    def read_matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor | QuantizedMatrix:
        cut = self._cuts.cut_of(name)
        if cut is None:
            return self._whole.read_matrix(name, shape)
        entry = self._whole.entry(name, _whole_shape(shape, cut))
        if len(cut.runs) == 1 and (part := part_of_rows_or_columns(entry, cut.dimension, cut.runs[0])) is not None:
            return self._whole.read_matrix_entry(part)
        # The whole matrix lies in memory of its own, which is free again behind this call.
        return self._cut_matrix(self._whole.read_matrix_entry(entry, HugePages()), cut)

    def _cut_matrix(self, matrix: torch.Tensor | QuantizedMatrix, cut: Cut) -> torch.Tensor | QuantizedMatrix:
        """A packed matrix that cannot be cut as it is packed becomes floating-point."""
        if isinstance(matrix, torch.Tensor):
            return _cut_tensor(matrix, cut)
        cut_packed = matrix.columns if cut.dimension == 1 else matrix.panels
        if (part := cut_packed(cut.runs, self._whole.packed_memory)) is not None:
            return part
        return _cut_tensor(matrix.rows(torch.arange(matrix.num_rows)).to(self.dtype), cut)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._cuts.is_of_another(name):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        cut = self._cuts.cut_of(name)
        if cut is None:
            entry = self._whole.entry(name, shape)
            return self._whole.read_entry(entry, dtype)
        return self._read_cut(self._whole.entry(name, _whole_shape(shape, cut)), cut, dtype)

    def _read_cut(self, entry: TensorEntry, cut: Cut, dtype: torch.dtype) -> torch.Tensor:
        parts = [part_of_rows_or_columns(entry, cut.dimension, run) for run in cut.runs]
        if any(part is None for part in parts):
            return _cut_tensor(self._whole.read_entry(entry, dtype), cut)
        read = [self._whole.read_entry(part, dtype) for part in parts if part is not None]
        return read[0] if len(read) == 1 else torch.cat(read, cut.dimension)


def _whole_shape(shape: Sequence[int], cut: Cut) -> tuple[int, ...]:
    """Of the tensor whose part has this shape."""
    assert shape[cut.dimension] == cut.size, f"a part of {list(shape)} is not {cut}"
    return (*shape[: cut.dimension], cut.full_size, *shape[cut.dimension + 1 :])


def part_of_rows_or_columns(entry: TensorEntry, dimension: int, run: range) -> TensorEntry | None:
    """The entry of some rows (dimension 0) or columns of a tensor; None if its bytes cannot be told apart so."""
    if entry.parts or entry.encoding not in ENCODINGS:
        return None
    encoding, num_rows = ENCODINGS[entry.encoding], entry.shape[0]
    row_bytes = entry.num_bytes // num_rows
    if dimension == 0:
        heads = entry.rope_permuted_heads * len(run)
        if entry.num_elements // num_rows % encoding.block_elements or heads % num_rows:
            return None
        return replace(
            entry,
            offset_bytes=entry.offset_bytes + run.start * row_bytes,
            num_bytes=len(run) * row_bytes,
            shape=(len(run), *entry.shape[1:]),
            rope_permuted_heads=heads // num_rows,
        )
    if run.start % encoding.block_elements or len(run) % encoding.block_elements or len(entry.shape) != 2:
        return None
    return replace(
        entry,
        offset_bytes=entry.offset_bytes + encoding.num_bytes(run.start),
        num_bytes=num_rows * encoding.num_bytes(len(run)),
        shape=(num_rows, len(run)),
        run_bytes=encoding.num_bytes(len(run)),
        stride_bytes=row_bytes,
    )


def _cut_tensor(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    parts = [tensor.narrow(cut.dimension, run.start, len(run)) for run in cut.runs]
    return torch.cat(parts, cut.dimension).contiguous()
