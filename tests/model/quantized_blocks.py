"""Random blocks of GGML's types with weights of a wanted size, and the kernels' variants that this machine can run."""

from __future__ import annotations

import gguf
import numpy as np

from stageline.checkpoint.encodings import ENCODINGS
from stageline.errors import ConfigError
from stageline.kernels import load_kernels
from stageline.kernels.build import variant_flags
from stageline.kernels.quantized import QuantizedKernels

# Each half-precision number of a block: its column, and its share of the first one. Minima centre the weights.
_HALVES = {
    "Q8_0": {0: 1.0},
    "Q4_0": {0: 1.0},
    "Q4_1": {0: 1.0, 2: -7.5},
    "Q5_0": {0: 1.0},
    "Q5_1": {0: 1.0, 2: -15.5},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q6_K": {208: 1.0},
    "MXFP4": {},
}


def random_blocks(name: str, rows: int, columns: int, deviation: float, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any numbers, and scales that differ from block to block by a factor of up to 4.

    Args: deviation: the weights' standard deviation, about.
    """
    rng = np.random.default_rng(seed)
    encoding = ENCODINGS[name]
    blocks = rng.integers(0, 256, (rows * columns // encoding.block_elements, encoding.block_bytes), dtype=np.uint8)
    scales = rng.uniform(0.5, 2.0, (len(blocks), 1))
    _set_halves(name, blocks, scales)
    if name == "MXFP4":  # a byte stands for a power of two
        blocks[:, 0] = np.round(127 + np.log2(deviation / 3 * scales[:, 0]))
        return blocks.reshape(rows, -1)
    scales *= deviation / dequantized(name, blocks).std()
    _set_halves(name, blocks, scales)
    return blocks.reshape(rows, -1)


def dequantized(name: str, blocks: np.ndarray) -> np.ndarray:
    """float32, as the `gguf` package has it."""
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])


def _set_halves(name: str, blocks: np.ndarray, scales: np.ndarray) -> None:
    for column, share in _HALVES[name].items():
        blocks[:, column : column + 2] = (scales * share).astype(np.float16).view(np.uint8)


def runnable_kernels() -> dict[str, QuantizedKernels | None]:
    """By variant; None stands for torch."""
    found: dict[str, QuantizedKernels | None] = {"torch": None}
    for variant in variant_flags():
        try:
            kernels = load_kernels(variant)
        except ConfigError:  # this machine lacks the instructions
            continue
        assert kernels is not None, "the kernels did not compile; the log says why"
        found[variant] = kernels.quantized
    return found
