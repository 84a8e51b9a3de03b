"""How numbers are stored in a checkpoint: plain floats, or GGML's blocks. Sizes only; `stageline.weights` decodes them.

One idea: every encoding is blocks of so many elements in so many bytes. A plain float is a block of one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Encoding:
    """`block_elements` numbers are stored in `block_bytes` bytes."""

    name: str
    block_elements: int
    block_bytes: int

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of a tensor whose size is a whole number of blocks."""
        return num_elements // self.block_elements * self.block_bytes


ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Encoding("F32", 1, 4),
        Encoding("F16", 1, 2),
        Encoding("BF16", 1, 2),
        Encoding("Q8_0", 32, 34),
        Encoding("Q4_0", 32, 18),
        Encoding("Q4_1", 32, 20),
        Encoding("Q5_0", 32, 22),
        Encoding("Q5_1", 32, 24),
        Encoding("Q4_K", 256, 144),
        Encoding("Q5_K", 256, 176),
        Encoding("Q6_K", 256, 210),
        Encoding("MXFP4", 32, 17),
    )
}

# GGML's types whose blocks integer products can work on, and the bytes of 32 numbers as they are packed for it in
# memory: 4 or 8 bits a number, and one or two half-precision numbers. Q5_0's five bits, Q6_K's six and MXFP4's
# floating-point numbers take eight.
PACKED_BLOCK_ELEMENTS = 32
PACKED_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q4_K": 20, "Q5_0": 34, "Q6_K": 36, "Q8_0": 34, "MXFP4": 34}

DTYPE_OF_ENCODING = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# Source: enum ggml_type in ggml.h. All names are known, so that an unsupported type is refused by name.
GGML_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
