"""gpt-oss: Llama with sinks in its attention, a window on every other layer, and experts of its own kind."""

from __future__ import annotations

from stageline.models.llama import MLP, LlamaFamily
from stageline.models.read_experts import ExpertNames, read_moe, read_packed_moe

NAMES = ExpertNames(router="router")


class GptOssFamily(LlamaFamily):
    """See `stageline.models.family`."""

    def mlp(self, layer_index: int) -> MLP:
        prefix = f"model.layers.{layer_index}.mlp"
        assert self.spec.moe is not None, "the family has experts"
        if self.spec.moe.is_packed:
            return read_packed_moe(self.reader, self.spec, prefix)
        return read_moe(self.reader, self.spec, prefix, NAMES)


FAMILY = GptOssFamily
