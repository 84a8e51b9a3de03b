"""A Hugging Face directory: config.json, safetensors (one file or shards with an index)."""

from __future__ import annotations

from pathlib import Path, PurePath

from msgspec.structs import replace

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.encodings import DTYPE_OF_ENCODING
from stageline.checkpoint.fields import Fields, read_json_object
from stageline.checkpoint.gguf_parts import files_by_model
from stageline.checkpoint.hf_config import spec_from_config
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.quantization import read_quantization
from stageline.checkpoint.quantized_tensors import join_quantized
from stageline.checkpoint.safetensors_index import read_safetensors_index
from stageline.errors import CheckpointError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_hf_directory(directory: Path) -> Checkpoint:
    """Args: directory: with config.json and model.safetensors, or an index of shards.
    Raises: CheckpointError.
    """
    config_path = directory / CONFIG
    if not config_path.is_file():
        wanted = f"looked for {CONFIG} with {SINGLE} or {INDEX}"
        raise CheckpointError(f"{directory} has no {CONFIG}; {wanted}{_hint(directory)}")
    config = read_json_object(config_path)
    generation_config = read_optional_json(directory / GENERATION_CONFIG)
    tensors = _index_tensors(directory)
    spec = spec_from_config(config, generation_config, str(config_path), _stored_dtype(tensors))
    if (quantization := read_quantization(Fields(config, str(config_path)))) is not None:
        tensors = join_quantized(tensors, quantization)
    if spec.rope.pairs_neighbours and spec.mla is None:
        tensors = {name: _with_pairs(entry, spec) for name, entry in tensors.items()}
    return Checkpoint(path=str(directory), spec=spec, tensors=tensors)


def has_safetensors(directory: Path) -> bool:
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def _with_pairs(entry: TensorEntry, spec: ModelSpec) -> TensorEntry:
    """Queries and keys whose rotated pairs are neighbours are put into halves as they are read."""
    heads_of = {".self_attn.q_proj.": spec.num_heads, ".self_attn.k_proj.": spec.num_kv_heads}
    heads = next((heads for part, heads in heads_of.items() if part in entry.name), 0)
    return replace(entry, rope_permuted_heads=heads, rope_permuted_dim=spec.rope.rotary_dim) if heads else entry


def read_optional_json(path: Path) -> dict[str, object]:
    """The file's object, or an empty one if there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def _hint(directory: Path) -> str:
    files = [*directory.glob("*.gguf"), *directory.glob("*/*.gguf")]
    models = files_by_model(str(file.relative_to(directory)) for file in files)
    return f". There is {models[0][0]}: give the path of that file itself" if models else ""


def _stored_dtype(tensors: dict[str, TensorEntry]) -> str:
    embedding = tensors.get("model.embed_tokens.weight")
    return DTYPE_OF_ENCODING.get(embedding.encoding, "float32") if embedding else "float32"


def _index_tensors(directory: Path) -> dict[str, TensorEntry]:
    if (directory / INDEX).is_file():
        tensors = _index_shards(directory)
    elif (directory / SINGLE).is_file():
        tensors = read_safetensors_index(directory / SINGLE)
    else:
        pickled = any(directory.glob("pytorch_model*.bin"))
        note = " (pytorch_model.bin is not read, unpickling runs code: convert it to safetensors)" if pickled else ""
        raise CheckpointError(f"{directory} has no weights; looked for {SINGLE} and {INDEX}{note}{_hint(directory)}")
    # Old checkpoints store this buffer; it is computed from the config instead.
    return {name: entry for name, entry in tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _index_shards(directory: Path) -> dict[str, TensorEntry]:
    index_path = directory / INDEX
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing or empty; it must name a file for every tensor")
    shards: dict[str, dict[str, TensorEntry]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or PurePath(shard).name != shard:
            raise CheckpointError(f"{index_path}: tensor {name} is in {shard!r}, which is not a plain file name")
        if shard not in shards:
            if not (directory / shard).is_file():
                missing = sum(1 for other in weight_map.values() if other == shard)
                raise CheckpointError(
                    f"{directory} lacks the shard {shard}, which holds {missing} of {len(weight_map)} tensors"
                )
            shards[shard] = read_safetensors_index(directory / shard)
        if name not in shards[shard]:
            raise CheckpointError(f"{index_path}: tensor {name} should be in {shard}, but that file does not have it")
        tensors[name] = shards[shard][name]
    return tensors
