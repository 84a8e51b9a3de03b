"""Reads linear layers from a checkpoint; projections of one input become one matrix, so that they cost one matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline.layers.linear import Linear
from stageline.models.family import WeightReader


def read_linear(reader: WeightReader, name: str, out_features: int, in_features: int, has_bias: bool = False) -> Linear:
    """The linear layer whose tensors are `name`.weight and `name`.bias. Raises: CheckpointError."""
    return read_fused_linear(reader, [name], [out_features], in_features, has_bias)


def read_fused_linear(
    reader: WeightReader, names: Sequence[str], out_features: Sequence[int], in_features: int, has_bias: bool = False
) -> Linear:
    """Linear layers of one input as one: its output is theirs side by side, in order. Raises: CheckpointError."""
    parts = list(zip(names, out_features, strict=True))
    weights = [reader.read(f"{name}.weight", (size, in_features)) for name, size in parts]
    biases = [reader.read(f"{name}.bias", (size,)) for name, size in parts] if has_bias else []
    return Linear(_joined(weights), _joined(biases) if biases else None)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
