"""The contract between a microbatch, a layer's cache and whatever computes attention.

The KV cache is paged: a layer's cache is two tensors of blocks, a request's block table lists the blocks that hold its
tokens in order, and `slot_mapping` says where each new token's key and value go. Block ids are the same on every layer.
What the bytes within a block mean is the backend's own business: it alone writes and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: two contiguous tensors [num_blocks, num_kv_heads, block_size, head_dim].

    The shape says how much room a block and a head have. In which order the block_size * head_dim elements lie there is
    known to the backend that stored them, and to nobody else.

    Args:
        has_window_blocks: whether its blocks are those that `AttentionMetadata.in_window` tells of.
    """

    keys: torch.Tensor
    values: torch.Tensor
    has_window_blocks: bool = False

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]


@dataclass(frozen=True)
class AttentionMetadata:
    """Where one microbatch's tokens stand; the same for all layers of a stage. Rows are requests, decodes first.

    Args:
        num_decode_rows: leading rows with a single new token.
        num_scheduled_tokens: [rows] new tokens per row, on the host.
        num_computed_tokens: [rows] tokens already in the cache per row, on the host.
        query_starts: int32 [rows + 1] on the device: row r's new tokens are query_starts[r]:query_starts[r + 1].
        context_lens: int32 [rows] on the device: cached and new tokens of each row.
        block_tables: int32 [rows, max blocks of any row] on the device; entries past a row's end are 0.
        slot_mapping: int64 [tokens] on the device: block id * block_size + offset for each new token.
        positions: int64 [tokens] on the device.
        in_window: the same with other block tables and slots, for layers with a window that have blocks of their own.
            Entries before the window may be any.
    """

    num_decode_rows: int
    num_scheduled_tokens: list[int]
    num_computed_tokens: list[int]
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    in_window: AttentionMetadata | None = None

    def of(self, cache: LayerCache) -> AttentionMetadata:
        """What tells of this cache's blocks."""
        if not cache.has_window_blocks:
            return self
        assert self.in_window is not None, "the layer's blocks are unknown"
        return self.in_window


class Rotation(Protocol):
    """Rotary position embedding as a backend needs it: as a function, or as the tables for a kernel of its own."""

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim]; positions: int64 [tokens]. Returns: rotated, a new tensor of x's shape."""
        ...

    def tables(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of every position, each [positions, rotated pairs], rounded to `dtype`."""
        ...


class AttentionBackend(Protocol):
    """Computes causal attention over a paged cache. One per stage; what it keeps between calls only saves time."""

    def rotate_and_store(
        self, heads: torch.Tensor, rotation: Rotation | None, metadata: AttentionMetadata, cache: LayerCache
    ) -> torch.Tensor:
        """Rotate queries and keys, and `store` the rotated keys and the values.

        Args:
            heads: [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; overwritten.
            rotation: None leaves queries and keys as they are.
        Returns: the rotated queries [tokens, num_heads, head_dim].
        """
        ...

    def store(self, keys: torch.Tensor, values: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        """Write the new tokens' keys and values, [tokens, num_kv_heads, head_dim], into their slots."""
        ...

    def attend(
        self,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        cache: LayerCache,
        scale: float,
        sliding_window: int | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token i of a row attends to all tokens of its request at or before its position, or to the last
        `sliding_window` of them, itself included.

        Args:
            queries: [tokens, num_heads, head_dim], their keys already stored.
            scale: products with keys are multiplied by this.
            cap: and then bent to stay within ± this: cap * tanh(score / cap).
            sinks: float32 [num_heads], a score that takes its share of the softmax and gives nothing.
        Returns: [tokens, num_heads, head_dim].
        """
        ...
