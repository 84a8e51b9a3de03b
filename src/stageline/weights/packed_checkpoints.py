"""Matrices of quantised safetensors packed for integer dot products as they are, where their scales allow it.

One idea: numbers of four bits with a zero point are the kernel's numbers with a minimum, and numbers around the middle
of their range are its numbers with an offset, so nothing is rounded again but the scales, to half precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stageline.checkpoint.checkpoint import TensorEntry
from stageline.checkpoint.quantization import QuantizationMethod
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import BLOCK, Kind, QuantizedMatrix
from stageline.weights.quantized_checkpoints import DOUBLED_FP4, in_awq_order, unpacked

# A multiple of a panel's 64 rows, whose unpacked numbers are a few MiB.
_ROWS_AT_ONCE = 1024
# Half precision keeps eleven bits; a scale that keeps fewer is too small or too large for it.
_MOST_ERROR = 2.0**-11


@dataclass(frozen=True)
class _Unpacked:
    """numbers: uint8 [rows, columns]; scales, zeros: float32 [rows, runs]; zeros None: around the middle."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


def pack_parts(entry: TensorEntry, parts: Mapping[str, torch.Tensor], memory: HugePages) -> QuantizedMatrix | None:
    """Args:
        entry: a matrix that can stay quantised (`stage_tensors.can_stay_quantized`).
        parts: as they are stored.
        memory: where the matrix will lie.
    Returns: None if half precision cannot hold its scales, or numbers that share a scale stand apart.
    """
    rows, columns = entry.shape
    found = _unpack(entry, parts)
    if found is None or found.numbers.shape != (rows, columns):
        return None
    blocks_per_run = columns // BLOCK // found.scales.shape[1]
    if found.zeros is not None:
        kind, values = Kind.FOUR_BITS_MINIMUM, torch.stack((found.scales, -found.zeros * found.scales), dim=-1)
    else:
        is_bytes = parts["numbers"].dtype == torch.int8
        kind, values = Kind.EIGHT_BITS if is_bytes else Kind.FOUR_BITS, found.scales.unsqueeze(-1)
    halves = values.half()
    if not ((halves.float() - values).abs() <= _MOST_ERROR * values.abs()).all():
        return None
    halves = halves.repeat_interleave(blocks_per_run, dim=1)
    matrix = QuantizedMatrix.empty(kind, rows, columns, memory)
    for first in range(0, rows, _ROWS_AT_ONCE):
        end = first + _ROWS_AT_ONCE
        matrix.pack_rows(first, found.numbers[first:end].contiguous(), halves[first:end])
    return matrix


def pack_blocks(numbers: torch.Tensor, exponents: torch.Tensor, memory: HugePages) -> QuantizedMatrix | None:
    """MXFP4's numbers are halves, so twice each is an integer that fits into a byte.

    Args: numbers: uint8 [rows, blocks, 16]. exponents: uint8 [rows, blocks].
    Returns: [rows, 32 * blocks]; None if half precision cannot hold its scales.
    """
    table = torch.tensor([128 + value for value in (*DOUBLED_FP4, *(-value for value in DOUBLED_FP4))])
    pairs = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1).long()
    scales = torch.exp2(exponents.float() - 128)
    halves = scales.half()
    if not torch.equal(halves.float(), scales):
        return None
    matrix = QuantizedMatrix.empty(Kind.EIGHT_BITS, pairs.shape[0], pairs.shape[1], memory)
    matrix.pack_rows(0, table[pairs].to(torch.uint8), halves.unsqueeze(-1))
    return matrix


def _unpack(entry: TensorEntry, parts: Mapping[str, torch.Tensor]) -> _Unpacked | None:
    quantization = entry.quantization
    assert quantization is not None
    bits, scales = quantization.bits, parts["scales"].float()
    if quantization.method == QuantizationMethod.AWQ:
        numbers, zeros = in_awq_order(parts["numbers"]), in_awq_order(parts["zeros"])
        return _Unpacked(numbers.T.to(torch.uint8), scales.T, zeros.T.float())
    if quantization.method == QuantizationMethod.GPTQ:
        if "groups" in parts and not _stand_side_by_side(parts["groups"], scales.shape[0]):
            return None
        numbers = unpacked(parts["numbers"].T.contiguous(), bits)
        zeros = unpacked(parts["zeros"], bits) + int(quantization.adds_one_to_zeros)
        return _Unpacked(numbers.to(torch.uint8), scales.T, zeros.T.float())
    if parts["numbers"].dtype == torch.int8:
        return _Unpacked(parts["numbers"].view(torch.uint8) ^ 128, scales, None)
    numbers = unpacked(parts["numbers"], bits)
    stored = parts.get("zeros")
    if stored is not None and stored.dtype == torch.int32:
        stored = unpacked(stored.T.contiguous(), bits).T[: numbers.shape[0]]
    elif stored is not None:
        stored = stored.int() + 2 ** (bits - 1)
    return _Unpacked(numbers.to(torch.uint8), scales, None if stored is None else stored.float())


def _stand_side_by_side(groups: torch.Tensor, num_groups: int) -> bool:
    return torch.equal(groups.long(), torch.arange(groups.numel()) // (groups.numel() // num_groups))
