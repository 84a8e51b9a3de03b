"""A GGUF file as a Checkpoint: its metadata becomes the ModelSpec, its tensor names become Hugging Face's."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.encodings import DTYPE_OF_ENCODING
from stageline.checkpoint.fields import Fields
from stageline.checkpoint.gguf_architectures import ARCHITECTURES, GgufArchitecture
from stageline.checkpoint.gguf_container import GgufFile, GgufTensor, read_gguf
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
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_ROPE_FREQUENCIES = "rope_freqs.weight"
LARGEST_HEAD_DIM = 65536


def open_gguf_file(path: Path) -> Checkpoint:
    """Raises: CheckpointError."""
    gguf = read_gguf(path)
    fields = Fields(gguf.metadata, str(path))
    architecture = fields.string("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported in GGUF; supported are {', '.join(ARCHITECTURES)}"
        )
    if fields.integer("split.count", default=1, lowest=0) > 1:
        raise CheckpointError(f"{path} is one part of several; join them with `llama-gguf-split --merge` first")
    kind = ARCHITECTURES[architecture]
    spec = kind.refine(fields, _spec(gguf, fields, architecture, kind.family))
    check_spec(spec, str(path))
    tensors = [_entry(gguf, tensor, spec, kind) for tensor in gguf.tensors if tensor.name != _ROPE_FREQUENCIES]
    return Checkpoint(path=str(path), spec=spec, tensors={entry.name: entry for entry in tensors})


def hugging_face_name(stored_name: str, kind: GgufArchitecture) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a name the architecture lacks."""
    if stored_name in _TOP_LEVEL:
        return _TOP_LEVEL[stored_name]
    match = _BLOCK_NAME.fullmatch(stored_name)
    part = None if match is None else kind.block_parts.get(match[2], _BLOCK_PARTS.get(match[2]))
    return None if match is None or part is None else f"model.layers.{int(match[1])}.{part}.{match[3]}"


def _spec(gguf: GgufFile, fields: Fields, architecture: str, family: str) -> ModelSpec:
    shapes = {tensor.name: tensor.shape for tensor in gguf.tensors}
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CheckpointError(f"{gguf.path}: tensor token_embd.weight is missing or not two-dimensional ({embedding})")
    if fields.integer(f"{architecture}.expert_count", default=0, lowest=0):
        raise CheckpointError(f"{gguf.path}: mixture-of-experts models are not supported (expert_count is above 0)")
    hidden_size = fields.integer(f"{architecture}.embedding_length")
    num_heads = fields.integer(f"{architecture}.attention.head_count")
    head_dim = fields.integer(f"{architecture}.attention.key_length", default=max(1, hidden_size // num_heads))
    return ModelSpec(
        family=family,
        num_layers=fields.integer(f"{architecture}.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer(f"{architecture}.attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer(f"{architecture}.feed_forward_length"),
        vocab_size=embedding[0],
        max_position_embeddings=fields.integer(f"{architecture}.context_length"),
        rms_norm_eps=_as_written(fields.number(f"{architecture}.attention.layer_norm_rms_epsilon")),
        rope=_rope(gguf, fields, architecture, head_dim),
        tie_word_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        attention_output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        sliding_window=fields.integer(f"{architecture}.attention.sliding_window", default=0, lowest=0) or None,
        dtype=_dtype(gguf),
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields),
    )


def _as_written(value: float) -> float:
    """Metadata are float32: 1e-05 comes back as 9.999999747378752e-06. The shortest decimal is what was meant."""
    for digits in range(1, 9):
        shortest = float(f"{value:.{digits}g}")
        if struct.pack("<f", shortest) == struct.pack("<f", value):
            return shortest
    return value


def _rope(gguf: GgufFile, fields: Fields, architecture: str, head_dim: int) -> RopeSpec:
    rotary_dim = fields.integer(f"{architecture}.rope.dimension_count", default=head_dim)
    if rotary_dim != head_dim:
        raise CheckpointError(f"{gguf.path}: only {rotary_dim} of {head_dim} dimensions rotate, which is not supported")
    theta = _as_written(fields.number(f"{architecture}.rope.freq_base", default=10000.0))
    kind = fields.string(f"{architecture}.rope.scaling.type", default="none")
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{gguf.path}: rope scaling {kind!r} is not supported; supported are none, linear")
    divisors = _frequency_divisors(gguf, head_dim)
    if kind == "none":
        return RopeSpec(theta=theta, frequency_divisors=divisors)
    factor = fields.number(f"{architecture}.rope.scaling.factor")
    return RopeSpec(theta=theta, kind="linear", factor=factor, frequency_divisors=divisors)


def _frequency_divisors(gguf: GgufFile, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1 and later: the frequency bands, already worked out, as a small float32 tensor."""
    tensor = next((tensor for tensor in gguf.tensors if tensor.name == _ROPE_FREQUENCIES), None)
    if tensor is None:
        return ()
    if tensor.encoding != "F32" or tensor.shape != (head_dim // 2,) or head_dim > LARGEST_HEAD_DIM:
        raise CheckpointError(
            f"{gguf.path}: tensor {tensor.name} is {tensor.encoding} of shape {tensor.shape}; expected F32 of "
            f"shape ({head_dim // 2},)"
        )
    with gguf.path.open("rb") as file:
        file.seek(tensor.offset_bytes)
        divisors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    if not all(divisor > 0 for divisor in divisors):
        raise CheckpointError(f"{gguf.path}: tensor {tensor.name} holds divisors that are not positive")
    return divisors


def _dtype(gguf: GgufFile) -> str:
    """The dtype of the matrices if they are plain floats; quantised models compute in bfloat16."""
    encodings = {tensor.encoding for tensor in gguf.tensors if len(tensor.shape) == 2}
    return DTYPE_OF_ENCODING.get(encodings.pop(), "bfloat16") if len(encodings) == 1 else "bfloat16"


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return tuple(dict.fromkeys(i for key in keys for i in fields.token_ids(f"tokenizer.ggml.{key}")))


def _entry(gguf: GgufFile, tensor: GgufTensor, spec: ModelSpec, kind: GgufArchitecture) -> TensorEntry:
    name = hugging_face_name(tensor.name, kind)
    if name is None:
        raise CheckpointError(
            f"{gguf.path}: tensor {tensor.name} belongs to no {spec.family} model that is supported; running without "
            "it would give wrong answers"
        )
    permuted_heads = 0
    if kind.has_rope_pairs:
        heads_of = {".self_attn.q_proj.": spec.num_heads, ".self_attn.k_proj.": spec.num_kv_heads}
        permuted_heads = next((heads for part, heads in heads_of.items() if part in name), 0)
    return TensorEntry(
        name=name,
        file=str(gguf.path),
        offset_bytes=tensor.offset_bytes,
        num_bytes=tensor.num_bytes,
        shape=tensor.shape,
        encoding=tensor.encoding,
        stored_name=tensor.name,
        rope_permuted_heads=permuted_heads,
    )
