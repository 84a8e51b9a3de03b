"""Qwen3-MoE: Qwen3 with experts in place of some layers' MLP."""

from __future__ import annotations

from stageline.models.llama import MLP
from stageline.models.qwen3 import Qwen3Family
from stageline.models.read_experts import ExpertNames, read_moe


class Qwen3MoeFamily(Qwen3Family):
    """See `stageline.models.family`."""

    def mlp(self, layer_index: int) -> MLP:
        if not self.spec.has_experts(layer_index):
            return super().mlp(layer_index)
        return read_moe(self.reader, self.spec, f"model.layers.{layer_index}.mlp", ExpertNames())


FAMILY = Qwen3MoeFamily
