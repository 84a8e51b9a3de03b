"""Attention by this project's C++ kernels, on a CPU: keys and values lie in the cache as dot products read them.

One idea: the block table is followed and the cache multiplied where it lies, without a copy. The order of the bytes
within a block, and when it applies, is described in kernels/source/cache_layout.h.
"""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionMetadata, LayerCache, Rotation
from stageline.kernels.cpu import CpuKernels
from stageline.kernels.program import result


class CpuKernelAttention:
    """`AttentionBackend` in C++ for bfloat16 and float32; see there for shapes. Keeps nothing but scratch memory."""

    def __init__(self, library: CpuKernels) -> None:
        self._library = library
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_is_for: tuple[int, int, int, torch.dtype] | None = None

    def rotate_and_store(
        self, heads: torch.Tensor, rotation: Rotation | None, metadata: AttentionMetadata, cache: LayerCache
    ) -> torch.Tensor:
        return self._library.rotate_and_store(
            heads,
            None if rotation is None else rotation.tables(heads.dtype),
            metadata.positions,
            metadata.slot_mapping,
            cache.keys,
            cache.values,
        )

    def store(self, keys: torch.Tensor, values: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        heads = torch.cat((keys, values), 1)
        self._library.rotate_and_store(heads, None, metadata.positions, metadata.slot_mapping, cache.keys, cache.values)

    def attend(
        self,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        cache: LayerCache,
        scale: float,
        sliding_window: int | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._library.attention(
            queries,
            cache.keys,
            cache.values,
            metadata.query_starts,
            metadata.context_lens,
            metadata.block_tables,
            scale,
            sliding_window,
            self._scratch_for(queries, cache),
            cap,
            sinks,
        )

    def _scratch_for(self, queries: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """Depends on the heads' shape alone, so it is allocated once, whatever the microbatches are."""
        shape = queries.shape[1], cache.keys.shape[1], queries.shape[2], queries.dtype
        if shape != self._scratch_is_for:
            num_bytes = max(self._library.attention_scratch_bytes(*shape), self._scratch.numel())
            self._scratch, self._scratch_is_for = result((num_bytes,), torch.uint8), shape
        return self._scratch
