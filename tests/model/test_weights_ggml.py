"""Every GGML block type is decoded bit for bit as the `gguf` package decodes it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from stageline.checkpoint.encodings import DTYPE_OF_ENCODING, ENCODINGS, GGML_TYPE_NAMES
from stageline.weights.ggml_types import BLOCK_DECODERS, FLOAT_DTYPES, decode

NUM_BLOCKS = 257
# Where each block keeps its half-precision numbers; everything else may be any byte.
HALF_COLUMNS = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
    "Q6_K": (208,), "MXFP4": (), "F32": (), "F16": (0,), "BF16": (),
}  # fmt: skip


def random_blocks(name: str) -> np.ndarray:
    rng = np.random.default_rng(len(name) + ord(name[1]))
    encoding = ENCODINGS[name]
    if name == "F32":
        return rng.standard_normal((NUM_BLOCKS, 1), dtype=np.float32).view(np.uint8)
    if name == "BF16":
        upper_halves = rng.standard_normal((NUM_BLOCKS, 1), dtype=np.float32).view(np.uint16)[:, 1:]
        return upper_halves.copy().view(np.uint8)
    blocks = rng.integers(0, 256, (NUM_BLOCKS, encoding.block_bytes), dtype=np.uint8)
    if name == "MXFP4":  # larger exponents overflow
        blocks[:, 0] = np.minimum(blocks[:, 0], 250)
    for column in HALF_COLUMNS[name]:
        magnitudes = 10.0 ** rng.integers(-7, 3, (NUM_BLOCKS, 1))
        scales = rng.standard_normal((NUM_BLOCKS, 1)) * magnitudes
        blocks[:, column : column + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", list(ENCODINGS))
def test_decoding_equals_the_gguf_package_bit_for_bit(name: str) -> None:
    blocks = random_blocks(name)
    expected = gguf.dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType[name]).reshape(-1)
    found = decode(torch.from_numpy(blocks.reshape(-1)), name, ENCODINGS[name].block_bytes).float().numpy()
    assert np.array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_the_table_of_types_agrees_with_the_gguf_package() -> None:
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType} == GGML_TYPE_NAMES
    for name, encoding in ENCODINGS.items():
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        assert (encoding.block_elements, encoding.block_bytes) == block


def test_every_encoding_has_a_decoder() -> None:
    assert set(ENCODINGS) == set(BLOCK_DECODERS) | set(FLOAT_DTYPES)
    assert set(DTYPE_OF_ENCODING) == set(FLOAT_DTYPES)
