"""Self-attention of one layer: project, norm, rotate, store keys and values, attend, project back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.layers.linear import Linear
from stageline.layers.norm import QueryKeyNorm
from stageline.layers.rotary import Rotary


@dataclass(frozen=True)
class AttentionShape:
    """What attention needs to know of a layer.

    Args:
        sliding_window: tokens a token attends to, itself included; None for all before it.
        scale: what products of queries and keys are multiplied by; None for 1 / sqrt(head_dim).
        cap: scores are bent to stay within ± this; None for none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    scale: float | None = None
    cap: float | None = None

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Output features of the query, key and value projections."""
        kv_size = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, kv_size, kv_size


class Attention:
    """Causal self-attention with rotary positions over a paged cache.

    Args:
        qkv: fused projection of the layer's input; queries, keys, values side by side.
        out: projection back to the hidden size.
        rotary: None for a layer without positions.
        norm: of queries and keys, in front of their rotation.
        sinks: float32 [num_heads], see `AttentionBackend.attend`.
    """

    def __init__(
        self,
        shape: AttentionShape,
        qkv: Linear,
        out: Linear,
        rotary: Rotary | None,
        backend: AttentionBackend,
        norm: QueryKeyNorm | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._shape = shape
        self._qkv = qkv
        self._out = out
        self._rotary = rotary
        self._backend = backend
        self._norm = norm
        self._sinks = sinks
        self._scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: [tokens, hidden]; the tokens' keys and values are in the cache afterwards."""
        shape, num_tokens = self._shape, x.shape[0]
        projected = self._qkv(x)
        if self._norm is not None:
            projected = self._norm(projected, *shape.qkv_sizes[:2])
        heads = projected.view(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        queries = self._backend.rotate_and_store(heads, self._rotary, metadata, cache)
        attended = self._backend.attend(
            queries, metadata, cache, self._scale, shape.sliding_window, shape.cap, self._sinks
        )
        return self._out(attended.flatten(1))
