"""Makes floating-point matrices of quantised safetensors: AWQ, GPTQ, FP8, compressed-tensors, MXFP4.

One idea: a format says in which order its numbers lie; then all are (number - zero) * scale, with one scale for a run
of a row, or for a block of the matrix.

Sources: the README of AutoAWQ and its packing order; AutoGPTQ's qlinear; compressed-tensors' pack_quantized; the
DeepSeek-V3 repository on FP8 weights; the OCP Microscaling Formats specification 1.0 for MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stageline.checkpoint.checkpoint import TensorEntry
from stageline.checkpoint.quantization import Quantization, QuantizationMethod
from stageline.errors import CheckpointError

RAW_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in a word the columns lie
DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the numbers that four bits without their sign stand for in MXFP4."""

Parts = Mapping[str, torch.Tensor]


def dequantize(entry: TensorEntry, parts: Parts) -> torch.Tensor:
    """Args: entry: a quantised matrix. parts: its parts, as they are stored.
    Returns: float32, of the entry's shape.
    Raises: CheckpointError if the parts do not fit together.
    """
    quantization = entry.quantization
    assert quantization is not None
    decoders = {
        QuantizationMethod.AWQ: _awq,
        QuantizationMethod.GPTQ: _gptq,
        QuantizationMethod.FP8: _scaled,
        QuantizationMethod.COMPRESSED_TENSORS: _compressed_tensors,
        QuantizationMethod.MXFP4: _mxfp4,
    }
    try:
        matrix = decoders[quantization.method](quantization, parts)
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
        raise CheckpointError(
            f"{entry.file}: the parts of {entry.name} do not fit together: {shapes} ({error})"
        ) from error
    if matrix.shape != entry.shape:
        raise CheckpointError(f"{entry.file}: {entry.name} is {list(matrix.shape)}, expected {list(entry.shape)}")
    return matrix


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words: int32 [rows, n]. Returns: int32 [rows, n * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


def in_awq_order(words: torch.Tensor) -> torch.Tensor:
    """As `unpacked`, of words in which eight numbers of four bits lie in AWQ's order."""
    numbers = unpacked(words, 4)
    return numbers.view(numbers.shape[0], -1, 8)[..., _AWQ_ORDER].flatten(1)


def _awq(quantization: Quantization, parts: Parts) -> torch.Tensor:
    """Words hold eight columns of the transposed matrix; so do zero points."""
    numbers, zeros = (in_awq_order(parts[name]).float() for name in ("numbers", "zeros"))
    scales = parts["scales"].float()
    group = numbers.shape[0] // scales.shape[0]
    grouped = numbers.view(scales.shape[0], group, -1)
    return ((grouped - zeros.unsqueeze(1)) * scales.unsqueeze(1)).flatten(0, 1).T.contiguous()


def _gptq(quantization: Quantization, parts: Parts) -> torch.Tensor:
    """Words hold rows of the transposed matrix, zero points its columns; each row names its group."""
    numbers = unpacked(parts["numbers"].T.contiguous(), quantization.bits).float()
    zeros = unpacked(parts["zeros"], quantization.bits).float() + int(quantization.adds_one_to_zeros)
    scales, in_features = parts["scales"].float(), numbers.shape[1]
    groups = parts.get("groups")
    if groups is None:
        groups = torch.arange(in_features) // -(-in_features // scales.shape[0])
    places = groups.long()
    if int(places.min()) < 0 or int(places.max()) >= scales.shape[0]:
        raise ValueError(f"a group beyond the {scales.shape[0]} there are")
    matrix: torch.Tensor = (numbers - zeros[places].T) * scales[places].T
    return matrix


def _compressed_tensors(quantization: Quantization, parts: Parts) -> torch.Tensor:
    """Words hold columns of a row, with an offset that makes them positive; zero points are packed along the rows."""
    numbers = parts["numbers"]
    if numbers.dtype != torch.int32:
        return _scaled(quantization, parts)
    wide = unpacked(numbers, quantization.bits) - 2 ** (quantization.bits - 1)
    zeros = parts.get("zeros")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpacked(zeros.T.contiguous(), quantization.bits).T[: wide.shape[0]] - 2 ** (quantization.bits - 1)
    if (groups := parts.get("groups")) is not None and int(groups.min()) >= 0:
        places = groups.long()
        numbers = wide if zeros is None else wide - zeros[:, places]
        matrix: torch.Tensor = numbers.float() * parts["scales"].float()[:, places]
        return matrix
    others = {"scales": parts["scales"]} | ({} if zeros is None else {"zeros": zeros})
    return _scaled(quantization, {"numbers": wide, **others})


def _scaled(quantization: Quantization, parts: Parts) -> torch.Tensor:
    """Numbers as they are, with scales (and zero points) of the matrix, its rows, runs of these, or blocks."""
    numbers = parts["numbers"].float()
    if (zeros := parts.get("zeros")) is not None:
        numbers = numbers - _spread(zeros, numbers.shape, quantization.block_shape)
    return numbers * _spread(parts["scales"], numbers.shape, quantization.block_shape)


def _spread(scales: torch.Tensor, shape: torch.Size, block_shape: tuple[int, int] | None) -> torch.Tensor:
    """One scale for every number of the matrix."""
    wide = scales.float()
    if wide.numel() == 1:
        return wide.view(1, 1)
    if wide.ndim == 1:
        wide = wide.unsqueeze(1)
    rows, columns = shape
    if wide.shape[0] == rows:
        block_rows, block_columns = 1, -(-columns // wide.shape[1])
    else:
        block_rows, block_columns = block_shape or (-(-rows // wide.shape[0]), -(-columns // wide.shape[1]))
    if (-(-rows // block_rows), -(-columns // block_columns)) != tuple(wide.shape):
        raise ValueError(f"blocks of {block_rows} x {block_columns}")
    wide = wide.repeat_interleave(block_rows, 0) if block_rows > 1 else wide
    wide = wide.repeat_interleave(block_columns, 1) if block_columns > 1 else wide
    return wide[:rows, :columns]


def _mxfp4(quantization: Quantization, parts: Parts) -> torch.Tensor:
    """Two numbers in a byte, the first in its lower half; a power of two for each 32.

    parts: numbers [experts, out_features, blocks, 16], scales [experts, out_features, blocks].
    Returns: [experts, in_features, out_features].
    """
    table = torch.tensor([value / 2 for value in (*DOUBLED_FP4, *(-value for value in DOUBLED_FP4))])
    numbers, exponents = parts["numbers"], parts["scales"].int() - 127
    pairs = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2).long()
    blocks: torch.Tensor = torch.ldexp(table[pairs], exponents.unsqueeze(-1))
    return blocks.flatten(-2).transpose(-1, -2)
