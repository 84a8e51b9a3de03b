"""What a model family has to provide: an embedding, a block, a head. It never learns what a rank or a stage is.

Parts read their weights when they are built: `reader.read(name, shape)` gives the tensor in the compute dtype on the
stage's device, or raises CheckpointError naming the tensor. So a stage that builds only its own layers reads only their
bytes. One `Family` object belongs to one stage, so what its parts share (rotary tables, a tied matrix) lives in it.

Where ranks share each layer, the spec and the reader are of the rank's smaller model, and `ranks` makes what it
computes whole again: LlamaFamily does it where embedding, attention, MLP and head end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.checkpoint.model_spec import ModelSpec
from stageline.kernels.quantized import QuantizedMatrix
from stageline.parallel.tensor_parallel import ALONE, TensorParallel


class WeightReader(Protocol):
    """Reads one checkpoint's tensors for one stage (`stageline.weights.reader`)."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The whole tensor, in the compute dtype, on the device. Raises: CheckpointError."""
        ...

    def read_float32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `read`, but float32 whatever the compute dtype. Raises: CheckpointError."""
        ...

    def read_part(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """As `read`, of a tensor [parts, ...] one part alone. Raises: CheckpointError."""
        ...

    def read_transposed_part(
        self, name: str, shape: tuple[int, int, int], index: int, runs: Sequence[slice]
    ) -> list[torch.Tensor] | list[QuantizedMatrix]:
        """As `read_part`, of the transposed part these runs of rows; all may come as they are quantised.

        Raises: CheckpointError.
        """
        ...

    def read_matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor | QuantizedMatrix:
        """As `read`; a matrix may also come as it is quantised in the checkpoint. Raises: CheckpointError."""
        ...


class Block(Protocol):
    """One decoder layer."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        metadata: AttentionMetadata,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states, residual: [tokens, hidden]; the layer's input is their sum (residual None counts as zero).

        Returns: (hidden_states, residual) whose sum is the layer's output, so that the next norm can fuse the addition.
        """
        ...


class Family(Protocol):
    """Builds the parts of one model for one stage."""

    def embedding(self) -> Embedding: ...

    def block(self, layer_index: int) -> Block: ...

    def head(self) -> Head: ...


class FamilyType(Protocol):
    """What a family's module calls FAMILY: makes the object that builds one stage's parts."""

    def __call__(
        self,
        spec: ModelSpec,
        reader: WeightReader,
        backend: AttentionBackend,
        max_model_len: int,
        ranks: TensorParallel = ALONE,
    ) -> Family: ...


class Embedding(Protocol):
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns: [tokens, hidden]."""
        ...


class Head(Protocol):
    """Final norm and LM head."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden], residual already added. Returns: float32 logits [rows, vocab]."""
        ...

    def likeliest(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The place of each row's largest logit, of equals the first: int64 [rows]; None if logits are as quick."""
        ...
