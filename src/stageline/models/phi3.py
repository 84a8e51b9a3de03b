"""Phi 3, 3.5 and 4: Llama with queries, keys and values in one matrix, and gate and up in another."""

from __future__ import annotations

from stageline.layers.attention import AttentionShape
from stageline.layers.linear import GatedLinear, Linear
from stageline.models.llama import LlamaFamily
from stageline.models.read_linear import read_joined_gated_linear, read_linear


class Phi3Family(LlamaFamily):
    """See `stageline.models.family`."""

    def qkv(self, prefix: str, shape: AttentionShape) -> Linear:
        return read_linear(self.reader, f"{prefix}.qkv_proj", sum(shape.qkv_sizes), self.spec.hidden_size)

    def gated(self, prefix: str) -> GatedLinear:
        spec = self.spec
        name = f"{prefix}.gate_up_proj"
        return read_joined_gated_linear(self.reader, name, spec.intermediate_size, spec.hidden_size, spec.activation)


FAMILY = Phi3Family
