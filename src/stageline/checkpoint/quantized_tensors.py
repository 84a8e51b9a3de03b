"""Joins the stored tensors of a quantised matrix into one entry, under the name and shape that the model asks for.

One idea: joining goes by the names that are there, so a checkpoint may quantise some matrices and leave others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from stageline.checkpoint.checkpoint import TensorEntry
from stageline.checkpoint.encodings import PACKED_BLOCK_BYTES, PACKED_BLOCK_ELEMENTS
from stageline.checkpoint.quantization import Quantization, QuantizationMethod
from stageline.errors import CheckpointError

INT32_BITS = 32
FOUR_BITS = 4
MXFP4_BLOCK = 32
# Scales of activations and of the KV cache, which are not quantised here.
_UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".input_zero_point", ".weight_shape")

Tensors = dict[str, TensorEntry]
Parts = dict[str, TensorEntry]


def join_quantized(tensors: Mapping[str, TensorEntry], quantization: Quantization) -> Tensors:
    """Args: tensors: every stored tensor by its name.
    Returns: every tensor by the name the model has for it; a quantised one has `parts`.
    Raises: CheckpointError if a part is missing.
    """
    suffixes, shape_of = _FORMATS[quantization.method]
    joined: Tensors = {}
    used: set[str] = set()
    for name, entry in tensors.items():
        main = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
        if main is None:
            continue
        base = name.removesuffix(main)
        parts = {"numbers": entry} | _other_parts(tensors, base, quantization.method)
        if "scales" not in parts:
            if entry.encoding in ("BF16", "F16", "F32"):
                continue  # left as it was
            raise CheckpointError(f"{entry.file}: tensor {name} is quantised, but there are no scales for it")
        _check_parts(parts, quantization)
        logical = base + ("" if quantization.method == QuantizationMethod.MXFP4 else ".weight")
        joined[logical] = replace(
            entry,
            name=logical,
            stored_name=name,
            num_bytes=sum(part.num_bytes for part in parts.values()),
            shape=shape_of(entry, quantization.bits),
            encoding=f"{quantization.method.value} of {quantization.bits} bits",
            parts=parts,
            quantization=quantization,
        )
        used.update(part.name for part in parts.values())
    kept = {name: entry for name, entry in tensors.items() if name not in used and not name.endswith(_UNUSED)}
    return {**kept, **joined}


# Types of the numbers, and of what comes with them.
_NUMBERS: dict[QuantizationMethod, tuple[str, ...]] = {
    QuantizationMethod.FP8: ("F8_E4M3",),
    QuantizationMethod.COMPRESSED_TENSORS: ("I32", "I8", "F8_E4M3"),
    QuantizationMethod.AWQ: ("I32",),
    QuantizationMethod.GPTQ: ("I32",),
    QuantizationMethod.MXFP4: ("U8",),
}
_OTHERS = ("F32", "F16", "BF16", "F8_E8M0", "I32", "I64", "I8", "U8")
_OTHER_SUFFIXES: dict[QuantizationMethod, dict[str, tuple[str, ...]]] = {
    QuantizationMethod.FP8: {"scales": (".weight_scale_inv", ".weight_scale")},
    QuantizationMethod.COMPRESSED_TENSORS: {
        "scales": (".weight_scale",),
        "zeros": (".weight_zero_point",),
        "groups": (".weight_g_idx",),
    },
    QuantizationMethod.AWQ: {"scales": (".scales",), "zeros": (".qzeros",)},
    QuantizationMethod.GPTQ: {"scales": (".scales",), "zeros": (".qzeros",), "groups": (".g_idx",)},
    QuantizationMethod.MXFP4: {"scales": ("_scales",)},
}


def _other_parts(tensors: Mapping[str, TensorEntry], base: str, method: QuantizationMethod) -> Parts:
    found = {}
    for part, suffixes in _OTHER_SUFFIXES[method].items():
        for suffix in suffixes:
            if base + suffix in tensors:
                found[part] = tensors[base + suffix]
    return found


def packed_block_bytes(entry: TensorEntry) -> int | None:
    """Bytes in memory of 32 numbers of a quantised matrix that integer products work on as it is.

    Returns: None if they cannot: scales must be of runs of a row that are a multiple of 32 long.
    """
    quantization, columns = entry.quantization, entry.shape[-1]
    if quantization is None or quantization.is_reordered or entry.rope_permuted_heads:
        return None
    scales, numbers = entry.parts["scales"].shape, entry.parts["numbers"]
    if quantization.method == QuantizationMethod.MXFP4:
        return PACKED_BLOCK_BYTES["Q8_0"]
    is_compressed = quantization.method == QuantizationMethod.COMPRESSED_TENSORS
    if quantization.method in (QuantizationMethod.AWQ, QuantizationMethod.GPTQ):
        num_runs = scales[0] if quantization.bits == FOUR_BITS else 0
    elif is_compressed and len(scales) == 2 and "groups" not in entry.parts:
        is_known = numbers.encoding == "I8" or (numbers.encoding == "I32" and quantization.bits == FOUR_BITS)
        num_runs = scales[1] if is_known and scales[0] == entry.shape[0] else 0
    else:
        num_runs = 0
    if num_runs < 1 or columns % (num_runs * PACKED_BLOCK_ELEMENTS):
        return None
    if numbers.encoding == "I8":
        return None if "zeros" in entry.parts else PACKED_BLOCK_BYTES["Q8_0"]
    return PACKED_BLOCK_BYTES["Q4_1" if "zeros" in entry.parts else "Q4_0"]


def _check_parts(parts: Parts, quantization: Quantization) -> None:
    for part, entry in parts.items():
        supported = _NUMBERS[quantization.method] if part == "numbers" else _OTHERS
        if entry.encoding not in supported:
            raise CheckpointError(
                f"{entry.file}: tensor {entry.name} is of type {entry.encoding}, which is not supported for "
                f"{quantization.method.value}; supported are {', '.join(supported)}"
            )


def _as_stored(entry: TensorEntry, bits: int) -> tuple[int, ...]:
    return entry.shape


def _packed_along_columns(entry: TensorEntry, bits: int) -> tuple[int, ...]:
    """compressed-tensors packs a matrix's rows into words, or keeps bytes."""
    if entry.encoding != "I32":
        return entry.shape
    rows, words = _matrix(entry)
    return rows, words * (INT32_BITS // bits)


def _awq_shape(entry: TensorEntry, bits: int) -> tuple[int, ...]:
    in_features, words = _matrix(entry)
    return words * (INT32_BITS // bits), in_features


def _gptq_shape(entry: TensorEntry, bits: int) -> tuple[int, ...]:
    words, out_features = _matrix(entry)
    return out_features, words * (INT32_BITS // bits)


def _mxfp4_shape(entry: TensorEntry, bits: int) -> tuple[int, ...]:
    """Stored are [experts, out_features, blocks, 16 bytes]; the model has [experts, in_features, out_features]."""
    if len(entry.shape) != 4:
        raise CheckpointError(f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}; four are expected")
    experts, out_features, blocks, _ = entry.shape
    return experts, blocks * MXFP4_BLOCK, out_features


def _matrix(entry: TensorEntry) -> tuple[int, int]:
    if len(entry.shape) != 2:
        raise CheckpointError(f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}; it must be a matrix")
    return entry.shape[0], entry.shape[1]


_Shape = Callable[[TensorEntry, int], tuple[int, ...]]
# Suffixes of the tensors that hold the numbers, and the shape of the matrix they are.
_FORMATS: dict[QuantizationMethod, tuple[tuple[str, ...], _Shape]] = {
    QuantizationMethod.FP8: ((".weight",), _as_stored),
    QuantizationMethod.COMPRESSED_TENSORS: ((".weight_packed", ".weight"), _packed_along_columns),
    QuantizationMethod.AWQ: ((".qweight",), _awq_shape),
    QuantizationMethod.GPTQ: ((".qweight",), _gptq_shape),
    QuantizationMethod.MXFP4: (("_blocks",), _mxfp4_shape),
}
