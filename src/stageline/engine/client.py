"""A client's side of the link to the engine's process, for asyncio: asks, and hands news to whoever expects them.

One idea: the engine's end is news, too. It is noticed through a descriptor, at once, and fails everything that waits.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from stageline.clock import Clock
from stageline.engine.messages import (
    Abort,
    Accepted,
    AddRequests,
    AskSpans,
    AskStats,
    Beat,
    EngineFailed,
    EngineLink,
    EngineReady,
    FromClient,
    LoadProgress,
    PipelineDown,
    Refused,
    SpansAnswer,
    StatsAnswer,
    ToClient,
    Updates,
)
from stageline.engine.stats import EngineStats
from stageline.errors import EngineLost, FrameError, NotReady, StagelineError
from stageline.executor.executor import OnProgress
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links
from stageline.outputs import FinishReason
from stageline.request import EngineRequest, RequestUpdate
from stageline.timeline.span import Span

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.2
"""How long an ended engine's last message may take to arrive."""


class EngineClient:
    """Belongs to the event loop it was made in.

    Args:
        on_updates: called with news of this client's requests.
        on_loss: called once, when the engine is gone.
        on_down: called each time the pipeline has lost a stage, and is being started again, with what to tell whoever
            asks meanwhile, and whether what was asked is kept.
        on_progress: called while stages load.
        on_beat: called with each sign of life, with how many requests run and wait, of all clients.
    """

    def __init__(
        self,
        link: EngineLink,
        clock: Clock,
        on_updates: Callable[[Sequence[RequestUpdate]], None],
        on_loss: Callable[[StagelineError], None],
        on_down: Callable[[NotReady, bool], None],
        on_progress: OnProgress | None = None,
        on_beat: Callable[[int], None] | None = None,
    ) -> None:
        self.startup_table = ""
        self.loss: StagelineError | None = None
        self.is_ready = False
        self.down: NotReady | None = None
        self.keeps_requests = False
        self.stalled_s = 0.0
        self.heard_s = clock.now_s()
        self._index = link.client_index
        self._pid = link.engine_pid
        self._clock = clock
        self._on_updates = on_updates
        self._on_loss = on_loss
        self._on_down = on_down
        self._on_progress = on_progress
        self._on_beat = on_beat
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._answers: dict[str | int, asyncio.Future[object]] = {}
        self._next_question = itertools.count()
        self._decoder: MessageDecoder[ToClient] = MessageDecoder(ToClient)
        self._links = Links()
        self._incoming = self._links.receiver(link.client_address)
        self._outgoing = self._links.sender(link.engine_address)
        self._loop.add_reader(self._incoming.FD, self.receive)
        self._end_fd = _watch(self._pid)
        if self._end_fd is not None:
            self._loop.add_reader(self._end_fd, self._ended)
        # What came before the reader was there would not wake it.
        self._loop.call_soon(self.receive)

    # ---- questions ----

    async def wait_until_ready(self) -> None:
        """Raises: what the engine failed with."""
        if self.loss is not None:
            raise self.loss.with_traceback(None)
        await asyncio.shield(self._ready)

    async def add(self, requests: list[EngineRequest]) -> None:
        """Queue requests, all or none. Raises: RequestError, CapacityError."""
        await self._ask(requests[0].request_id, AddRequests(self._index, requests))

    def abort(self, request_ids: list[str], finish_reason: FinishReason) -> None:
        if request_ids and self.loss is None:
            self._send(Abort(self._index, request_ids, finish_reason))

    async def stats(self) -> EngineStats:
        question = next(self._next_question)
        answer = await self._ask(question, AskStats(self._index, question))
        assert isinstance(answer, EngineStats)
        return answer

    async def spans(self, since_s: float, most_per_stage: int) -> list[Span]:
        question = next(self._next_question)
        answer = await self._ask(question, AskSpans(self._index, question, since_s, most_per_stage))
        assert isinstance(answer, list)
        return answer

    async def _ask(self, key: str | int, message: FromClient) -> object:
        if self.loss is not None:
            raise self.loss.with_traceback(None)
        future: asyncio.Future[object] = self._loop.create_future()
        self._answers[key] = future
        try:
            self._send(message)
            return await future
        finally:
            self._answers.pop(key, None)

    def _send(self, message: FromClient) -> None:
        self._outgoing.send(encode_message(message), zmq.NOBLOCK)

    # ---- what comes in ----

    def receive(self) -> None:
        """Take all that is there."""
        while not self._incoming.closed:
            try:
                frame = self._incoming.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except FrameError as error:
                logger.warning("a message from the engine was dropped: %s", error)
                continue
            self.heard_s = self._clock.now_s()
            self._take(message)

    def _take(self, message: ToClient) -> None:
        match message:
            case Updates():
                self._on_updates(message.updates)
            case Accepted():
                self._answer(message.request_id, None)
            case Refused():
                self._answer(message.request_id, message.error.as_error())
            case Beat():
                self.stalled_s = message.stalled_s
                if self._on_beat is not None:
                    self._on_beat(message.num_requests)
            case StatsAnswer():
                self._answer(message.question, message.stats)
            case SpansAnswer():
                self._answer(message.question, message.spans)
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message.stage_index, message.num_bytes_read, message.num_bytes_total)
            case EngineReady():
                self.startup_table = message.startup_table
                self.is_ready = True
                self.down = None
                self.keeps_requests = False
                self.stalled_s = 0.0
                if not self._ready.done():
                    self._ready.set_result(None)
            case PipelineDown():
                self._take_down(message)
            case EngineFailed():
                self.lose(message.error.as_error())

    def _take_down(self, message: PipelineDown) -> None:
        self.is_ready = False
        self.down = NotReady(message.reason, message.retry_after_s)
        self.keeps_requests = message.keeps_requests
        # Statistics and spans were asked of stages that are gone.
        self.fail_questions(self.down, None if not message.keeps_requests else self._questions_about_stages())
        self._on_down(self.down, message.keeps_requests)

    def _questions_about_stages(self) -> list[int]:
        return [key for key in self._answers if isinstance(key, int)]

    def _answer(self, key: str | int, answer: object) -> None:
        future = self._answers.get(key)
        if future is None or future.done():
            return
        if isinstance(answer, StagelineError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def fail_questions(self, error: StagelineError, keys: Sequence[str | int] | None = None) -> None:
        """Give up waiting for answers: to these requests, or to all that was asked."""
        for key in list(self._answers) if keys is None else keys:
            self._answer(key, error)

    # ---- the end ----

    def _ended(self) -> None:
        """The process has ended; what it said last may still be on its way."""
        self._stop_watching()
        lost = EngineLost(f"the engine's process {self._pid} has ended")
        self._loop.call_later(_LAST_WORDS_S, self.lose, lost)

    def lose(self, error: StagelineError) -> None:
        """Fail everything that waits, and all that is asked from now on."""
        if self.loss is not None:
            return
        self.loss = error
        self.is_ready = False
        if not self._ready.done():
            self._ready.set_exception(error)
            # Nobody may be waiting for it.
            self._ready.exception()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        self._on_loss(error)

    def close(self) -> None:
        """Leave the link. May be called twice."""
        if self._incoming.closed:
            return
        self._stop_watching()
        self._loop.remove_reader(self._incoming.FD)
        linger_s = _LAST_WORDS_S if self.loss is None else 0.0
        self.lose(EngineLost("the engine was closed"))
        self._links.close(linger_s)

    def _stop_watching(self) -> None:
        if self._end_fd is not None:
            self._loop.remove_reader(self._end_fd)
            os.close(self._end_fd)
            self._end_fd = None


def _watch(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where the system has none.

    Raises: EngineLost if it has ended.
    """
    try:
        with suppress(AttributeError):
            return os.pidfd_open(pid)
        return None
    except ProcessLookupError:
        raise EngineLost(f"the engine's process {pid} has ended") from None
