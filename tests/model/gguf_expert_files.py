"""GGUF files of tiny models with experts, as llama.cpp's converter makes them of the directories that are read here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.model_spec import ModelSpec
from stageline.weights.reader import CheckpointReader
from tests.model.gguf_names import BLOCK_PARTS, TOP
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.model.tiny_families import WINDOW, TinyFamily

NUM_EXPERTS, INNER_SIZE = 6, 64
_PARTS = {
    **BLOCK_PARTS,
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


@dataclass(frozen=True)
class ExpertModel:
    """Args:
    family: of `EXPERT_FAMILIES`.
    changes: to its config: sizes of whole blocks, and what this format cannot say.
    metadata: behind the architecture's name, beside what all have.
    parts: names of a block's tensors where they are not the usual ones.
    """

    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)

    @property
    def tiny(self) -> TinyFamily:
        sizes = {"hidden_size": 96, "intermediate_size": 128, **self.changes}
        return EXPERT_FAMILIES[self.family].changed(sizes)


_QWEN = {"moe_intermediate_size": INNER_SIZE}
_QWEN_METADATA = {"expert_feed_forward_length": INNER_SIZE}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
}
_LATENT_SIZES = {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 16}
_LATENT_METADATA = {
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "expert_weights_scale": 1.7,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_log_multiplier": 0.08,
}
MODELS = {
    "llama": ExpertModel("mixtral", {"sliding_window": None}),
    "qwen2moe": ExpertModel(
        "qwen2 moe",
        {**_QWEN, "shared_expert_intermediate_size": 64},
        {**_QWEN_METADATA, "expert_shared_feed_forward_length": 64, "expert_weights_norm": False},
    ),
    "qwen3moe": ExpertModel("qwen3 moe", _QWEN, _QWEN_METADATA),
    "gpt-oss": ExpertModel(
        "gpt-oss",
        {"intermediate_size": INNER_SIZE, "swiglu_limit": 7.0},
        {
            **_QWEN_METADATA,
            "attention.sliding_window": WINDOW,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
        {"post_attention_layernorm": "post_attention_norm", "self_attn": "attn_sinks"},
    ),
    "deepseek2": ExpertModel(
        "deepseek v3",
        {**_QWEN, **_LATENT_SIZES, "q_lora_rank": 32, "attention_bias": False, "rope_parameters": _YARN},
        {
            **_QWEN_METADATA,
            "attention.head_count_kv": 1,
            "attention.key_length": 32 + 8,
            "attention.value_length": 32,
            "attention.key_length_mla": 32 + 8,
            "attention.value_length_mla": 16,
            "attention.q_lora_rank": 32,
            "expert_gating_func": 2,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "expert_weights_norm": True,
            **_LATENT_METADATA,
        },
    ),
    "deepseek2 of V2 Lite": ExpertModel(
        "deepseek v2 lite",
        {**_QWEN, **_LATENT_SIZES, "rope_parameters": _YARN},
        {**_QWEN_METADATA, "attention.key_length": 32 + 8, "attention.value_length": 16, **_LATENT_METADATA},
    ),
}
"""By the name under `general.architecture`, and what follows it here."""


@dataclass(frozen=True)
class Types:
    """How a file's matrices are stored.

    Args:
        usual: of all but those named here, routers and vectors.
        special: by the beginning of a part's name, such as "ffn_down_exps".
        as_numbers: whether what they stand for is stored instead, in float32.
        one_by_one: whether each expert has tensors of its own, as in the first files of that kind.
    """

    usual: str = "F32"
    special: dict[str, str] = field(default_factory=dict)
    as_numbers: bool = False
    one_by_one: bool = False


def write_file(directory: Path, path: Path, architecture: str, types: Types = Types()) -> Path:
    """Args: directory: of `MODELS[architecture]`."""
    spec = open_checkpoint(str(directory)).spec
    written_as = architecture.partition(" ")[0]
    writer = gguf.GGUFWriter(str(path), written_as)
    for key, value in {**_metadata(spec), **MODELS[architecture].metadata}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{written_as}.{key}", value)  # type: ignore[operator]
    for name, values in _tensors(directory, spec, architecture):
        part = name.split(".")[2] if name.startswith("blk.") else name
        kind = next((kind for start, kind in types.special.items() if part.startswith(start)), types.usual)
        if values.ndim < 2 or part.startswith("ffn_gate_inp") or name.endswith("bias"):
            kind = "F32"
        if types.one_by_one and "_exps" in name:
            for index, matrix in enumerate(values):
                _add(writer, name.replace("_exps", f".{index}"), matrix, kind, types.as_numbers)
        else:
            _add(writer, name, values, kind, types.as_numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str, as_numbers: bool) -> None:
    stored_type = gguf.GGMLQuantizationType[kind]
    stored = gguf.quantize(np.ascontiguousarray(values), stored_type)
    if as_numbers:
        writer.add_tensor(name, gguf.dequantize(stored, stored_type).reshape(values.shape).astype(np.float32))
    else:
        writer.add_tensor(name, stored, raw_dtype=stored_type)


def _metadata(spec: ModelSpec) -> dict[str, Any]:
    assert spec.moe is not None
    return {
        "block_count": spec.num_layers,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "context_length": spec.max_position_embeddings,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope.theta,
        "expert_count": spec.moe.num_experts,
        "expert_used_count": spec.moe.num_experts_per_token,
    }


def _tensors(directory: Path, spec: ModelSpec, architecture: str) -> Iterator[tuple[str, np.ndarray]]:
    """Names and float32 values of what the file holds."""
    checkpoint = open_checkpoint(str(directory))
    stacks: dict[str, list[np.ndarray]] = {}
    with CheckpointReader(checkpoint, torch.float32, torch.device("cpu")) as reader:
        names = sorted(checkpoint.tensors, key=lambda name: [int(w) if w.isdecimal() else -1 for w in name.split(".")])
        for name in names:
            values = reader.read(name, checkpoint.tensors[name].shape).numpy()
            stem, _, kind = name.rpartition(".")
            if stem in TOP:
                yield f"{TOP[stem]}.{kind}", values
                continue
            _, _, layer, part = stem.split(".", 3)
            if part == "mlp.experts":
                for of_part, matrices in _unpacked(kind, values):
                    yield f"blk.{layer}.{of_part}", matrices
            elif ".experts." in part:
                stored = f"ffn_{_EXPERT_PARTS[part.rpartition('.')[2]]}_exps"
                stacks.setdefault(f"blk.{layer}.{stored}.{kind}", []).append(values)
            else:
                if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                    heads = values.shape[0] // spec.head_dim
                    values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
                if part == "self_attn.kv_b_proj" and architecture == "deepseek2":
                    heads = values.reshape(spec.num_heads, -1, values.shape[1])
                    yield f"blk.{layer}.attn_k_b.weight", heads[:, :32].swapaxes(1, 2)
                    yield f"blk.{layer}.attn_v_b.weight", heads[:, 32:]
                    continue
                if kind == "e_score_correction_bias":
                    part, kind = "mlp.gate.e_score_correction_bias", "bias"
                stored = {**_PARTS, **MODELS[architecture].parts}[part]
                yield f"blk.{layer}.{stored}.{'weight' if kind == 'sinks' else kind}", values
    for name, matrices in stacks.items():
        yield name, np.stack(matrices)


def _unpacked(kind: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """gpt-oss': matrices the usual way round, gate and up apart."""
    suffix = "bias" if kind.endswith("_bias") else "weight"
    if suffix == "weight":
        values = values.swapaxes(1, 2)
    if kind.startswith("gate_up_proj"):
        yield f"ffn_gate_exps.{suffix}", values[:, 0::2]
        yield f"ffn_up_exps.{suffix}", values[:, 1::2]
    else:
        yield f"ffn_down_exps.{suffix}", values
