"""Mixtral: Llama with experts in place of the MLP."""

from __future__ import annotations

from stageline.models.llama import MLP, LlamaFamily
from stageline.models.read_experts import ExpertNames, read_moe

NAMES = ExpertNames(gate="w1", up="w3", down="w2")


class MixtralFamily(LlamaFamily):
    """See `stageline.models.family`."""

    def mlp(self, layer_index: int) -> MLP:
        return read_moe(self.reader, self.spec, f"model.layers.{layer_index}.block_sparse_moe", NAMES)


FAMILY = MixtralFamily
