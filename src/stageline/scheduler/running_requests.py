"""Requests that run: they have blocks, the stages know them, and they are kept sorted by what they need next."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import islice

from stageline.scheduler.scheduled_request import ScheduledRequest

_NUM_LOOKED_AT = 32


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
        return (request for request in self._all if request not in self.prefilling and request not in self.ending)

    def next_ready(self, missing: float, weight_of: Callable[[int], float]) -> ScheduledRequest:
        """Whose turn it is to fill what a microbatch misses; one after it that fits, if it would be far too much.

        It is the first one's turn in the next microbatch then.
        """
        fitting = (r for r in islice(self.ready, _NUM_LOOKED_AT) if weight_of(r.num_computed_tokens) <= 2 * missing)
        return next(fitting, None) or next(iter(self.ready))

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
