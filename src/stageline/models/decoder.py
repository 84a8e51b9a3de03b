"""One stage's part of a decoder-only model. The only model code that asks "first stage? last stage?"."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.tensor_shards import rank_spec
from stageline.models.family import WeightReader
from stageline.models.recorded_blocks import RecordedBlocks, record_blocks
from stageline.models.registry import load_family
from stageline.parallel.tensor_parallel import ALONE, TensorParallel


class DecoderStage:
    """Consecutive layers of a model, with the embedding before the first layer and the head behind the last.

    Args:
        layers: which layers, half-open; only their weights are read.
        reader: gives this rank's part of each weight.
        max_model_len: tokens; the longest sequence.
        ranks: that share these layers; all of them do the same with the same inputs.
    Raises: CheckpointError if a weight is missing or misshapen, or the family is unknown.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        reader: WeightReader,
        backend: AttentionBackend,
        max_model_len: int,
        ranks: TensorParallel = ALONE,
    ) -> None:
        own_spec = rank_spec(spec, ranks.size, ranks.rank)
        family = self._family = load_family(spec.family)(own_spec, reader, backend, max_model_len, ranks)
        self.is_first = layers.start == 0
        self.is_last = layers.stop == spec.num_layers
        self._embedding = family.embedding() if self.is_first else None
        self._block_of = {layer_index: family.block(layer_index) for layer_index in layers}
        self._head = family.head() if self.is_last else None
        self._like = torch.zeros(1, spec.hidden_size, dtype=reader.dtype, device=reader.device)
        self.device = reader.device
        self._caches: Sequence[LayerCache] = ()
        self._recorded: RecordedBlocks | None = None

    def use(self, caches: Sequence[LayerCache], max_tokens: int) -> None:
        """Take a KV cache, of which nothing is known yet.

        Args:
            caches: one per layer of the stage, in order.
            max_tokens: of a microbatch.
        """
        assert len(caches) == len(self._block_of)
        self._caches = caches
        has_window_blocks = any(cache.has_window_blocks for cache in caches)
        self._recorded = record_blocks(self._run_blocks, self._like, max_tokens, has_window_blocks)

    def release(self) -> None:
        """Forget the KV cache, so that its memory is free for another."""
        self._caches, self._recorded = (), None

    def hold(self, layers: range) -> None:
        """Have these layers: those that are there stay, the others are read, the rest is dropped; no cache is in use.

        Raises: CheckpointError.
        """
        held = {layer_index: block for layer_index, block in self._block_of.items() if layer_index in layers}
        self._block_of = held  # what is dropped is free before anything is read
        self._block_of = {layer: held[layer] if layer in held else self._family.block(layer) for layer in layers}

    def forward(
        self, inputs: torch.Tensor, metadata: AttentionMetadata, on_item: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Run the stage's layers on the KV cache in use.

        Args:
            inputs: int64 token ids [tokens] on the first stage, else hidden states [tokens, hidden]; not changed.
            on_item: called after the embedding's place, and after every layer.
        Returns: hidden states [tokens, hidden], the residual added: the one tensor that crosses to the next stage.
        """
        embedded = inputs if self._embedding is None else self._embedding(inputs)
        if on_item is not None:
            on_item()
        hidden_states, residual = (self._recorded or self._run_blocks)(embedded, metadata, on_item)
        return hidden_states + residual

    def _run_blocks(
        self, inputs: torch.Tensor, metadata: AttentionMetadata, on_block: Callable[[], None] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Block after block. Returns: (hidden states, residual), whose sum is the output of the last one."""
        hidden_states: torch.Tensor = inputs
        residual: torch.Tensor | None = None
        for block, cache in zip(self._block_of.values(), self._caches, strict=True):
            hidden_states, residual = block(hidden_states, residual, metadata.of(cache), cache)
            if on_block is not None:
                on_block()
        assert residual is not None, "a stage has a layer"
        return hidden_states, residual

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden] from the last stage's `forward`. Returns: float32 [rows, vocab]."""
        assert self._head is not None, "only the last stage has a head"
        return self._head(hidden_states)

    def likeliest(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """See `stageline.models.family.Head.likeliest`."""
        assert self._head is not None, "only the last stage has a head"
        return self._head.likeliest(hidden_states)
