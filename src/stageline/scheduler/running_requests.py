"""Requests that run: they have blocks, the stages know them, and they are kept sorted by what they need next."""

from __future__ import annotations

from collections.abc import Container, Iterator

from stageline.scheduler.scheduled_request import ScheduledRequest


class RunningRequests:
    """Each queue is in the order in which its requests came to it.

    Attributes:
        ready: one known token is to be computed: a decode.
        prefilling: more than one is.
        ending: nothing is; the tokens that they wait for are their last.
    """

    def __init__(self) -> None:
        self.ready: dict[ScheduledRequest, None] = {}
        self.prefilling: dict[ScheduledRequest, None] = {}
        self.ending: dict[ScheduledRequest, None] = {}
        self._all: dict[ScheduledRequest, dict[ScheduledRequest, None] | None] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._all)

    def __contains__(self, request: ScheduledRequest) -> bool:
        return request in self._all

    @property
    def num_decoding(self) -> int:
        """Those that will be scheduled for one token at a time, now or when theirs is back."""
        return len(self._all) - len(self.prefilling) - len(self.ending)

    def decoding(self) -> Iterator[ScheduledRequest]:
        return filter(self.is_decoding, self._all)

    def is_decoding(self, request: ScheduledRequest) -> bool:
        return request in self._all and request not in self.prefilling and request not in self.ending

    def add(self, request: ScheduledRequest) -> None:
        self._all[request] = None

    def remove(self, request: ScheduledRequest) -> None:
        queue = self._all.pop(request)
        if queue is not None:
            del queue[request]

    def sort_in(self, request: ScheduledRequest) -> None:
        """Keep the queues true to a request whose gap has changed."""
        gap, queue, before = request.gap, None, self._all[request]
        if gap == 1:
            queue = self.ready
        elif gap > 1:
            queue = self.prefilling
        elif request.is_ending:
            queue = self.ending
        if queue is before:
            return
        if before is not None:
            del before[request]
        if queue is not None:
            queue[request] = None
        self._all[request] = queue

    def least_important(self, spared: Container[ScheduledRequest]) -> ScheduledRequest | None:
        """The first to be preempted."""
        candidates = (request for request in self._all if request not in spared)
        return max(candidates, key=lambda request: request.rank, default=None)
