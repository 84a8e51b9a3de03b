"""A checkpoint as the rest of Stageline sees it, and the one function that opens either kind."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.quantization import Quantization


class TensorEntry(msgspec.Struct, frozen=True):
    """Where one tensor's bytes are.

    Args:
        name: Hugging Face's name for it, such as "model.layers.3.self_attn.q_proj.weight".
        file: path of the file that holds it.
        offset_bytes, num_bytes: the run of bytes in that file.
        shape: as Hugging Face has it: [out_features, in_features] for a linear layer.
        encoding: "F32", "F16", "BF16", or a GGML block type such as "Q4_1".
        stored_name: its name in the file, for messages.
        rope_permuted_heads: a number of heads if its rows are interleaved for RoPE pair by pair, head by head, as GGUF
            files of the llama architecture store q and k; 0 if they are in halves.
        rope_permuted_dim: the leading rows of each head that are; 0 for all.
        run_bytes, stride_bytes: of a tensor's columns, the bytes of each row that are meant, and of the whole row; 0
            and 0 for bytes that lie side by side.
        parts: of a quantised matrix, the tensors that say its numbers together ("numbers", "scales", "zeros",
            "groups"); then `encoding` is a word for people, and `num_bytes` is of all parts.
        quantization: how they say them.
        becomes_float: it cannot stay quantised whatever its encoding, because what it is computed with cannot.
    """

    name: str
    file: str
    offset_bytes: int
    num_bytes: int
    shape: tuple[int, ...]
    encoding: str
    stored_name: str
    rope_permuted_heads: int = 0
    parts: dict[str, TensorEntry] = {}
    quantization: Quantization | None = None
    rope_permuted_dim: int = 0
    run_bytes: int = 0
    stride_bytes: int = 0
    becomes_float: bool = False

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Checkpoint(msgspec.Struct, frozen=True):
    """Everything about a model's files except the weights' bytes.

    Args:
        path: the directory or GGUF file; of a split model's files the first.
        spec: the model's shape.
        tensors: every tensor by its Hugging Face name.
    """

    path: str
    spec: ModelSpec
    tensors: dict[str, TensorEntry]

    @property
    def is_gguf(self) -> bool:
        return Path(self.path).is_file()
