"""The engine's process at work: takes requests from its clients, steps the core, and gives each client its news.

One idea: it waits in one place, the core's step, for a result, a client, its owner, a deadline and a lost stage alike;
and after each event everything that could have happened is looked at once, without waiting.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from stageline.clock import Clock
from stageline.config.engine_config import EngineConfig
from stageline.engine.core import EngineCore
from stageline.engine.messages import (
    Abort,
    Accepted,
    AddRequests,
    AskSpans,
    AskStats,
    Drain,
    ErrorReport,
    FromClient,
    FromOwner,
    Refused,
    SpansAnswer,
    StatsAnswer,
    Stop,
    ToClient,
    Updates,
)
from stageline.engine.request_check import check_engine_request
from stageline.engine.stats import EngineFacts
from stageline.errors import CapacityError, FrameError, NotReady, QueueFull, RequestError, WorkerLost
from stageline.links.frames import MessageDecoder, encode_message
from stageline.request import EngineRequest, RequestUpdate

logger = logging.getLogger(__name__)

_MAX_MESSAGES_PER_STEP = 256
"""A flood of messages does not keep the stages waiting."""


class EngineLoop:
    """Serves clients until it is told to stop.

    Args:
        incoming: where all clients' messages arrive.
        clients: sockets to the clients, by their index.
        facts: as they are now.
        orders: of the owner; another thread appends to it, and rings `Executor.wakeup` then.
    """

    def __init__(
        self,
        core: EngineCore,
        config: EngineConfig,
        facts: Callable[[], EngineFacts],
        vocab_size: int,
        clock: Clock,
        incoming: zmq.Socket[bytes],
        clients: Sequence[zmq.Socket[bytes]],
        orders: deque[FromOwner],
    ) -> None:
        self._core = core
        self._config = config
        self._facts = facts
        self._vocab_size = vocab_size
        self._clock = clock
        self._incoming = incoming
        self._clients = clients
        self._orders = orders
        self._decoder: MessageDecoder[FromClient] = MessageDecoder(FromClient)
        self._owners: dict[str, int] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._stats_questions: list[AskStats] = []
        self._spans_questions: deque[AskSpans] = deque()
        self._is_draining = False
        self._is_stopping = False
        self._has_told_drained = False

    def run_until_drained(self) -> bool:
        """Returns: true when no request is left and no new one is taken; false when told to stop."""
        while not self._is_stopping:
            self._take_orders()
            self._take_messages()
            if self._is_draining and not self._owners and not self._has_told_drained:
                self._has_told_drained = True
                return True
            if not self._is_stopping:
                self._step()
        return False

    def pipeline_lost(self, loss: WorkerLost, keeps_requests: bool) -> None:
        """The stages are gone. Clients do not wait for answers about them any more, nor, unless kept, for requests."""
        self._core.note_loss(loss)
        self._stats_questions.clear()
        self._spans_questions.clear()
        if not keeps_requests:
            for request_id in self._owners:
                self._core.abort(request_id)
            self._owners.clear()

    def _step(self) -> None:
        self._end_overdue()
        self._publish(self._core.step(waits_for_work=True, until_s=self._next_deadline_s()))
        if self._stats_questions and (stats := self._core.take_stats(self._facts())) is not None:
            for asked in self._stats_questions:
                self._send(asked.client_index, StatsAnswer(asked.question, stats))
            self._stats_questions.clear()
        self._answer_spans()

    def _answer_spans(self) -> None:
        """One question after the other; each is asked of the stages when the one before was answered."""
        if not self._spans_questions:
            return
        asked = self._spans_questions[0]
        spans = self._core.take_spans(asked.since_s, asked.most_per_stage)
        if spans is None:
            return
        self._spans_questions.popleft()
        self._send(asked.client_index, SpansAnswer(asked.question, spans))
        self._ask_for_spans()

    def _ask_for_spans(self) -> None:
        if self._spans_questions:
            asked = self._spans_questions[0]
            self._core.ask_for_spans(asked.since_s, asked.most_per_stage)

    # ---- what comes in ----

    def _take_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            self._is_draining = True
            self._is_stopping = self._is_stopping or isinstance(order, Stop)
            if isinstance(order, Drain):
                self._has_told_drained = False

    def _take_messages(self) -> None:
        for _ in range(_MAX_MESSAGES_PER_STEP):
            try:
                frame = self._incoming.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
                if not 0 <= message.client_index < len(self._clients):
                    raise FrameError(f"a message of client {message.client_index}; there are {len(self._clients)}")
            except FrameError as error:
                logger.warning("a client's message was dropped: %s", error)
                continue
            self._take(message)

    def _take(self, message: FromClient) -> None:
        match message:
            case AddRequests():
                self._add(message)
            case Abort():
                for request_id in message.request_ids:
                    if self._owners.get(request_id) == message.client_index:
                        del self._owners[request_id]
                        self._core.abort(request_id, message.finish_reason)
            case AskStats():
                self._core.ask_for_stats()
                self._stats_questions.append(message)
            case AskSpans():
                self._spans_questions.append(message)
                if len(self._spans_questions) == 1:
                    self._ask_for_spans()

    def _add(self, message: AddRequests) -> None:
        if not message.requests:
            return
        first_id = message.requests[0].request_id
        added: list[EngineRequest] = []
        try:
            self._check_room(len(message.requests))
            for request in message.requests:
                check_engine_request(request, self._vocab_size)
                self._core.add(request)
                added.append(request)
        except (RequestError, CapacityError) as error:
            for request in added:
                self._core.abort(request.request_id)
            self._send(message.client_index, Refused(first_id, ErrorReport.of(error)))
            return
        for request in added:
            self._owners[request.request_id] = message.client_index
            if request.deadline_s is not None:
                heapq.heappush(self._deadlines, (request.deadline_s, request.request_id))
        self._send(message.client_index, Accepted(first_id))

    def _check_room(self, num_new: int) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down and takes no more requests; ask another one")
        most_running, most_waiting = self._config.max_num_seqs, self._config.max_queue
        if most_waiting is None:
            return
        num_waiting = len(self._owners) - most_running
        if num_waiting + num_new > most_waiting:
            self._core.refused()
            raise QueueFull(
                f"{len(self._owners)} requests are running or waiting, and {num_new} more would leave more than "
                f"{most_waiting} waiting (--max-queue); try again later"
            )

    # ---- time ----

    def _next_deadline_s(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._owners:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _end_overdue(self) -> None:
        now_s = self._clock.now_s()
        overdue = []
        while (deadline_s := self._next_deadline_s()) is not None and deadline_s <= now_s:
            overdue.append(self._core.abort(heapq.heappop(self._deadlines)[1]))
        self._publish([update for update in overdue if update is not None])

    # ---- what goes out ----

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        by_client: dict[int, list[RequestUpdate]] = {}
        for update in updates:
            client_index = self._owners.get(update.request_id)
            if client_index is None:
                continue
            if update.finish_reason is not None:
                del self._owners[update.request_id]
            by_client.setdefault(client_index, []).append(update)
        for client_index, its_updates in by_client.items():
            self._send(client_index, Updates(its_updates))

    def _send(self, client_index: int, message: ToClient) -> None:
        self._clients[client_index].send(encode_message(message))
