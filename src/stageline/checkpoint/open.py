"""The one function that opens a model, whatever names it: a directory, a GGUF file or a hub id."""

from __future__ import annotations

from pathlib import Path

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.encodings import ENCODINGS
from stageline.checkpoint.gguf_container import is_gguf
from stageline.checkpoint.gguf_file import open_gguf_file
from stageline.checkpoint.gguf_parts import only_model
from stageline.checkpoint.hf_directory import has_safetensors, open_hf_directory
from stageline.checkpoint.hub import is_hub_id, resolve_hub_model
from stageline.checkpoint.stage_tensors import stage_tensor_names
from stageline.errors import CheckpointError


def open_checkpoint(model: str) -> Checkpoint:
    """Read everything about a model but its weights.

    Args:
        model: a Hugging Face directory, a GGUF file (of a split model any), a directory with one GGUF model, or a hub
            id (`organisation/name`, or `organisation/name:Q4_K_M` of GGUF models).
    Raises: CheckpointError, saying what was looked for and what was found.
    """
    checkpoint = _open(model)
    _check_complete(checkpoint)
    return checkpoint


def _open(model: str) -> Checkpoint:
    path = Path(model).expanduser()
    if not path.exists() and is_hub_id(model):
        path = resolve_hub_model(model)
    if path.is_dir():
        file = None if has_safetensors(path) else only_model(path)
        return open_hf_directory(path) if file is None else open_gguf_file(file)
    if path.is_file():
        if not is_gguf(path):
            raise CheckpointError(
                f"{path} is a file but not GGUF; give a GGUF file, or the directory with config.json and the weights"
            )
        return open_gguf_file(path)
    if path.exists():
        raise CheckpointError(f"{path} is neither a file nor a directory")
    raise CheckpointError(
        f"{model!r} does not exist; give a Hugging Face directory, a GGUF file, or a hub id such as organisation/name "
        "(of GGUF models organisation/name:Q4_K_M)"
    )


def _check_complete(checkpoint: Checkpoint) -> None:
    """Every layer and both ends are there, in encodings that can be read: said now, not when a worker loads."""
    spec = checkpoint.spec
    head = [] if spec.tie_word_embeddings else ["lm_head.weight"]
    for name in ("model.embed_tokens.weight", "model.norm.weight", *head):
        if name not in checkpoint.tensors:
            raise CheckpointError(f"{checkpoint.path} has no tensor {name} among its {len(checkpoint.tensors)}")
    present = {name.split(".")[2] for name in checkpoint.tensors if name.startswith("model.layers.")}
    for layer in range(spec.num_layers):
        if str(layer) not in present:
            raise CheckpointError(
                f"{checkpoint.path}: the model has {spec.num_layers} layers, but there is no tensor of layer {layer} "
                f"(tensors of {len(present)} layers are there)"
            )
    for name in stage_tensor_names(checkpoint, range(spec.num_layers), is_first=True, is_last=True):
        entry = checkpoint.tensors[name]
        if entry.encoding not in ENCODINGS and not entry.parts:
            raise CheckpointError(
                f"{entry.file}: tensor {name} is of type {entry.encoding}, which is not supported; supported are "
                f"{', '.join(ENCODINGS)}"
            )
