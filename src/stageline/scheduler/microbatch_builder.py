"""Collects the rows of one microbatch while the scheduler decides on them."""

from __future__ import annotations

from stageline.cost.stage_time import MicrobatchShape
from stageline.pipeline.microbatch import AddedRequest, ExtendedTable, Microbatch
from stageline.scheduler.scheduled_request import ScheduledRequest


class MicrobatchBuilder:
    """Rows are added in the order they will have: decodes first."""

    def __init__(self) -> None:
        self.requests: list[ScheduledRequest] = []
        self.num_tokens = 0
        self._added: list[AddedRequest] = []
        self._extended: list[ExtendedTable] = []
        self._num_scheduled: list[int] = []
        self._num_computed: list[int] = []
        self._token_ids: list[int] = []
        self._sampling_rows: list[int] = []
        self._masked_rows: list[int] = []
        self._pending_rows: list[int] = []
        self._pending_places: list[int] = []

    @property
    def shape(self) -> MicrobatchShape:
        """What its time depends on, as far as it is filled."""
        return MicrobatchShape.of_rows(self._num_computed, self._num_scheduled)

    def introduce(self, request: ScheduledRequest) -> None:
        """Tell the stages of a request; its block table is complete for its first row."""
        sampler = request.asked.sampler
        self._added.append(
            AddedRequest(
                request_number=request.request_number,
                num_prompt_tokens=request.num_prompt_tokens,
                block_ids=list(request.table.block_ids),
                sampler=sampler,
                history=list(request.token_ids) if sampler.needs_history else [],
                window_block_ids=list(request.table.window_block_ids),
            )
        )

    def extend_table(self, request: ScheduledRequest, block_ids: list[int]) -> None:
        """Args: block_ids: the latest of its table."""
        if block_ids:
            in_window = request.table.window_block_ids[-len(block_ids) :]
            self._extended.append(ExtendedTable(request.request_number, block_ids, in_window))

    def add_row(self, request: ScheduledRequest, num_tokens: int) -> None:
        """Schedule the request's next `num_tokens` tokens; the last known one yields a new token."""
        first = request.num_computed_tokens
        if num_tokens == request.gap:
            self._sampling_rows.append(len(self.requests))
            if request.asked.grammar is not None:
                self._masked_rows.append(len(self.requests))
        self._append(request, request.token_ids[first : first + num_tokens])

    def add_pending_row(self, request: ScheduledRequest, place: int) -> None:
        """Schedule the token that is in flight. Args: place: among those that the oldest microbatch samples."""
        self._sampling_rows.append(len(self.requests))
        self._pending_rows.append(len(self.requests))
        self._pending_places.append(place)
        self._append(request, [0])

    def _append(self, request: ScheduledRequest, token_ids: list[int]) -> None:
        self.requests.append(request)
        self.num_tokens += len(token_ids)
        self._num_computed.append(request.num_computed_tokens)
        self._num_scheduled.append(len(token_ids))
        self._token_ids.extend(token_ids)

    def build(self, epoch: int, number: int, removed: list[int], oldest: int) -> Microbatch:
        return Microbatch(
            epoch=epoch,
            number=number,
            removed=removed,
            added=self._added,
            extended=self._extended,
            request_numbers=[request.request_number for request in self.requests],
            num_computed_tokens=self._num_computed,
            num_scheduled_tokens=self._num_scheduled,
            token_ids=self._token_ids,
            sampling_rows=self._sampling_rows,
            masked_rows=self._masked_rows,
            oldest=oldest,
            pending_rows=self._pending_rows,
            pending_places=self._pending_places,
        )
