"""A stage's blocks as one call, where all they do is call kernels; see `stageline.kernels.program`.

One idea: whether blocks can be recorded is tried, not declared. A block that asks torch to compute something cannot,
and runs as it is written; so does every block off the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import replace

import torch

from stageline import kernels
from stageline.attention.backend import AttentionMetadata
from stageline.kernels.cpu import CpuKernels
from stageline.kernels.program import Argument, CannotRecord, Recording

logger = logging.getLogger(__name__)

OnBlock = Callable[[], None]
"""Called after every block."""

RunBlocks = Callable[[torch.Tensor, AttentionMetadata, OnBlock | None], tuple[torch.Tensor, torch.Tensor]]
"""From hidden states [tokens, hidden] to (hidden states, residual), whose sum is the stage's output."""

_NUM_ROWS, _TABLE_WIDTH = 2, 3  # while recording; any would do


def record_blocks(
    run_blocks: RunBlocks, like: torch.Tensor, max_tokens: int, has_window_blocks: bool = False
) -> RecordedBlocks | None:
    """Args:
        run_blocks: uses the same KV cache and weights each time. It is run once, on a token in the cache's first block.
        like: hidden states [1, hidden]; they tell dtype, device and size.
        max_tokens: of a microbatch.
        has_window_blocks: whether some layers have blocks of their own for their window.
    Returns: None if they cannot be recorded.
    """
    library = kernels.library(like.device, like.dtype)
    if library is None:
        return None
    with torch.inference_mode():
        # What layers make at their first use is made now.
        run_blocks(like, _metadata(1, 1, 1, has_window_blocks), None)
        try:
            return RecordedBlocks(library, run_blocks, like, max_tokens, has_window_blocks)
        except CannotRecord as reason:
            logger.debug("the blocks run one kernel at a time: %s", reason)
            return None


class RecordedBlocks:
    """See `record_blocks`. Raises: CannotRecord."""

    def __init__(
        self, library: CpuKernels, run_blocks: RunBlocks, like: torch.Tensor, max_tokens: int, has_window_blocks: bool
    ) -> None:
        sizes = {
            Argument.NUM_TOKENS: max_tokens,
            Argument.NUM_ROWS: _NUM_ROWS,
            Argument.TABLE_WIDTH: _TABLE_WIDTH,
        }
        hidden_states = torch.empty(max_tokens, like.shape[1], dtype=like.dtype)
        metadata = _metadata(max_tokens, _NUM_ROWS, _TABLE_WIDTH, has_window_blocks)
        inputs = [hidden_states, *_tensors(metadata)]
        recording = Recording(sizes, inputs)
        with recording.active():
            self._output, self._residual = run_blocks(hidden_states, metadata, recording.mark)
        if self._residual.data_ptr() == hidden_states.data_ptr():
            raise CannotRecord("the input is an output too")
        self._memory = recording.memory
        self._calls = recording.compiled(library.run_program)
        self._max_tokens = max_tokens
        self._shape = like.shape[1:]
        self._dtype = like.dtype
        self._values = (c_int64 * (len(sizes) + len(inputs)))()

    def __call__(
        self, hidden_states: torch.Tensor, metadata: AttentionMetadata, on_block: OnBlock | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns: what `run_blocks` would, in memory that the next call overwrites."""
        num_tokens = hidden_states.shape[0]
        assert hidden_states.shape[1:] == self._shape and hidden_states.dtype == self._dtype
        assert num_tokens <= self._max_tokens and metadata.positions.shape == metadata.slot_mapping.shape
        assert metadata.positions.shape == (num_tokens,)
        tensors = [hidden_states, *_tensors(metadata)]
        assert all(tensor.is_contiguous() for tensor in tensors)
        num_rows, table_width = metadata.block_tables.shape
        self._values[:] = [num_tokens, num_rows, table_width, *(tensor.data_ptr() for tensor in tensors)]
        self._calls(self._values, on_block)
        return self._output[:num_tokens], self._residual[:num_tokens]


def _tensors(metadata: AttentionMetadata) -> list[torch.Tensor]:
    others = metadata.in_window
    return [
        metadata.positions,
        metadata.slot_mapping,
        metadata.query_starts,
        metadata.context_lens,
        metadata.block_tables,
        *([] if others is None else [others.slot_mapping, others.block_tables]),
    ]


def _metadata(num_tokens: int, num_rows: int, table_width: int, has_window_blocks: bool) -> AttentionMetadata:
    """One token in each row but the last, which has the others; all in the cache's first block."""
    row_ends = [*range(1, num_rows), num_tokens]
    metadata = AttentionMetadata(
        num_decode_rows=0,
        num_scheduled_tokens=[1] * (num_rows - 1) + [num_tokens - num_rows + 1],
        num_computed_tokens=[0] * num_rows,
        query_starts=torch.tensor([0, *row_ends], dtype=torch.int32),
        context_lens=torch.ones(num_rows, dtype=torch.int32),
        block_tables=torch.zeros(num_rows, table_width, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.zeros(num_tokens, dtype=torch.int64),
    )
    if not has_window_blocks:
        return metadata
    tables, slots = metadata.block_tables.clone(), metadata.slot_mapping.clone()
    return replace(metadata, in_window=replace(metadata, block_tables=tables, slot_mapping=slots))
