"""gpt-oss: Llama with sinks in its attention, a window on every other layer, and experts of its own kind."""

from __future__ import annotations

from stageline.models.llama import MLP, LlamaFamily
from stageline.models.read_experts import read_packed_moe


class GptOssFamily(LlamaFamily):
    """See `stageline.models.family`."""

    def mlp(self, layer_index: int) -> MLP:
        return read_packed_moe(self.reader, self.spec, f"model.layers.{layer_index}.mlp")


FAMILY = GptOssFamily
