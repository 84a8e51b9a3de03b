"""OLMo 2: norms behind attention and MLP instead of in front, and on all queries and all keys of a token."""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.layers.attention import AttentionShape
from stageline.layers.norm import QueryKeyNorm, RMSNorm, SharedQueryKeyNorm
from stageline.layers.residual import add
from stageline.models.family import Block
from stageline.models.llama import MLP, LlamaFamily, SelfAttention


class Olmo2Family(LlamaFamily):
    """See `stageline.models.family`."""

    def block(self, layer_index: int) -> Block:
        prefix = f"model.layers.{layer_index}"
        return Olmo2Block(
            attention=self.whole(self.attention(layer_index)),
            after_attention=self.norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.whole(self.mlp(layer_index)),
            after_mlp=self.norm(f"{prefix}.post_feedforward_layernorm"),
        )

    def query_key_norm(self, prefix: str, shape: AttentionShape) -> QueryKeyNorm:
        query_size, key_size, _ = shape.qkv_sizes
        query_weight = self.norm_weight(f"{prefix}.q_norm", query_size)
        key_weight = self.norm_weight(f"{prefix}.k_norm", key_size)
        if self.ranks.size > 1:
            return SharedQueryKeyNorm(query_weight, key_weight, self.spec.rms_norm_eps, self.ranks)
        return QueryKeyNorm(query_weight, key_weight, self.spec.rms_norm_eps)


class Olmo2Block:
    """x + after(attention(x)), and the same with the MLP."""

    def __init__(self, attention: SelfAttention, after_attention: RMSNorm, mlp: MLP, after_mlp: RMSNorm) -> None:
        self._attention = attention
        self._after_attention = after_attention
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
        x = hidden_states if residual is None else add(hidden_states, residual)
        attended, _ = self._after_attention(self._attention(x, metadata, cache))
        x = add(attended, x)
        computed, _ = self._after_mlp(self._mlp(x))
        return computed, x


FAMILY = Olmo2Family
