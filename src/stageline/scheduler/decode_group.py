"""Which decodes go into a microbatch together: as much of them, by predicted time, as into every other one.

One idea: a row that would make a group larger than its share goes where most is missing. Each group alone can be half a
row off; if each were so to the same side, the last would lack them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from stageline.scheduler.running_requests import RunningRequests
from stageline.scheduler.scheduled_request import ScheduledRequest

_NUM_LOOKED_AT = 32
_WORTH_WAITING = 0.5
"""What another group must lack more than this one, in units of the row, for the row to wait for it. Less would be
gained than waiting costs, and rows would go to and fro between groups that are level."""


class DecodeGroup:
    """The decodes of the microbatch that is being built.

    Args:
        running: everybody; what is ready and not taken stays ready.
        others: requests of each other group, which are in flight.
        window: groups there are, or will be.
        weight_of: a row's time by its cached tokens, in units of the mean row's.
    """

    def __init__(
        self,
        running: RunningRequests,
        others: Sequence[Sequence[ScheduledRequest]],
        window: int,
        weight_of: Callable[[int], float],
    ) -> None:
        self._running = running
        self._others = others
        self._window = window
        self._weight_of = weight_of
        self._share = running.num_decoding / window
        self._taken = 0.0

    @property
    def is_full(self) -> bool:
        return self._taken >= self._share

    def take(self, request: ScheduledRequest) -> None:
        self._taken += self._weight(request)

    def next_ready(self) -> ScheduledRequest | None:
        """Whose turn it is, if anybody's; one after it that fits, if it would be far too much here.

        Who is left is the first in the next group, whatever it weighs.
        """
        ready = self._running.ready
        if not ready or self.is_full:
            return None
        missing = self._share - self._taken
        fitting = (request for request in islice(ready, _NUM_LOOKED_AT) if self._weight(request) <= 2 * missing)
        request = next(fitting, None) or next(iter(ready))
        weight = self._weight(request)
        if self._taken > 0 and weight > missing and self._most_missing(weight) > missing + _WORTH_WAITING * weight:
            return None
        return request

    def _weight(self, request: ScheduledRequest) -> float:
        return self._weight_of(request.num_computed_tokens)

    def _most_missing(self, weight: float) -> float:
        """Of any other group, if this one takes a row of that weight: those to come get equal parts of what is left."""
        loads = [sum(map(self._weight, filter(self._running.is_decoding, requests))) for requests in self._others]
        num_to_come = self._window - 1 - len(loads)
        if num_to_come > 0:
            left = self._share * self._window - self._taken - weight - sum(loads)
            loads.append(left / num_to_come)
        return self._share - min(loads, default=self._share)
