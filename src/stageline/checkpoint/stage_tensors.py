"""Which tensors a stage needs, and how large they are in its memory and in the file.

The first stage adds the embedding; the last adds the final norm and the LM head, which is the embedding when tied.
"""

from __future__ import annotations

from stageline.checkpoint.checkpoint import Checkpoint

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.", "model.norm.", "lm_head."


def stage_tensor_names(checkpoint: Checkpoint, layers: range, is_first: bool, is_last: bool) -> list[str]:
    """Args: layers: the stage's layers, half-open.
    Returns: names in the checkpoint's order; each once, also for a single stage whose embedding is tied.
    """
    prefixes = [f"model.layers.{layer}." for layer in layers]
    if is_first:
        prefixes.append(EMBEDDING)
    if is_last:
        prefixes += [FINAL_NORM, EMBEDDING if checkpoint.spec.tie_word_embeddings else LM_HEAD]
    wanted = set(prefixes)
    return [name for name in checkpoint.tensors if _prefix(name) in wanted]


def stage_weight_bytes(checkpoint: Checkpoint, layers: range, is_first: bool, is_last: bool, itemsize: int) -> int:
    """Bytes of the stage's weights in memory, at `itemsize` bytes a number."""
    names = stage_tensor_names(checkpoint, layers, is_first, is_last)
    return sum(checkpoint.tensors[name].num_elements for name in names) * itemsize


def stage_file_bytes(checkpoint: Checkpoint, layers: range, is_first: bool, is_last: bool) -> int:
    """Bytes that loading the stage reads from the checkpoint's files."""
    names = stage_tensor_names(checkpoint, layers, is_first, is_last)
    return sum(checkpoint.tensors[name].num_bytes for name in names)


def _prefix(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `model.layers.3.`; `lm_head.weight` -> `lm_head.`."""
    parts = name.split(".")
    if name.startswith("model.layers."):
        return ".".join(parts[:3]) + "."
    return ".".join(parts[:-1]) + "."
