"""Reads a layer's mixture of experts, one expert at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stageline.checkpoint.model_spec import ModelSpec, MoeSpec
from stageline.errors import CheckpointError
from stageline.kernels.experts import Expert, QuantizedExpert
from stageline.kernels.quantized import QuantizedMatrix as Quantized
from stageline.layers.moe import MoeMLP, Router
from stageline.models.family import WeightReader
from stageline.models.llama import LlamaMLP
from stageline.models.read_linear import read_gated_linear, read_linear


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of its mixture of experts, behind the layer's own prefix.

    Args:
        gate, up, down: an expert's matrices.
        shared: the MLP that all tokens share; None if the family has none.
        shared_gate: the gate of that.
    """

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str | None = None
    shared_gate: str | None = None


def read_moe(reader: WeightReader, spec: ModelSpec, prefix: str, names: ExpertNames) -> MoeMLP:
    """The layer's experts; `prefix` is such as "model.layers.3.mlp". Raises: CheckpointError."""
    moe, hidden = _moe(spec), spec.hidden_size
    router = f"{prefix}.{names.router}"
    bias = None
    if moe.has_selection_bias:
        bias = reader.read_float32(f"{router}.e_score_correction_bias", (moe.num_experts,))
    shared = gate = None
    if names.shared is not None and moe.shared_intermediate_size:
        shared = read_shared_mlp(reader, spec, f"{prefix}.{names.shared}", moe.shared_intermediate_size)
    if names.shared_gate is not None:
        gate = Router(reader.read(f"{prefix}.{names.shared_gate}.weight", (1, hidden)))
    weight = reader.read(f"{router}.weight", (moe.num_experts, hidden))
    experts = _read_each(reader, moe, hidden, f"{prefix}.experts", names)
    return MoeMLP(moe, Router(weight), experts, bias, shared, gate)


def read_shared_mlp(reader: WeightReader, spec: ModelSpec, prefix: str, size: int) -> LlamaMLP:
    """A gated MLP of a size of its own. Raises: CheckpointError."""
    hidden = spec.hidden_size
    gated = read_gated_linear(reader, f"{prefix}.gate_proj", f"{prefix}.up_proj", size, hidden)
    return LlamaMLP(gated, read_linear(reader, f"{prefix}.down_proj", hidden, size))


def _read_each(
    reader: WeightReader, moe: MoeSpec, hidden: int, prefix: str, names: ExpertNames
) -> Iterator[Expert | QuantizedExpert]:
    """All as they are quantised, or none. Raises: CheckpointError if some can stay quantised and some cannot."""
    size, are_quantized = moe.intermediate_size, None
    for index in range(moe.num_experts):
        gate, up, down = (
            reader.read_matrix(f"{prefix}.{index}.{name}.weight", shape)
            for name, shape in ((names.gate, (size, hidden)), (names.up, (size, hidden)), (names.down, (hidden, size)))
        )
        expert: Expert | QuantizedExpert | None = None
        if isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor) and isinstance(down, torch.Tensor):
            expert = Expert(torch.cat((gate, up)), down)
        elif isinstance(gate, Quantized) and isinstance(up, Quantized) and isinstance(down, Quantized):
            expert = QuantizedExpert(gate, up, down)
        if expert is None or are_quantized not in (None, isinstance(expert, QuantizedExpert)):
            raise CheckpointError(
                f"{prefix}: expert {index} is quantised otherwise than those before it; give --quantization none"
            )
        are_quantized = isinstance(expert, QuantizedExpert)
        yield expert


def read_packed_moe(reader: WeightReader, spec: ModelSpec, prefix: str) -> MoeMLP:
    """gpt-oss': all experts' matrices in one tensor, transposed, gate and up in turn, each with a bias.

    Raises: CheckpointError.
    """
    moe, hidden = _moe(spec), spec.hidden_size
    weight = reader.read(f"{prefix}.router.weight", (moe.num_experts, hidden))
    bias = reader.read(f"{prefix}.router.bias", (moe.num_experts,))
    return MoeMLP(moe, Router(weight, bias), _read_packed(reader, moe, hidden, f"{prefix}.experts"))


def _read_packed(reader: WeightReader, moe: MoeSpec, hidden: int, prefix: str) -> Iterator[Expert]:
    count, size = moe.num_experts, moe.intermediate_size
    gate_up_biases = reader.read(f"{prefix}.gate_up_proj_bias", (count, 2 * size))
    down_biases = reader.read(f"{prefix}.down_proj_bias", (count, hidden))
    for index in range(count):
        gate_up = reader.read_part(f"{prefix}.gate_up_proj", (count, hidden, 2 * size), index).T
        down = reader.read_part(f"{prefix}.down_proj", (count, size, hidden), index).T
        yield Expert(
            torch.cat((gate_up[0::2], gate_up[1::2])),
            down.contiguous(),
            torch.cat((gate_up_biases[index, 0::2], gate_up_biases[index, 1::2])),
            down_biases[index],
        )


def _moe(spec: ModelSpec) -> MoeSpec:
    assert spec.moe is not None, "the family has experts"
    return spec.moe
