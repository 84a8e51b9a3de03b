"""Qwen3: Llama with a norm on each head's queries and keys."""

from __future__ import annotations

from stageline.layers.attention import AttentionShape
from stageline.layers.norm import QueryKeyNorm
from stageline.models.llama import LlamaFamily


class Qwen3Family(LlamaFamily):
    """See `stageline.models.family`."""

    def query_key_norm(self, prefix: str, shape: AttentionShape) -> QueryKeyNorm:
        query_weight = self.norm_weight(f"{prefix}.q_norm", shape.head_dim)
        key_weight = self.norm_weight(f"{prefix}.k_norm", shape.head_dim)
        return QueryKeyNorm(query_weight, key_weight, self.spec.rms_norm_eps)


FAMILY = Qwen3Family
