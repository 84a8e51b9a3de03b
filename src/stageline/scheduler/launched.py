"""The microbatches that are out, as the scheduler remembers them, and the decodes that may follow the oldest at once.

One idea: the oldest microbatch in flight is the next to be answered. What its rows will sample is not known yet, but
that they will is; so their next decodes can be announced, and the first stage has them prepared when the tokens come.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageline.pipeline.microbatch import Microbatch
from stageline.scheduler.running_requests import RunningRequests
from stageline.scheduler.scheduled_request import ScheduledRequest


@dataclass(frozen=True)
class Successor:
    """A decode that may be announced before its token is known. Args: place: of the token, among those sampled."""

    request: ScheduledRequest
    place: int


@dataclass
class _Launched:
    """Args: since_s: when it was launched or, if later, when the last of its tokens was known here."""

    microbatch: Microbatch
    requests: list[ScheduledRequest]
    since_s: float


class LaunchedMicrobatches:
    """Oldest first."""

    def __init__(self) -> None:
        self._launched: dict[int, _Launched] = {}

    def __len__(self) -> int:
        return len(self._launched)

    @property
    def oldest(self) -> int | None:
        """Number of the oldest one in flight."""
        return next(iter(self._launched), None)

    def add(self, microbatch: Microbatch, requests: list[ScheduledRequest], now_s: float) -> None:
        """Args: requests: [rows]"""
        self._launched[microbatch.number] = _Launched(microbatch, requests, now_s)

    def answered(self, microbatch: Microbatch, now_s: float) -> float:
        """Its result came. Returns: seconds since its launch, or since its tokens were known if that was later."""
        done = self._launched.pop(microbatch.number)
        for later in self._launched.values():
            if later.microbatch.pending_rows and later.microbatch.oldest == microbatch.number:
                later.since_s = now_s
        return now_s - done.since_s

    def groups_beside(self, successors: list[Successor]) -> list[list[ScheduledRequest]]:
        """Requests of every microbatch in flight; not of the oldest if its successors are scheduled now."""
        groups = [launched.requests for launched in self._launched.values()]
        return groups[1:] if successors else groups

    def successors(self, running: RunningRequests) -> list[Successor]:
        """Decodes that follow the oldest microbatch's rows, in their order; those already announced are not among them.

        All or none: while one of its rows cannot be followed, because its request keeps to a grammar, none is. It would
        fall behind the others, and have to wait for a microbatch of its own.
        """
        oldest = next(iter(self._launched.values()), None)
        found: list[Successor] = []
        if oldest is None:
            return found
        numbers = oldest.microbatch.request_numbers
        for place, row in enumerate(oldest.microbatch.sampling_rows):
            request = oldest.requests[row]
            if request.request_number != numbers[row] or request not in running:
                continue
            if request.gap != 0 or request.is_ending:
                continue
            if request.asked.grammar is not None:
                return []
            found.append(Successor(request, place))
        return found
