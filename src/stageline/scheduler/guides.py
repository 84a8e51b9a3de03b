"""Requests that keep to a grammar: which mask belongs to which row, and who waits for one.

One idea: nobody waits for a mask but its own request. A microbatch is launched with rows whose masks are still being
computed; each follows when it is there. A row that its mask did not reach in time has no token, and is scheduled again
once the mask is known. Prompts are computed meanwhile, so that compiling a grammar costs no time of its own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from stageline.errors import InternalError
from stageline.grammar.mask_pool import Guide, MaskPool, exceeded
from stageline.grammar.step import Step
from stageline.pipeline.microbatch import Microbatch, TokenMasks
from stageline.request import RequestFailure
from stageline.scheduler.scheduled_request import ScheduledRequest

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Guided:
    """Args:
    row: (epoch, microbatch, row) in flight that its mask has not been sent to.
    is_waiting: it missed its mask and is not scheduled before it is known.
    """

    request: ScheduledRequest
    guide: Guide
    row: tuple[int, int, int] | None = None
    is_waiting: bool = False


class Guides:
    """The scheduler's side of structured output.

    Args:
        pool: computes the masks; None if there are no grammars.
    """

    def __init__(self, pool: MaskPool | None) -> None:
        self._pool = pool
        self._of_request: dict[ScheduledRequest, _Guided] = {}
        self._of_guide: dict[Guide, _Guided] = {}
        self._outgoing: list[tuple[tuple[int, int, int], bytes]] = []
        self._failed: list[tuple[ScheduledRequest, RequestFailure]] = []
        self._num_waiting = 0
        self.num_missed_masks = 0

    def __len__(self) -> int:
        return len(self._of_request)

    @property
    def num_waiting(self) -> int:
        """Requests that are not scheduled before their masks are known."""
        return self._num_waiting

    def start(self, request: ScheduledRequest) -> None:
        """Begin with a request's grammar, if it has one."""
        spec = request.asked.grammar
        if spec is None:
            return
        if self._pool is None:
            raise InternalError(f"request {request.asked.request_id} has a grammar, but this scheduler knows none")
        guided = _Guided(request, Guide(spec))
        self._of_request[request] = self._of_guide[guided.guide] = guided
        self._pool.compute(guided.guide)

    def launched(self, microbatch: Microbatch, requests: list[ScheduledRequest]) -> None:
        """Send the masks that are known; remember who awaits one."""
        for row in microbatch.masked_rows:
            guided = self._of_request[requests[row]]
            place = (microbatch.epoch, microbatch.number, row)
            if guided.guide.mask is None:
                guided.row = place
            else:
                self._outgoing.append((place, guided.guide.mask))

    def take(self, request: ScheduledRequest, token_id: int) -> Step:
        """A request has its next token. Without a grammar it goes on."""
        guided = self._of_request.get(request)
        if guided is None:
            return Step.GOES_ON
        guide = guided.guide
        if guide.mask is None or guide.matcher is None or self._pool is None:
            raise InternalError(f"request {request.asked.request_id} has a token {token_id}, but its mask is not known")
        step = guide.matcher.advance(token_id)
        if step is Step.GOES_ON:
            self._pool.compute(guide)
        return step

    def failure(self, request: ScheduledRequest) -> RequestFailure:
        """Why it cannot go on, after a token that `take` said FAILED of."""
        return self._told(self._of_request[request])

    def _told(self, guided: _Guided) -> RequestFailure:
        """As its reader shall hear it; also logged."""
        failure = guided.guide.failure or exceeded(guided.guide.spec, guided.request.num_output_tokens)
        logger.warning("request %s failed: %s", guided.request.asked.request_id, failure.message)
        return failure

    def missed(self, request: ScheduledRequest) -> bool:
        """A row of it came back without a token. True if its mask is known by now; else it waits for it."""
        guided = self._of_request.get(request)
        if guided is None:
            raise InternalError(f"request {request.asked.request_id} has no token, but waits for no mask")
        self.num_missed_masks += 1
        guided.row = None
        if guided.guide.mask is None:
            guided.is_waiting = True
            self._num_waiting += 1
        return not guided.is_waiting

    def recall(self, request: ScheduledRequest) -> None:
        """It left the pipeline, to be computed anew: no row awaits its mask. Where it is in its grammar stays."""
        guided = self._of_request.get(request)
        if guided is not None:
            guided.row = None
            self._num_waiting -= guided.is_waiting
            guided.is_waiting = False

    def end(self, request: ScheduledRequest) -> None:
        """It is over. A mask that is still being computed comes to nobody."""
        self.recall(request)
        guided = self._of_request.pop(request, None)
        if guided is not None:
            del self._of_guide[guided.guide]

    def collect(self) -> list[ScheduledRequest]:
        """Look at the masks that have come. Returns: the requests that waited for theirs."""
        released = []
        for guide in [] if self._pool is None else self._pool.finished():
            guided = self._of_guide.get(guide)
            if guided is None:
                continue
            if guide.failure is not None or guide.is_exceeded:
                self._failed.append((guided.request, self._told(guided)))
            elif guide.mask is None:
                continue  # it was handed in again before it was looked at here
            elif guided.row is not None:
                self._outgoing.append((guided.row, guide.mask))
                guided.row = None
            elif guided.is_waiting:
                guided.is_waiting = False
                self._num_waiting -= 1
                released.append(guided.request)
        return released

    def close(self) -> None:
        """No more masks are computed."""
        if self._pool is not None:
            self._pool.close()

    def take_failed(self) -> list[tuple[ScheduledRequest, RequestFailure]]:
        """Requests for which no mask will come, and why."""
        failed, self._failed = self._failed, []
        return [(request, failure) for request, failure in failed if request in self._of_request]

    def take_outgoing(self) -> list[TokenMasks]:
        """Masks to be sent to the last stage, one message per microbatch."""
        by_microbatch: dict[tuple[int, int], TokenMasks] = {}
        for (epoch, number, row), mask in self._outgoing:
            message = by_microbatch.setdefault((epoch, number), TokenMasks(epoch, number, [], []))
            message.rows.append(row)
            message.masks.append(mask)
        self._outgoing = []
        return list(by_microbatch.values())
