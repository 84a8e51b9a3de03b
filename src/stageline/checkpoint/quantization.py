"""How a checkpoint's matrices are quantised, as its config.json tells. `stageline.weights` makes numbers of them.

One idea: what several stored tensors say together (numbers, scales, zero points) is one tensor to everybody else.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from stageline.checkpoint.fields import Fields
from stageline.errors import CheckpointError


class QuantizationMethod(Enum):
    """What config.json calls `quant_method`."""

    FP8 = "fp8"
    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"
    MXFP4 = "mxfp4"


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint is quantised.

    Args:
        bits: of a stored number.
        block_shape: rows and columns of a matrix that share a scale; None for those that the scales' own shape tells.
        adds_one_to_zeros: GPTQ's first format keeps zero points less one.
        is_reordered: numbers that share a scale do not stand side by side.
    """

    method: QuantizationMethod
    bits: int
    block_shape: tuple[int, int] | None = None
    adds_one_to_zeros: bool = False
    is_reordered: bool = False


def read_quantization(fields: Fields) -> Quantization | None:
    """None if the checkpoint is not quantised. Raises: CheckpointError for what is not supported."""
    values = fields.raw("quantization_config")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise fields.error("quantization_config", "an object or null")
    quantization = Fields(values, f"{fields.source}, quantization_config")
    name = quantization.string("quant_method", default="compressed-tensors" if "config_groups" in values else None)
    methods = {method.value: method for method in QuantizationMethod}
    if name not in methods:
        raise CheckpointError(
            f"{fields.source}: quantization_config of method {name!r} is not supported; supported are "
            f"{', '.join(methods)}, unquantised checkpoints and GGUF files"
        )
    return _READERS[methods[name]](quantization)


def _fp8(fields: Fields) -> Quantization:
    fmt = fields.string("fmt", default="e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"{fields.source}: fmt {fmt!r} is not supported; supported is e4m3")
    return Quantization(method=QuantizationMethod.FP8, bits=8, block_shape=_block_shape(fields, "weight_block_size"))


def _awq(fields: Fields) -> Quantization:
    _check_bits(fields, fields.integer("bits", default=fields.integer("w_bit", default=4)), (4,))
    version = fields.string("version", default="gemm").lower()
    if version != "gemm":
        raise CheckpointError(f"{fields.source}: version {version!r} is not supported; supported is gemm")
    return Quantization(method=QuantizationMethod.AWQ, bits=4)


def _gptq(fields: Fields) -> Quantization:
    bits = _check_bits(fields, fields.integer("bits"), (2, 4, 8))
    form = fields.string("checkpoint_format", default="gptq")
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"{fields.source}: checkpoint_format {form!r} is not supported; supported are gptq and gptq_v2"
        )
    return Quantization(
        method=QuantizationMethod.GPTQ,
        bits=bits,
        adds_one_to_zeros=form == "gptq",
        is_reordered=fields.boolean("desc_act", False),
    )


def _mxfp4(fields: Fields) -> Quantization:
    return Quantization(method=QuantizationMethod.MXFP4, bits=4)


def _compressed_tensors(fields: Fields) -> Quantization:
    groups = fields.raw("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.error("config_groups", "an object with at least one group")
    transforms = fields.raw("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise CheckpointError(
            f"{fields.source}: transform_config rotates what matrices are multiplied with, which is not supported; use "
            "a checkpoint without it"
        )
    kinds, blocks = set(), set()
    for name, group in groups.items():
        values = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(values, dict):
            raise CheckpointError(f"{fields.source}: config_groups.{name} says nothing of weights")
        weights = Fields(values, f"{fields.source}, config_groups.{name}.weights")
        blocks.add(_block_shape(weights, "block_structure"))
        kinds.add((weights.string("type", default="int"), weights.integer("num_bits")))
    supported = {("int", 4), ("int", 8), ("float", 8)}
    if len(blocks) != 1:
        raise CheckpointError(f"{fields.source}: config_groups differ in block_structure; all must have the same")
    if len(kinds) != 1 or not kinds <= supported:
        found = ", ".join(f"{kind} of {bits} bits" for kind, bits in sorted(kinds))
        raise CheckpointError(
            f"{fields.source}: weights are {found}; supported is one of int of 4 bits, int of 8 bits, float of 8 bits"
        )
    [(_, bits)] = kinds
    return Quantization(method=QuantizationMethod.COMPRESSED_TENSORS, bits=bits, block_shape=blocks.pop())


def _block_shape(fields: Fields, key: str) -> tuple[int, int] | None:
    values = fields.raw(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != 2 or any(type(size) is not int or size < 1 for size in values):
        raise fields.error(key, "two positive integers")
    return values[0], values[1]


def _check_bits(fields: Fields, bits: int, supported: tuple[int, ...]) -> int:
    if bits not in supported:
        raise CheckpointError(
            f"{fields.source}: {bits} bits are not supported; supported are {', '.join(map(str, supported))}"
        )
    return bits


_READERS = {
    QuantizationMethod.FP8: _fp8,
    QuantizationMethod.COMPRESSED_TENSORS: _compressed_tensors,
    QuantizationMethod.AWQ: _awq,
    QuantizationMethod.GPTQ: _gptq,
    QuantizationMethod.MXFP4: _mxfp4,
}
