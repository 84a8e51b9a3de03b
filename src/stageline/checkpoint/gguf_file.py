"""A GGUF model as a Checkpoint: its metadata becomes the ModelSpec, its tensor names become Hugging Face's."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from stageline.checkpoint.architectures.common import yarn_magnitude
from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.encodings import DTYPE_OF_ENCODING
from stageline.checkpoint.fields import Fields
from stageline.checkpoint.gguf_architectures import ARCHITECTURES, NOT_SUPPORTED, GgufArchitecture
from stageline.checkpoint.gguf_container import GgufFile, GgufTensor
from stageline.checkpoint.gguf_experts import EACH, add_experts, one_entry_each, with_whole_experts
from stageline.checkpoint.gguf_parts import read_model
from stageline.checkpoint.hf_config import check_spec
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.errors import CheckpointError

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Files of the first months have a tensor for each expert, whose number stands behind the part.
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)(?:\.(\d+))?\.(weight|bias)")
_WITHOUT_SUFFIX = ("self_attn.sinks", "mlp.gate.e_score_correction_bias")
_ROUTER_PART = "ffn_gate_inp"
_ROPE_FREQUENCIES = "rope_freqs.weight"
LARGEST_HEAD_DIM = 65536


def open_gguf_file(path: Path) -> Checkpoint:
    """Args: path: of a split model's files, any. Raises: CheckpointError."""
    gguf = read_model(path)
    path = gguf.path
    fields = Fields(gguf.metadata, str(path))
    architecture = fields.string("general.architecture")
    if architecture not in ARCHITECTURES:
        reason = f": {NOT_SUPPORTED[architecture]}" if architecture in NOT_SUPPORTED else ""
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported in GGUF{reason}; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    kind = ARCHITECTURES[architecture]
    spec = kind.refine(fields, _spec(gguf, fields, architecture, kind))
    check_spec(spec, str(path))
    entries: list[TensorEntry] = []
    for tensor in gguf.tensors:
        if tensor.name != _ROPE_FREQUENCIES:
            entries += _entries(tensor, spec, kind)
    if spec.moe is not None:
        entries = with_whole_experts(entries)
    return Checkpoint(path=str(path), spec=spec, tensors={entry.name: entry for entry in entries})


def hugging_face_name(stored_name: str, kind: GgufArchitecture, has_experts: bool) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name the architecture lacks.

    Returns: with EACH in it of a tensor that holds one matrix for each expert.
    """
    if stored_name in _TOP_LEVEL:
        return _TOP_LEVEL[stored_name]
    match = _BLOCK_NAME.fullmatch(stored_name)
    if match is None:
        return None
    layer, stored_part, expert, suffix = match.groups()
    of_experts = kind.experts.parts if kind.experts is not None and has_experts else {}
    if expert is None:
        part = of_experts.get(stored_part) or kind.block_parts.get(stored_part) or _BLOCK_PARTS.get(stored_part)
    else:
        part = of_experts.get(f"{stored_part}_exps")
        part = None if part is None else part.replace(EACH, str(int(expert)))
    if part is None:
        return None
    return f"model.layers.{int(layer)}.{part}" + ("" if part in _WITHOUT_SUFFIX else f".{suffix}")


def _spec(gguf: GgufFile, fields: Fields, architecture: str, kind: GgufArchitecture) -> ModelSpec:
    shapes = {tensor.name: tensor.shape for tensor in gguf.tensors}
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{gguf.path}: tensor token_embd.weight is missing or not two-dimensional ({embedding})")
    if kind.experts is None and fields.integer(f"{architecture}.expert_count", default=0, lowest=0):
        raise CheckpointError(f"{gguf.path}: {architecture} models with experts (expert_count) are not supported")
    hidden_size = fields.integer(f"{architecture}.embedding_length")
    num_heads = fields.integer(f"{architecture}.attention.head_count")
    head_dim = fields.integer(f"{architecture}.attention.key_length", default=max(1, hidden_size // num_heads))
    if kind.is_latent:
        head_dim = fields.integer(f"{architecture}.rope.dimension_count")
    spec = ModelSpec(
        family=kind.family,
        num_layers=fields.integer(f"{architecture}.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{architecture}.attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(f"{architecture}.feed_forward_length"),
        vocab_size=embedding[0],
        max_position_embeddings=fields.integer(f"{architecture}.context_length"),
        rms_norm_eps=_as_written(fields.number(f"{architecture}.attention.layer_norm_rms_epsilon")),
        rope=_rope(gguf, fields, architecture, head_dim, kind.yarn_rounds_ramp),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        attention_output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        sliding_window=fields.integer(f"{architecture}.attention.sliding_window", default=0, lowest=0) or None,
        dtype=_dtype(gguf),
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields),
    )
    return spec if kind.experts is None else add_experts(gguf, fields, architecture, spec, kind.experts)


def _as_written(value: float) -> float:
    """Metadata are float32: 1e-05 comes back as 9.999999747378752e-06. The shortest decimal is what was meant."""
    for digits in range(1, 9):
        shortest = float(f"{value:.{digits}g}")
        if struct.pack("<f", shortest) == struct.pack("<f", value):
            return shortest
    return value


def _rope(
    gguf: GgufFile, fields: Fields, architecture: str, head_dim: int, yarn_rounds_ramp: bool | None
) -> RopeSpec:
    rotary_dim = fields.integer(f"{architecture}.rope.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        raise CheckpointError(f"{gguf.path}: only {rotary_dim} of {head_dim} dimensions rotate, which is not supported")
    theta = _as_written(fields.number(f"{architecture}.rope.freq_base", default=10000.0))
    kind = fields.string(f"{architecture}.rope.scaling.type", default="none")
    supported = ["none", "linear"] + ["yarn"] * (yarn_rounds_ramp is not None)
    if kind not in supported:
        raise CheckpointError(
            f"{gguf.path}: rope scaling {kind!r} is not supported; supported are {', '.join(supported)}"
        )
    divisors = _frequency_divisors(gguf, head_dim)
    if kind == "none":
        return RopeSpec(theta=theta, frequency_divisors=divisors)
    factor = fields.number(f"{architecture}.rope.scaling.factor")
    if kind == "yarn":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=factor,
            original_max_position_embeddings=fields.integer(f"{architecture}.rope.scaling.original_context_length"),
            magnitude=yarn_magnitude(factor, 1.0),
            beta_fast=_as_written(fields.number(f"{architecture}.rope.scaling.yarn_beta_fast", default=32.0)),
            beta_slow=_as_written(fields.number(f"{architecture}.rope.scaling.yarn_beta_slow", default=1.0)),
            rounds_ramp=bool(yarn_rounds_ramp),
        )
    return RopeSpec(theta=theta, kind="linear", factor=factor, frequency_divisors=divisors)


def _frequency_divisors(gguf: GgufFile, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1 and later: the frequency bands, already worked out, as a small float32 tensor."""
    tensor = next((tensor for tensor in gguf.tensors if tensor.name == _ROPE_FREQUENCIES), None)
    if tensor is None:
        return ()
    if tensor.encoding != "F32" or tensor.shape != (head_dim // 2,) or head_dim > LARGEST_HEAD_DIM:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} is {tensor.encoding} of shape {tensor.shape}; expected F32 of "
            f"shape ({head_dim // 2},)"
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset_bytes)
        divisors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    if not all(divisor > 0 for divisor in divisors):
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} holds divisors that are not positive")
    return divisors


def _dtype(gguf: GgufFile) -> str:
    """The dtype of the matrices, but for routers, if they are plain floats; quantised models compute in bfloat16."""
    encodings = {
        tensor.encoding for tensor in gguf.tensors if len(tensor.shape) > 1 and f".{_ROUTER_PART}" not in tensor.name
    }
    return DTYPE_OF_ENCODING.get(encodings.pop(), "bfloat16") if len(encodings) == 1 else "bfloat16"


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for key in keys for i in fields.token_ids(f"tokenizer.ggml.{key}")))


def _entries(tensor: GgufTensor, spec: ModelSpec, kind: GgufArchitecture) -> list[TensorEntry]:
    name = hugging_face_name(tensor.name, kind, spec.moe is not None)
    if name is None:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name} belongs to no {spec.family} model that is supported; running without "
            "it would give wrong answers"
        )
    permuted_heads = 0
    if kind.has_rope_pairs:
        heads_of = {".self_attn.q_proj.": spec.num_heads, ".self_attn.k_proj.": spec.num_kv_heads}
        permuted_heads = next((heads for part, heads in heads_of.items() if part in name), 0)
    is_gate = name.endswith(".shared_expert_gate.weight") and len(tensor.shape) == 1
    entry = TensorEntry(
        name=name,
        file=str(tensor.file),
        offset_bytes=tensor.offset_bytes,
        num_bytes=tensor.num_bytes,
        shape=(1, *tensor.shape) if is_gate else tensor.shape,
        encoding=tensor.encoding,
        stored_name=tensor.name,
        rope_permuted_heads=permuted_heads,
    )
    return [entry] if spec.moe is None or EACH not in name else one_entry_each(entry, spec.moe.num_experts)
