"""How many bytes a KV cache takes: arithmetic that planning and the workers share."""

from __future__ import annotations

from stageline.checkpoint.model_spec import ModelSpec


def kv_bytes_per_token(spec: ModelSpec, num_layers: int, itemsize_bytes: int) -> int:
    """Bytes one token's keys and values take in the caches of `num_layers` layers.

    Args:
        itemsize_bytes: bytes per element of the cache: 4 for float32, 2 for bfloat16 and float16.
    """
    numbers = 2 * spec.num_kv_heads * spec.head_dim if spec.mla is None else spec.mla.row_size
    return num_layers * numbers * itemsize_bytes


def kv_bytes_per_block(spec: ModelSpec, num_layers: int, itemsize_bytes: int, block_size: int) -> int:
    """The same for a block of `block_size` tokens."""
    return block_size * kv_bytes_per_token(spec, num_layers, itemsize_bytes)
