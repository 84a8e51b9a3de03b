"""Writes small checkpoint files by hand, whole or damaged, without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 3, 64, 4, 2, 96, 300
HEAD_DIM = HIDDEN // HEADS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def tensor_shapes(has_head: bool = True) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of the small model."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if has_head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[prefix + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    return shapes


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> Path:
    """Zeros of these shapes."""
    item_bytes = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8}[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * item_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    return write_raw_safetensors(path, header, end)


def write_raw_safetensors(path: Path, header: dict[str, Any], num_data_bytes: int) -> Path:
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(num_data_bytes))
    return path


def write_hf_directory(directory: Path, changes: dict[str, Any] | None = None, *, dtype: str = "F32") -> Path:
    """The small model; `changes` are made to its config (a value of ... removes the key)."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in {**CONFIG, **(changes or {})}.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensor_shapes(), dtype)
    return directory


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP_LEVEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """The inverse of what Stageline does, written separately."""
    stem, kind = name.rsplit(".", 1)
    if stem in _GGUF_TOP_LEVEL:
        return f"{_GGUF_TOP_LEVEL[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"


def model_writer(path: Path, architecture: str = "llama") -> gguf.GGUFWriter:
    """A writer that has the small model's metadata; add what else is wanted, then `finish` it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    return writer


def add_model_tensors(writer: gguf.GGUFWriter, has_head: bool = True) -> None:
    rng = np.random.default_rng(0)
    for name, shape in tensor_shapes(has_head).items():
        writer.add_tensor(gguf_name(name), rng.standard_normal(shape, dtype=np.float32))


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf_model(path: Path, architecture: str = "llama", has_head: bool = True) -> Path:
    writer = model_writer(path, architecture)
    add_model_tensors(writer, has_head)
    finish(writer)
    return path


def split_gguf(model: Path, folder: Path, max_tensors: int, is_first_without_tensors: bool = False) -> list[Path]:
    """The same model in files of at most so many tensors, NAME-00001-of-0000N.gguf in `folder`, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(
        folder / model.name, architecture, split_max_tensors=max_tensors, small_first_shard=is_first_without_tensors
    )
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return sorted(folder.glob(f"{model.stem}-*.gguf"))
