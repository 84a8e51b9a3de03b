"""Qwen2-MoE: Qwen2 with experts in place of some layers' MLP, beside an MLP that all tokens share by a gate."""

from __future__ import annotations

from stageline.models.llama import MLP, LlamaFamily
from stageline.models.read_experts import ExpertNames, read_moe

NAMES = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")


class Qwen2MoeFamily(LlamaFamily):
    """See `stageline.models.family`."""

    def mlp(self, layer_index: int) -> MLP:
        if not self.spec.has_experts(layer_index):
            return super().mlp(layer_index)
        return read_moe(self.reader, self.spec, f"model.layers.{layer_index}.mlp", NAMES)


FAMILY = Qwen2MoeFamily
