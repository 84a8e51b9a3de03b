"""Attention to the rows of latent attention by this project's C++ kernels: one key head, whose keys are its values too.

One idea: rows lie in a block one behind the other, as tokens came; the kernel packs a tile of them once for all heads
of a token, which is little beside what many heads compute with it.
"""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.kernels.cpu import CpuKernels
from stageline.kernels.program import result


class KernelLatentAttention:
    """Scores and weighted sums of rows. Keeps nothing but scratch memory; one per stage."""

    def __init__(self, library: CpuKernels) -> None:
        self._library = library
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._scratch_is_for: tuple[int, int, torch.dtype] | None = None

    def attend(
        self, queries: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache, scale: float
    ) -> torch.Tensor:
        """queries: [tokens, num_heads, row_size], their rows already stored. Returns: the same shape."""
        return self._library.attention(
            queries,
            cache.keys,
            cache.values,
            metadata.query_starts,
            metadata.context_lens,
            metadata.block_tables,
            scale,
            None,
            self._scratch_for(queries),
            is_latent=True,
        )

    def _scratch_for(self, queries: torch.Tensor) -> torch.Tensor:
        shape = queries.shape[1], queries.shape[2], queries.dtype
        if shape != self._scratch_is_for:
            num_bytes = self._library.attention_scratch_bytes(shape[0], 1, shape[1], shape[2], is_latent=True)
            self._scratch, self._scratch_is_for = result((num_bytes,), torch.uint8), shape
        return self._scratch
