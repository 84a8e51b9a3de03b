"""Requests that wait to be started, in two orders at once: by importance, and by how soon they would be done.

Both orders are heaps of which removed entries are thrown away only when they come up, so that adding and removing cost
the same whether ten requests wait or ten thousand.
"""

from __future__ import annotations

import heapq

from stageline.scheduler.scheduled_request import Rank, ScheduledRequest

_Entry = tuple[Rank, int, ScheduledRequest]
_FEW_ENTRIES = 64


class WaitingQueue:
    """A request may be added again after it was removed, as one is that was preempted: it keeps its place."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Known tokens of all requests that wait."""
        self.num_squared_tokens = 0
        """Their squares: what attention within them depends on."""
        self._tickets: dict[ScheduledRequest, int] = {}
        self._next_ticket = 0
        self._by_importance: list[_Entry] = []
        self._by_length: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: ScheduledRequest) -> bool:
        return request in self._tickets

    def add(self, request: ScheduledRequest) -> None:
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._tickets[request] = ticket
        self.num_tokens += len(request.token_ids)
        self.num_squared_tokens += len(request.token_ids) ** 2
        heapq.heappush(self._by_importance, (request.rank, ticket, request))
        heapq.heappush(self._by_length, (request.rank_by_length, ticket, request))

    def remove(self, request: ScheduledRequest) -> None:
        """Take out a request that waits."""
        del self._tickets[request]
        self.num_tokens -= len(request.token_ids)
        self.num_squared_tokens -= len(request.token_ids) ** 2
        if len(self._by_importance) + len(self._by_length) > 4 * len(self._tickets) + _FEW_ENTRIES:
            self._by_importance = self._without_removed(self._by_importance)
            self._by_length = self._without_removed(self._by_length)

    def most_important(self) -> ScheduledRequest | None:
        """Of those with the most urgent priority, the one that arrived first."""
        return self._first(self._by_importance)

    def shortest(self) -> ScheduledRequest | None:
        """Of those with the most urgent priority, the one with the fewest tokens."""
        return self._first(self._by_length)

    def _first(self, heap: list[_Entry]) -> ScheduledRequest | None:
        while heap:
            _, ticket, request = heap[0]
            if self._tickets.get(request) == ticket:
                return request
            heapq.heappop(heap)
        return None

    def _without_removed(self, heap: list[_Entry]) -> list[_Entry]:
        kept = [entry for entry in heap if self._tickets.get(entry[2]) == entry[1]]
        heapq.heapify(kept)
        return kept
