"""What a stage remembers of each request, and the tensors it makes of a microbatch.

One idea: block tables live in one preallocated array with a row per request, so a microbatch's positions and slots are
a few numpy operations, whatever the number of tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from stageline.attention.backend import AttentionMetadata
from stageline.errors import FrameError
from stageline.pipeline.microbatch import AddedRequest, ExtendedTable, Microbatch, MicrobatchLimits


class InputBuffers:
    """Block tables of the live requests. Microbatches must be applied once each, in order.

    After a FrameError the state is undefined: the stage's epoch is over.
    """

    def __init__(self, limits: MicrobatchLimits, device: torch.device) -> None:
        self._limits = limits
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._tables = np.zeros((limits.max_num_seqs, limits.max_blocks_per_request), dtype=np.int32)
        self._window_tables = self._tables.copy() if limits.num_window_blocks else None
        self._num_blocks = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._row_of: dict[int, int] = {}
        self._free_rows = list(reversed(range(limits.max_num_seqs)))
        self._counting = np.arange(limits.max_num_seqs + 1, dtype=np.int32)
        self._block_places = np.arange(limits.max_blocks_per_request)

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
            self._append_blocks(microbatch, row, added)
        for extended in microbatch.extended:
            row = self._known_row(microbatch, extended.request_number)
            self._append_blocks(microbatch, row, extended)

    def _append_blocks(self, microbatch: Microbatch, row: int, new: AddedRequest | ExtendedTable) -> None:
        start = int(self._num_blocks[row])
        end = start + len(new.block_ids)
        if end > self._tables.shape[1]:
            raise FrameError(
                f"{microbatch}: request {new.request_number} has {end} blocks, limit {self._tables.shape[1]}"
            )
        self._tables[row, start:end] = new.block_ids
        if self._window_tables is not None:
            self._window_tables[row, start:end] = new.window_block_ids
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
        if microbatch.num_tokens == len(rows):
            # Decodes alone, by far the most frequent: what follows from their lengths is known.
            context_lens, positions, row_of_token = computed + 1, computed, rows
            query_starts = self._counting[: len(rows) + 1]
        else:
            scheduled = np.array(microbatch.num_scheduled_tokens, dtype=np.int64)
            context_lens = computed + scheduled
            ends = np.cumsum(scheduled)
            positions = np.arange(ends[-1]) + np.repeat(context_lens - ends, scheduled)
            row_of_token = np.repeat(rows, scheduled)
            query_starts = np.concatenate(([0], ends)).astype(np.int32)
        needed_blocks = -(-context_lens // block_size)
        self._check_tables(microbatch, rows, needed_blocks)
        width = int(needed_blocks.max(initial=0))
        is_beyond = self._block_places[:width] >= needed_blocks[:, None]
        block_of_token, offsets = np.divmod(positions, block_size)

        def look_up(all_tables: npt.NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
            """Block tables of the rows, and slots of the tokens."""
            blocks = all_tables[row_of_token, block_of_token].astype(np.int64)
            tables = all_tables[rows, :width]
            tables[is_beyond] = 0
            return self._to_device(tables), self._to_device(blocks * block_size + offsets)

        tables, slots = look_up(self._tables)
        metadata = AttentionMetadata(
            num_decode_rows=microbatch.num_decode_rows,
            num_scheduled_tokens=microbatch.num_scheduled_tokens,
            num_computed_tokens=microbatch.num_computed_tokens,
            query_starts=self._to_device(query_starts),
            context_lens=self._to_device(context_lens.astype(np.int32)),
            block_tables=tables,
            slot_mapping=slots,
            positions=self._to_device(positions),
        )
        if self._window_tables is None:
            return metadata
        tables, slots = look_up(self._window_tables)
        return replace(metadata, in_window=replace(metadata, block_tables=tables, slot_mapping=slots))

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
        tensor = torch.from_numpy(array)
        return tensor if self._is_on_host else tensor.to(self._device)
