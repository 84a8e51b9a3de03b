"""Sampling settings a model's authors recommend: generation_config.json, or `general.sampling.*` of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.gguf_container import read_gguf
from stageline.checkpoint.hf_directory import GENERATION_CONFIG, read_optional_json
from stageline.errors import CheckpointError


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint recommends; None where it is silent. The names are those of generation_config.json."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """Raises: CheckpointError if a value is of the wrong type."""
    values: Mapping[str, object]
    if checkpoint.is_gguf:
        metadata = read_gguf(Path(checkpoint.path)).metadata
        values = {name: metadata[key] for name, key in _GGUF_KEYS.items() if key in metadata}
        source = checkpoint.path
    else:
        source = str(Path(checkpoint.path) / GENERATION_CONFIG)
        values = read_optional_json(Path(source))
    try:
        return msgspec.convert(values, GenerationDefaults)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: {error}") from error
