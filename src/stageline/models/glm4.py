"""GLM-4: every sublayer between two norms, gate and up in one matrix."""

from __future__ import annotations

from stageline.layers.linear import GatedLinear
from stageline.models.family import Block
from stageline.models.llama import LlamaFamily
from stageline.models.read_linear import read_joined_gated_linear
from stageline.models.sandwich_block import SandwichBlock


class Glm4Family(LlamaFamily):
    """See `stageline.models.family`."""

    def block(self, layer_index: int) -> Block:
        prefix = f"model.layers.{layer_index}"
        return SandwichBlock(
            before_attention=self.norm(f"{prefix}.input_layernorm"),
            attention=self.whole(self.attention(layer_index)),
            after_attention=self.norm(f"{prefix}.post_self_attn_layernorm"),
            before_mlp=self.norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.whole(self.mlp(layer_index)),
            after_mlp=self.norm(f"{prefix}.post_mlp_layernorm"),
        )

    def gated(self, prefix: str) -> GatedLinear:
        spec = self.spec
        name = f"{prefix}.gate_up_proj"
        return read_joined_gated_linear(self.reader, name, spec.intermediate_size, spec.hidden_size, spec.activation)


FAMILY = Glm4Family
