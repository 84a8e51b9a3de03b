"""Reads linear layers from a checkpoint; projections of one input become one matrix, so that they cost one matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline.kernels.quantized import QuantizedMatrix
from stageline.layers.activation import SILU
from stageline.layers.embedding import TokenEmbedding
from stageline.layers.linear import GatedLinear, Linear
from stageline.layers.quantized_linear import (
    LinearThenGate,
    QuantizedEmbedding,
    QuantizedGatedLinear,
    QuantizedLinear,
    SideBySide,
)
from stageline.models.family import WeightReader


def read_linear(reader: WeightReader, name: str, out_features: int, in_features: int, has_bias: bool = False) -> Linear:
    """The linear layer whose tensors are `name`.weight and `name`.bias. Raises: CheckpointError."""
    return read_fused_linear(reader, [name], [out_features], in_features, has_bias)


def read_fused_linear(
    reader: WeightReader, names: Sequence[str], out_features: Sequence[int], in_features: int, has_bias: bool = False
) -> Linear:
    """Linear layers of one input as one: its output is theirs side by side, in order. Raises: CheckpointError."""
    parts = list(zip(names, out_features, strict=True))
    weights = [reader.read_matrix(f"{name}.weight", (size, in_features)) for name, size in parts]
    biases = [reader.read(f"{name}.bias", (size,)) for name, size in parts] if has_bias else []
    return fused_linear(weights, biases, reader.dtype)


def fused_linear(
    weights: Sequence[torch.Tensor | QuantizedMatrix], biases: list[torch.Tensor], dtype: torch.dtype
) -> Linear:
    """Matrices of one input as one linear layer. Args: biases: of each matrix, or none at all."""
    if any(isinstance(weight, QuantizedMatrix) for weight in weights):
        return _fused_quantized(weights, biases, dtype)
    dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    return Linear(_joined(dense), _joined(biases) if biases else None)


def read_gated_linear(
    reader: WeightReader,
    gate_name: str,
    up_name: str,
    size: int,
    in_features: int,
    has_bias: bool = False,
    activation: str = SILU,
) -> GatedLinear:
    """activation(gate(x)) * up(x) of two linear layers, as one. Raises: CheckpointError."""
    names = (gate_name, up_name)
    weights = [reader.read_matrix(f"{name}.weight", (size, in_features)) for name in names]
    biases = [reader.read(f"{name}.bias", (size,)) for name in names] if has_bias else []
    bias = _joined(biases) if biases else None
    gate, up = weights
    if isinstance(gate, QuantizedMatrix) and isinstance(up, QuantizedMatrix):
        return QuantizedGatedLinear(gate, up, reader.dtype, bias, activation)
    if isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor):
        return GatedLinear(torch.cat((gate, up)), bias, activation)
    return LinearThenGate(_fused_quantized(weights, biases, reader.dtype), activation)


def read_joined_gated_linear(
    reader: WeightReader, name: str, size: int, in_features: int, activation: str = SILU
) -> GatedLinear:
    """The same of a checkpoint that has both in one matrix, the gate first. Raises: CheckpointError."""
    weight = reader.read_matrix(f"{name}.weight", (2 * size, in_features))
    if isinstance(weight, QuantizedMatrix):
        return LinearThenGate(_fused_quantized([weight], [], reader.dtype), activation)
    return GatedLinear(weight, None, activation)


def read_embedding(
    reader: WeightReader, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0
) -> TokenEmbedding | QuantizedEmbedding:
    """The embedding whose rows, times `scale`, are the tokens'. Raises: CheckpointError."""
    weight = reader.read_matrix(name, (vocab_size, hidden_size))
    if isinstance(weight, QuantizedMatrix):
        return QuantizedEmbedding(weight, reader.dtype, scale)
    return TokenEmbedding(weight, scale)


def _fused_quantized(
    weights: Sequence[torch.Tensor | QuantizedMatrix], biases: list[torch.Tensor], dtype: torch.dtype
) -> Linear:
    quantized = [weight for weight in weights if isinstance(weight, QuantizedMatrix)]
    if len(quantized) == len(weights):
        return QuantizedLinear(quantized, dtype, _joined(biases) if biases else None)
    bias_of = dict(enumerate(biases))
    return SideBySide(
        [
            QuantizedLinear([weight], dtype, bias_of.get(index))
            if isinstance(weight, QuantizedMatrix)
            else Linear(weight, bias_of.get(index))
            for index, weight in enumerate(weights)
        ]
    )


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
