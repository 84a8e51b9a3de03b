"""Which tensors a stage needs, and how large they are in its memory and in the file.

The first stage adds the embedding; the last adds the final norm and the LM head, which is the embedding when tied.
"""

from __future__ import annotations

from collections.abc import Callable

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.encodings import PACKED_BLOCK_BYTES, PACKED_BLOCK_ELEMENTS
from stageline.checkpoint.quantized_tensors import packed_block_bytes
from stageline.checkpoint.tensor_shards import RankCuts

# Latent attention's matrix from rows to keys and values: it is taken apart head by head, and one half transposed.
_FROM_ROWS = ".kv_b_proj.weight"
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
    wanted = tuple(prefixes)
    return [name for name in checkpoint.tensors if name.startswith(wanted)]


def stage_weight_bytes(
    checkpoint: Checkpoint,
    layers: range,
    is_first: bool,
    is_last: bool,
    itemsize: int,
    keeps_quantized: bool = False,
    num_ranks: int = 1,
) -> int:
    """Bytes of the stage's weights in memory, at `itemsize` bytes a number.

    Args:
        keeps_quantized: matrices stay quantised where they can.
        num_ranks: that share them; the result is the first rank's.
    """
    entries = [checkpoint.tensors[name] for name in stage_tensor_names(checkpoint, layers, is_first, is_last)]
    share = _share_of_first_rank(checkpoint, num_ranks)
    return sum(
        share(
            entry,
            packed_bytes(entry) if keeps_quantized and can_stay_quantized(entry) else entry.num_elements * itemsize,
        )
        for entry in entries
    )


def _share_of_first_rank(checkpoint: Checkpoint, num_ranks: int) -> Callable[[TensorEntry, int], int]:
    """What the first of the ranks has of a tensor's bytes."""
    cuts = RankCuts(checkpoint.spec, 0, num_ranks)

    def share(entry: TensorEntry, num_bytes: int) -> int:
        return cuts.own_bytes(entry.name, num_bytes)

    return share


def can_stay_quantized(entry: TensorEntry) -> bool:
    """Whether the tensor is a matrix, or those of all experts, that integer products can work on as it is."""
    is_matrix = (len(entry.shape) == 2 or bool(entry.parts)) and not entry.name.endswith(_FROM_ROWS)
    return is_matrix and not entry.becomes_float and _packed_block_bytes(entry) is not None


def packed_bytes(entry: TensorEntry) -> int:
    """Bytes in memory of a tensor that stays quantised."""
    block_bytes = _packed_block_bytes(entry)
    assert block_bytes is not None, "the tensor can stay quantised"
    return entry.num_elements // PACKED_BLOCK_ELEMENTS * block_bytes


def _packed_block_bytes(entry: TensorEntry) -> int | None:
    return packed_block_bytes(entry) if entry.parts else PACKED_BLOCK_BYTES.get(entry.encoding)


def stage_file_bytes(
    checkpoint: Checkpoint, layers: range, is_first: bool, is_last: bool, num_ranks: int = 1
) -> int:
    """Bytes that loading the stage reads from the checkpoint's files; of the first rank, if ranks share it."""
    names = stage_tensor_names(checkpoint, layers, is_first, is_last)
    share = _share_of_first_rank(checkpoint, num_ranks)
    return sum(share(checkpoint.tensors[name], checkpoint.tensors[name].num_bytes) for name in names)
