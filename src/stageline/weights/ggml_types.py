"""GGML's block types decoded to float32, bit for bit as ggml and the `gguf` package do.

One idea: a run of blocks is a matrix of bytes [blocks, block_bytes]; its columns are the fields of the C struct, and
all blocks are decoded at once. Source: ggml-common.h (struct layouts) and ggml-quants.c (dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def half_at(blocks: torch.Tensor, column: int) -> torch.Tensor:
    """Two bytes of every block as a float16 in float32: [blocks, 1]."""
    return blocks[:, column : column + 2].contiguous().view(torch.float16).float()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes -> [..., 2, n]: all low halves, then all high halves."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-2)


def _fifth_bits(blocks: torch.Tensor, column: int) -> torch.Tensor:
    """Four bytes of 32 little-endian bits -> [blocks, 32] of 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, column : column + 4].unsqueeze(-1) >> shifts) & 1
    return bits.flatten(1) << 4


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """half d; int8 qs[32]."""
    return blocks[:, 2:].view(torch.int8).float() * half_at(blocks, 0)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """half d; nibbles qs[32], offset 8."""
    return half_at(blocks, 0) * (nibbles(blocks[:, 2:]).flatten(1).float() - 8)


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """half d, m; nibbles qs[32]."""
    return half_at(blocks, 0) * nibbles(blocks[:, 4:]).flatten(1).float() + half_at(blocks, 2)


def q5_0_numbers(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 32]: Q5_0's numbers, 0 to 31."""
    return nibbles(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks, 2)


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """half d; bits qh[32]; nibbles qs[32], offset 16."""
    return half_at(blocks, 0) * (q5_0_numbers(blocks).float() - 16)


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """half d, m; bits qh[32]; nibbles qs[32]."""
    quants = nibbles(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks, 4)
    return half_at(blocks, 0) * quants.float() + half_at(blocks, 2)


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """half d, dmin; twelve bytes of 6-bit scales and minima. Returns: d·scale and dmin·min, each [blocks, 8, 1]."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)), dim=1)
    minima = torch.cat((middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)), dim=1)
    return (half_at(blocks, 0) * scales.float()).unsqueeze(-1), (half_at(blocks, 2) * minima.float()).unsqueeze(-1)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """half d, dmin; scales[12]; nibbles qs[256] in four runs of 32 bytes."""
    scales, minima = k_scales(blocks)
    quants = nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2).float()
    return (scales * quants - minima).flatten(1)


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """half d, dmin; scales[12]; qh[32], bit i belongs to run i; nibbles qs[256]."""
    scales, minima = k_scales(blocks)
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    high = (blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).unsqueeze(-1)) & 1
    return (scales * (low | (high << 4)).float() - minima).flatten(1)


def q6_k_numbers(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 8, 32]: Q6_K's numbers, 0 to 63."""
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8)
    return low | ((pairs & 3).reshape(-1, 8, 32) << 4)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """nibbles ql[256]; bit pairs qh[256]; int8 scales[16]; half d. Offset 32."""
    quants = q6_k_numbers(blocks).reshape(-1, 16, 16).float() - 32
    scales = half_at(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scales.unsqueeze(-1) * quants).flatten(1)


# Twice the numbers that four bits stand for, and half the power of two that a byte stands for.
_DOUBLED_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32)
HALVED_POWERS = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)], dtype=torch.float32)


def mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """exponent e; nibbles qs[32], each a sign, two bits of exponent and one of mantissa."""
    numbers = _DOUBLED_FP4[nibbles(blocks[:, 1:]).flatten(1).long()]
    return HALVED_POWERS[blocks[:, :1].long()] * numbers


# Each takes uint8 [blocks, block_bytes] and gives float32 [blocks, block_elements].
BLOCK_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "MXFP4": mxfp4,
}
FLOAT_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode(data: torch.Tensor, encoding: str, block_bytes: int) -> torch.Tensor:
    """Args: data: uint8 [bytes], a whole number of blocks of `encoding`.
    Returns: [elements], float32 for block types, the stored dtype for plain floats.
    """
    if encoding in FLOAT_DTYPES:
        return data.view(FLOAT_DTYPES[encoding])
    return BLOCK_DECODERS[encoding](data.view(-1, block_bytes)).flatten()
