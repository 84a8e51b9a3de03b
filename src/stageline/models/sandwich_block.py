"""A decoder layer whose attention and MLP stand between two norms, the second in front of the residual addition."""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.layers.norm import RMSNorm
from stageline.models.llama import MLP, SelfAttention


class SandwichBlock:
    """x + after(attention(before(x))), and the same with the MLP."""

    def __init__(
        self,
        before_attention: RMSNorm,
        attention: SelfAttention,
        after_attention: RMSNorm,
        before_mlp: RMSNorm,
        mlp: MLP,
        after_mlp: RMSNorm,
    ) -> None:
        self._before_attention = before_attention
        self._attention = attention
        self._after_attention = after_attention
        self._before_mlp = before_mlp
        self._mlp = mlp
        self._after_mlp = after_mlp

    def __call__(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        metadata: AttentionMetadata,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `stageline.models.family.Block`."""
        normed, residual = self._before_attention(hidden_states, residual)
        attended, _ = self._after_attention(self._attention(normed, metadata, cache))
        normed, residual = self._before_mlp(attended, residual)
        computed, _ = self._after_mlp(self._mlp(normed))
        return computed, residual
