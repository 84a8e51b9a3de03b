"""GGML's blocks packed for integer dot products as they are: their numbers are kept, only their order changes.

One idea: each type says which of the kernel's four kinds it is and gives its numbers and scales; packing is one loop
for all. Source: ggml-common.h (struct layouts); the decoders beside this file say the same as weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stageline.checkpoint.encodings import ENCODINGS
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import BLOCK, Kind, QuantizedMatrix
from stageline.weights.ggml_types import HALVED_POWERS, half_at, k_scales, nibbles, q5_0_numbers, q6_k_numbers

# Rows are packed by this many, so that the unpacked numbers stay in the cache; a multiple of a panel's 64 rows.
_ROWS_AT_ONCE = 128


@dataclass(frozen=True)
class PackedEncoding:
    """How a type's blocks become numbers and scales.

    Args:
        unpack: uint8 [blocks, block_bytes] -> (uint8 [blocks, block_elements], float32 [blocks, scales of them all]).
    """

    kind: Kind
    unpack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nibbles(blocks[:, 2:]).flatten(1), half_at(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nibbles(blocks[:, 4:]).flatten(1), torch.cat((half_at(blocks, 0), half_at(blocks, 2)), dim=1)


def _q5_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q5_0_numbers(blocks) + (128 - 16), half_at(blocks, 0)


def _q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return blocks[:, 2:] ^ 128, half_at(blocks, 0)


def _q4_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales, minima = k_scales(blocks)
    return nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1), torch.cat((scales, -minima), dim=2).flatten(1)


def _q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = half_at(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return q6_k_numbers(blocks).flatten(1) + (128 - 32), scales


# From the four bits of an MXFP4 number to twice what it stands for, around 128.
_FP4_BYTES = torch.tensor(
    [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116], dtype=torch.uint8
)


def _mxfp4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A power of two that half precision lacks counts as infinite, but for blocks of zeros."""
    numbers = nibbles(blocks[:, 1:]).flatten(1)
    scales = HALVED_POWERS[blocks[:, :1].long()]
    scales = scales.where(scales.half().float() == scales, torch.inf)
    scales = scales.where((numbers & 7 != 0).any(dim=1, keepdim=True), 0.0)
    return _FP4_BYTES[numbers.long()], scales


PACKED_ENCODINGS: dict[str, PackedEncoding] = {
    "Q4_0": PackedEncoding(Kind.FOUR_BITS, _q4_0),
    "Q4_1": PackedEncoding(Kind.FOUR_BITS_MINIMUM, _q4_1),
    "Q4_K": PackedEncoding(Kind.FOUR_BITS_MINIMUM, _q4_k),
    "Q5_0": PackedEncoding(Kind.EIGHT_BITS, _q5_0),
    "Q8_0": PackedEncoding(Kind.EIGHT_BITS, _q8_0),
    "Q6_K": PackedEncoding(Kind.EIGHT_BITS_HALVES, _q6_k),
    "MXFP4": PackedEncoding(Kind.EIGHT_BITS, _mxfp4),
}


def pack_matrix(data: torch.Tensor, encoding: str, memory: HugePages) -> QuantizedMatrix | None:
    """Args: data: uint8 [rows, bytes of a row]. encoding: one of PACKED_ENCODINGS. memory: where the matrix will lie.
    Returns: the matrix; None if float16 cannot hold a scale, as a product of two numbers may be too large.
    """
    packed, stored = PACKED_ENCODINGS[encoding], ENCODINGS[encoding]
    num_rows, row_bytes = data.shape
    num_columns = row_bytes // stored.block_bytes * stored.block_elements
    matrix = QuantizedMatrix.empty(packed.kind, num_rows, num_columns, memory)
    for first in range(0, num_rows, _ROWS_AT_ONCE):
        rows = data[first : first + _ROWS_AT_ONCE]
        numbers, scales = packed.unpack(rows.reshape(-1, stored.block_bytes))
        halves = scales.half()
        if not halves.isfinite().all():
            return None
        shape = (rows.shape[0], num_columns // BLOCK, packed.kind.num_scales)
        matrix.pack_rows(first, numbers.view(rows.shape[0], num_columns), halves.view(shape))
    return matrix
