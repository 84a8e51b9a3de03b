"""One stage's part of a decoder-only model. The only model code that asks "first stage? last stage?"."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.checkpoint.model_spec import ModelSpec
from stageline.models.family import WeightReader
from stageline.models.registry import load_family


class DecoderStage:
    """Consecutive layers of a model, with the embedding before the first layer and the head behind the last.

    Args:
        layers: which layers, half-open; only their weights are read.
        max_model_len: tokens; the longest sequence.
    Raises: CheckpointError if a weight is missing or misshapen, or the family is unknown.
    """

    def __init__(
        self, spec: ModelSpec, layers: range, reader: WeightReader, backend: AttentionBackend, max_model_len: int
    ) -> None:
        family = load_family(spec.family)(spec, reader, backend, max_model_len)
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.num_layers
        self._embedding = family.embedding() if self.is_first else None
        self._blocks = [family.block(layer_index) for layer_index in layers]
        self._head = family.head() if self.is_last else None

    def forward(
        self, inputs: torch.Tensor, metadata: AttentionMetadata, caches: Sequence[LayerCache]
    ) -> torch.Tensor:
        """Run the stage's layers.

        Args:
            inputs: int64 token ids [tokens] on the first stage, else hidden states [tokens, hidden]; not changed.
            caches: one per layer of the stage, in order.
        Returns: hidden states [tokens, hidden], the residual added: the one tensor that crosses to the next stage.
        """
        hidden_states = inputs if self._embedding is None else self._embedding(inputs)
        residual = None
        for block, cache in zip(self._blocks, caches, strict=True):
            hidden_states, residual = block(hidden_states, residual, metadata, cache)
        return hidden_states if residual is None else hidden_states + residual

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden] from the last stage's `forward`. Returns: float32 [rows, vocab]."""
        assert self._head is not None, "only the last stage has a head"
        return self._head(hidden_states)

    def likeliest(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """See `stageline.models.family.Head.likeliest`."""
        assert self._head is not None, "only the last stage has a head"
        return self._head.likeliest(hidden_states)
