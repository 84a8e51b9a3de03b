"""Mixtures of experts in GGUF files: what their metadata say, and every expert's matrices as entries of their own.

One idea: a tensor that holds one matrix for each expert is so many runs of bytes, one behind the other. Each becomes an
entry under the name that a Hugging Face checkpoint has for it, so that stages, ranks and expert parallelism find and
count the experts of a GGUF file as they do any other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from stageline.checkpoint.architectures.experts import LARGEST_NUM_EXPERTS, with_experts
from stageline.checkpoint.checkpoint import TensorEntry
from stageline.checkpoint.fields import Fields
from stageline.checkpoint.gguf_container import GgufFile
from stageline.checkpoint.model_spec import ModelSpec, MoeSpec
from stageline.checkpoint.stage_tensors import can_stay_quantized
from stageline.errors import CheckpointError

EACH = "*"
"""Stands for an expert's number in the name of a tensor that holds one matrix for each."""

SELECTION_BIAS = "exp_probs_b"
"""A block's part that takes part in choosing experts."""

# Source: enum llama_expert_gating_func_type of llama.cpp. The third is softmax over those chosen, which is the same as
# softmax over all whose chosen ones are made to add up to one.
_SCORINGS = {0: "softmax", 1: "softmax", 2: "sigmoid", 3: "softmax"}
_SOFTMAX_OF_CHOSEN = 3


@dataclass(frozen=True)
class GgufExperts:
    """What an architecture has in place of, or beside, the MLP.

    Args:
        family: as `ModelSpec.family`, of a file that has experts.
        parts: Hugging Face's names of a block's tensors by those in the file.
        normalizes_weights: where the file does not say so.
        is_optional: whether there are also files without experts.
        has_groups: whether experts may be chosen by groups.
        has_shared_gate, has_bias, activation, swiglu_alpha, swiglu_limit: as of a `MoeSpec`.
    """

    family: str
    parts: dict[str, str]
    normalizes_weights: bool = True
    is_optional: bool = False
    has_groups: bool = False
    has_shared_gate: bool = False
    has_bias: bool = False
    activation: str = "silu"
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0


def expert_parts(prefix: str, router: str, gate: str, up: str, down: str) -> dict[str, str]:
    """`GgufExperts.parts` of routed experts. Args: prefix: such as "mlp"; the others as of `ExpertNames`."""
    each = f"{prefix}.experts.{EACH}"
    return {
        "ffn_gate_inp": f"{prefix}.{router}",
        "ffn_gate_exps": f"{each}.{gate}",
        "ffn_up_exps": f"{each}.{up}",
        "ffn_down_exps": f"{each}.{down}",
    }


def add_experts(gguf: GgufFile, fields: Fields, architecture: str, spec: ModelSpec, kind: GgufExperts) -> ModelSpec:
    """Args: spec: of the same model without experts. Raises: CheckpointError."""
    num_experts = fields.integer(f"{architecture}.expert_count", default=0 if kind.is_optional else None, lowest=0)
    if not num_experts and kind.is_optional:
        return spec
    if not num_experts:
        raise CheckpointError(f"{gguf.path}: {architecture}.expert_count is 0, but such models have experts")
    num_groups = fields.integer(f"{architecture}.expert_group_count", default=0, lowest=0) or 1
    if num_groups > 1 and not kind.has_groups:
        raise CheckpointError(f"{gguf.path}: experts that are chosen by groups are not supported in {architecture}")
    gating = fields.integer(f"{architecture}.expert_gating_func", default=0, lowest=0)
    if gating not in _SCORINGS:
        raise CheckpointError(
            f"{gguf.path}: {architecture}.expert_gating_func is {gating}; supported are 1, 3 (softmax) and 2 "
            "(sigmoid)"
        )
    has_scale = bool(fields.raw(f"{architecture}.expert_weights_scale"))
    normalizes = fields.boolean(f"{architecture}.expert_weights_norm", kind.normalizes_weights)
    sizes = _inner_sizes(gguf)
    if not sizes.routed:
        raise CheckpointError(f"{gguf.path}: expert_count is {num_experts}, but no layer has experts")
    shared_size = next(iter(sizes.shared.values()), 0)
    moe = MoeSpec(
        num_experts=num_experts,
        num_experts_per_token=fields.integer(f"{architecture}.expert_used_count"),
        intermediate_size=_told_size(fields, f"{architecture}.expert_feed_forward_length", sizes.routed),
        normalizes_weights=normalizes or gating == _SOFTMAX_OF_CHOSEN,
        scoring=_SCORINGS[gating],
        num_groups=num_groups,
        num_groups_per_token=fields.integer(f"{architecture}.expert_group_used_count") if num_groups > 1 else 1,
        group_score_experts=2 if num_groups > 1 and _SCORINGS[gating] == "sigmoid" else 1,
        has_selection_bias=any(tensor.name.endswith(f".{SELECTION_BIAS}.bias") for tensor in gguf.tensors),
        weight_factor=fields.number(f"{architecture}.expert_weights_scale") if has_scale else 1.0,
        shared_intermediate_size=shared_size,
        has_shared_gate=kind.has_shared_gate and bool(shared_size),
        dense_layers=tuple(layer for layer in range(spec.num_layers) if layer not in sizes.routed),
        has_bias=kind.has_bias,
        activation=kind.activation,
        swiglu_alpha=kind.swiglu_alpha,
        swiglu_limit=kind.swiglu_limit,
    )
    return with_experts(replace(spec, family=kind.family), fields, moe)


@dataclass(frozen=True)
class _InnerSizes:
    """Of one routed expert and of what is shared, by layer."""

    routed: dict[int, int]
    shared: dict[int, int]


def _inner_sizes(gguf: GgufFile) -> _InnerSizes:
    """By the tensors themselves: older files do not say them."""
    routed: dict[int, int] = {}
    shared: dict[int, int] = {}
    for tensor in gguf.tensors:
        words = tensor.name.split(".")
        if len(words) < 4 or words[0] != "blk" or not words[1].isdecimal() or words[-1] != "weight":
            continue
        part, layer, sizes = words[2], int(words[1]), tensor.shape[-2:]
        if len(sizes) == 2 and (part == "ffn_up_exps" or (part == "ffn_up" and len(words) == 5)):
            routed[layer] = sizes[0]
        elif len(sizes) == 2 and part == "ffn_up_shexp":
            shared[layer] = sizes[0]
    return _InnerSizes(routed, shared)


def _told_size(fields: Fields, key: str, found: dict[int, int]) -> int:
    layer, size = next(iter(found.items()))
    told = fields.integer(key, default=size)
    if told != size:
        raise CheckpointError(
            f"{fields.source}: {key} is {told}, but layer {layer} has experts of {size} inner numbers"
        )
    return told


def one_entry_each(entry: TensorEntry, num_experts: int) -> list[TensorEntry]:
    """Args: entry: whose first dimension counts experts, and whose name has EACH.
    Raises: CheckpointError if it is not of so many.
    """
    count, *shape = entry.shape
    if count != num_experts or not shape or num_experts > LARGEST_NUM_EXPERTS:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.stored_name} has shape {list(entry.shape)}; the model needs {num_experts} "
            "matrices or rows, one for each expert"
        )
    num_bytes = entry.num_bytes // count
    return [
        replace(
            entry,
            name=entry.name.replace(EACH, str(index)),
            offset_bytes=entry.offset_bytes + index * num_bytes,
            num_bytes=num_bytes,
            shape=tuple(shape),
        )
        for index in range(count)
    ]


def with_whole_experts(entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """An expert stays quantised as a whole or not at all: its matrices are multiplied by one kernel."""
    is_matrix_of = {entry.name: _expert_of(entry.name) for entry in entries if len(entry.shape) == 2}
    floats = {is_matrix_of.get(entry.name, "") for entry in entries if not can_stay_quantized(entry)} - {""}
    return [
        replace(entry, becomes_float=True) if is_matrix_of.get(entry.name, "") in floats else entry for entry in entries
    ]


def _expert_of(name: str) -> str:
    """`model.layers.3.mlp.experts.7.up_proj.weight` -> `model.layers.3.mlp.experts.7`; "" of other tensors."""
    before, _, behind = name.partition(".experts.")
    return f"{before}.experts.{behind.partition('.')[0]}" if behind else ""
