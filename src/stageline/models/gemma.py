"""Gemma 2 and 3: every sublayer between two norms; scales, caps, windows and frequencies are in the spec.

Gemma 3 has a norm on each head's queries and keys besides.
"""

from __future__ import annotations

from stageline.layers.attention import AttentionShape
from stageline.layers.norm import QueryKeyNorm
from stageline.models.family import Block
from stageline.models.llama import LlamaFamily
from stageline.models.sandwich_block import SandwichBlock


class GemmaFamily(LlamaFamily):
    """See `stageline.models.family`."""

    def block(self, layer_index: int) -> Block:
        prefix = f"model.layers.{layer_index}"
        return SandwichBlock(
            before_attention=self.norm(f"{prefix}.input_layernorm"),
            attention=self.whole(self.attention(layer_index)),
            after_attention=self.norm(f"{prefix}.post_attention_layernorm"),
            before_mlp=self.norm(f"{prefix}.pre_feedforward_layernorm"),
            mlp=self.whole(self.mlp(layer_index)),
            after_mlp=self.norm(f"{prefix}.post_feedforward_layernorm"),
        )

    def query_key_norm(self, prefix: str, shape: AttentionShape) -> QueryKeyNorm | None:
        if self.spec.family == "gemma2":
            return None
        query_weight = self.norm_weight(f"{prefix}.q_norm", shape.head_dim)
        key_weight = self.norm_weight(f"{prefix}.k_norm", shape.head_dim)
        return QueryKeyNorm(query_weight, key_weight, self.spec.rms_norm_eps)


FAMILY = GemmaFamily
