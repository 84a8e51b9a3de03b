"""The bytes of the KV cache: two tensors per local layer. Who owns which block is decided elsewhere.

Layers with a window may have fewer blocks than the others, and then have blocks of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline.attention.backend import LayerCache
from stageline.checkpoint.model_spec import ModelSpec
from stageline.errors import ConfigError
from stageline.kv.kv_size import kv_bytes_per_block
from stageline.worker.device import free_memory_bytes, zeros


def allocate_kv_tensors(
    spec: ModelSpec,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    windowed: Sequence[bool] = (),
    num_window_blocks: int = 0,
) -> list[LayerCache]:
    """Allocate the cache of `num_layers` layers, zeroed: what was never written must not be NaN.

    Args:
        windowed: [layers] those that have `num_window_blocks` blocks of their own; empty if none has.
    Raises: ConfigError with the numbers if it does not fit.
    """
    blocks = [num_window_blocks if is_windowed else num_blocks for is_windowed in windowed or [False] * num_layers]
    needed_bytes = sum(blocks) * kv_bytes_per_block(spec, 1, dtype.itemsize, block_size)
    free_bytes = free_memory_bytes(device)
    is_latent = spec.mla is not None
    shape = (spec.num_kv_heads, block_size, spec.head_dim)
    if spec.mla is not None:
        shape = (1, block_size, spec.mla.row_size)
    # A CPU hands out zeroed pages on first use only, so an allocation that is too large would kill the process later.
    if needed_bytes > free_bytes:
        raise ConfigError(_does_not_fit(needed_bytes, free_bytes, num_blocks, num_layers, device))
    try:
        # A latent row is key and value in one.
        tensors = zeros([(count, *shape) for count in blocks for _ in range(1 if is_latent else 2)], dtype, device)
        keys, values = (tensors, tensors) if is_latent else (tensors[::2], tensors[1::2])
        return [LayerCache(*both) for both in zip(keys, values, windowed or [False] * num_layers, strict=True)]
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        raise ConfigError(_does_not_fit(needed_bytes, free_bytes, num_blocks, num_layers, device)) from error


def _does_not_fit(
    needed_bytes: int, free_bytes: int, num_blocks: int, num_layers: int, device: torch.device
) -> str:
    return (
        f"the KV cache of {num_blocks} blocks for {num_layers} layers needs {needed_bytes / 2**20:.0f} MiB on "
        f"{device}, where {free_bytes / 2**20:.0f} MiB are free; lower --kv-cache-memory or give this stage fewer "
        "layers"
    )
