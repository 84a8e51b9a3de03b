"""What a stage remembers of each request, and the tensors it makes of a microbatch.

One idea: block tables live in one preallocated array with a row per request, so a microbatch's positions and slots are
a few numpy operations, whatever the number of tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stageline.attention.backend import AttentionMetadata
from stageline.errors import FrameError
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits


class InputBuffers:
    """Block tables of the live requests. Microbatches must be applied once each, in order.

    After a FrameError the state is undefined: the stage's epoch is over.
    """

    def __init__(self, limits: MicrobatchLimits, device: torch.device) -> None:
        self._limits = limits
        self._device = device
        self._tables = np.zeros((limits.max_num_seqs, limits.max_blocks_per_request), dtype=np.int32)
        self._num_blocks = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._row_of: dict[int, int] = {}
        self._free_rows = list(reversed(range(limits.max_num_seqs)))

    @property
    def num_requests(self) -> int:
        return len(self._row_of)

    def apply_and_build(self, microbatch: Microbatch) -> AttentionMetadata:
        """Apply what the microbatch changes, then say where its tokens stand.

        Raises: FrameError if it does not fit the requests known here.
        """
        self._apply(microbatch)
        return self._build(microbatch)

    def _apply(self, microbatch: Microbatch) -> None:
        for number in microbatch.removed:
            row = self._row_of.pop(number, None)
            if row is None:
                raise FrameError(f"{microbatch}: request {number} is removed but was never added")
            self._num_blocks[row] = 0
            self._free_rows.append(row)
        for added in microbatch.added:
            if added.request_number in self._row_of:
                raise FrameError(f"{microbatch}: request {added.request_number} is added twice")
            if not self._free_rows:
                raise FrameError(f"{microbatch}: more than max_num_seqs {self._limits.max_num_seqs} requests at once")
            row = self._row_of[added.request_number] = self._free_rows.pop()
            self._append_blocks(microbatch, added.request_number, row, added.block_ids)
        for extended in microbatch.extended:
            row = self._known_row(microbatch, extended.request_number)
            self._append_blocks(microbatch, extended.request_number, row, extended.block_ids)

    def _append_blocks(self, microbatch: Microbatch, number: int, row: int, block_ids: list[int]) -> None:
        start = int(self._num_blocks[row])
        end = start + len(block_ids)
        if end > self._tables.shape[1]:
            raise FrameError(f"{microbatch}: request {number} has {end} blocks, limit {self._tables.shape[1]}")
        self._tables[row, start:end] = block_ids
        self._num_blocks[row] = end

    def _known_row(self, microbatch: Microbatch, number: int) -> int:
        row = self._row_of.get(number)
        if row is None:
            raise FrameError(f"{microbatch}: request {number} was never added, or was removed")
        return row

    def _build(self, microbatch: Microbatch) -> AttentionMetadata:
        block_size = self._limits.block_size
        rows = np.array([self._known_row(microbatch, number) for number in microbatch.request_numbers], dtype=np.int64)
        computed = np.array(microbatch.num_computed_tokens, dtype=np.int64)
        scheduled = np.array(microbatch.num_scheduled_tokens, dtype=np.int64)
        context_lens = computed + scheduled
        needed_blocks = -(-context_lens // block_size)
        self._check_tables(microbatch, rows, needed_blocks)
        query_starts = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(scheduled, out=query_starts[1:])
        positions = np.arange(query_starts[-1]) + np.repeat(computed - query_starts[:-1], scheduled)
        blocks = self._tables[np.repeat(rows, scheduled), positions // block_size].astype(np.int64)
        width = int(needed_blocks.max(initial=0))
        tables = self._tables[rows, :width]
        tables[np.arange(width) >= needed_blocks[:, None]] = 0
        return AttentionMetadata(
            num_decode_rows=microbatch.num_decode_rows,
            num_scheduled_tokens=microbatch.num_scheduled_tokens,
            num_computed_tokens=microbatch.num_computed_tokens,
            query_starts=self._to_device(query_starts.astype(np.int32)),
            context_lens=self._to_device(context_lens.astype(np.int32)),
            block_tables=self._to_device(tables),
            slot_mapping=self._to_device(blocks * block_size + positions % block_size),
            positions=self._to_device(positions),
        )

    def _check_tables(
        self, microbatch: Microbatch, rows: npt.NDArray[np.int64], needed_blocks: npt.NDArray[np.int64]
    ) -> None:
        is_short = self._num_blocks[rows] < needed_blocks
        if is_short.any():
            first = int(is_short.argmax())
            raise FrameError(
                f"{microbatch}: request {microbatch.request_numbers[first]} has {self._num_blocks[rows[first]]} "
                f"blocks, its tokens need {needed_blocks[first]}"
            )

    def _to_device(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
