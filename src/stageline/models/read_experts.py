"""Reads a layer's mixture of experts, one expert at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stageline.checkpoint.model_spec import ModelSpec, MoeSpec
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
    router_bias = reader.read(f"{router}.bias", (moe.num_experts,)) if moe.has_bias else None
    experts = _read_each(reader, moe, hidden, f"{prefix}.experts", names)
    return MoeMLP(moe, Router(weight, router_bias), experts, bias, shared, gate)


def read_shared_mlp(reader: WeightReader, spec: ModelSpec, prefix: str, size: int) -> LlamaMLP:
    """A gated MLP of a size of its own. Raises: CheckpointError."""
    hidden = spec.hidden_size
    gated = read_gated_linear(reader, f"{prefix}.gate_proj", f"{prefix}.up_proj", size, hidden)
    return LlamaMLP(gated, read_linear(reader, f"{prefix}.down_proj", hidden, size))


def _read_each(
    reader: WeightReader, moe: MoeSpec, hidden: int, prefix: str, names: ExpertNames
) -> Iterator[Expert | QuantizedExpert]:
    size = moe.intermediate_size
    for index in moe.own:
        gate, up, down = (
            reader.read_matrix(f"{prefix}.{index}.{name}.weight", shape)
            for name, shape in ((names.gate, (size, hidden)), (names.up, (size, hidden)), (names.down, (hidden, size)))
        )
        gate_up_bias = down_bias = None
        if moe.has_bias:
            of_both = [reader.read(f"{prefix}.{index}.{name}.bias", (size,)) for name in (names.gate, names.up)]
            gate_up_bias = torch.cat(of_both)
            down_bias = reader.read(f"{prefix}.{index}.{names.down}.bias", (hidden,))
        yield _expert(gate, up, down, gate_up_bias, down_bias)


def _expert(
    gate: torch.Tensor | Quantized,
    up: torch.Tensor | Quantized,
    down: torch.Tensor | Quantized,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> Expert | QuantizedExpert:
    """As it is quantised if all matrices are; else those that are become floating-point."""
    if isinstance(gate, Quantized) and isinstance(up, Quantized) and isinstance(down, Quantized):
        return QuantizedExpert(gate, up, down, gate_up_bias, down_bias)
    dense = next(matrix for matrix in (gate, up, down) if isinstance(matrix, torch.Tensor))
    gate, up, down = (
        matrix.rows(torch.arange(matrix.num_rows)).to(dense.dtype) if isinstance(matrix, Quantized) else matrix
        for matrix in (gate, up, down)
    )
    return Expert(torch.cat((gate, up)), down, gate_up_bias, down_bias)


def read_packed_moe(reader: WeightReader, spec: ModelSpec, prefix: str) -> MoeMLP:
    """gpt-oss': all experts' matrices in one tensor, transposed, gate and up in turn, each with a bias.

    Raises: CheckpointError.
    """
    moe, hidden = _moe(spec), spec.hidden_size
    weight = reader.read(f"{prefix}.router.weight", (moe.num_experts, hidden))
    bias = reader.read(f"{prefix}.router.bias", (moe.num_experts,))
    return MoeMLP(moe, Router(weight, bias), _read_packed(reader, moe, hidden, f"{prefix}.experts"))


def _read_packed(
    reader: WeightReader, moe: MoeSpec, hidden: int, prefix: str
) -> Iterator[Expert | QuantizedExpert]:
    count, size = moe.num_experts, moe.intermediate_size
    gate_up_shape, down_shape = (count, hidden, 2 * size), (count, size, hidden)
    gate_up_biases = reader.read(f"{prefix}.gate_up_proj_bias", (len(moe.own), 2 * size))
    down_biases = reader.read(f"{prefix}.down_proj_bias", (len(moe.own), hidden))
    for place, index in enumerate(moe.own):
        gate_and_up = (slice(0, None, 2), slice(1, None, 2))
        gate, up = reader.read_transposed_part(f"{prefix}.gate_up_proj", gate_up_shape, index, gate_and_up)
        [down] = reader.read_transposed_part(f"{prefix}.down_proj", down_shape, index, (slice(None),))
        biases = gate_up_biases[place]
        yield _expert(gate, up, down, torch.cat((biases[0::2], biases[1::2])), down_biases[place])


def _moe(spec: ModelSpec) -> MoeSpec:
    assert spec.moe is not None, "the family has experts"
    return spec.moe
