"""Takes connections from a listening socket that several processes may share.

One idea: one connection per turn. A process that would take all that wait, as asyncio's own server does, would leave
none to its idle neighbours; and one that has as many as it can hold takes no more: the rest wait in the system's queue,
unless some of its own have sent no whole request for a while, be it their first or a further one. Those give way, the
oldest first.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from stageline.server.http_protocol import Answering, BoundedProtocol

logger = logging.getLogger(__name__)

_TLS_HANDSHAKE_S = 10.0

_LAST_WORDS_S = 0.7
"""How long a broken off answer's error may take to leave, and what answers after that."""

_FRESH_S = 1.0
"""How long a connection may take for its request when others wait for its place; then accepting is tried again."""

_GIVING_WAY_AT_ONCE = 64
"""Looking for the oldest takes time: one share of all connections in this many is closed at a time."""

MakeProtocol = Callable[[Answering, Callable[[], None]], BoundedProtocol]


class Listener:
    """Accepts until `drain`.

    Args:
        listening: a listening socket; closed by `drain`.
        make_protocol: gets what connections share, and what to call when the connection is over.
    """

    def __init__(
        self,
        listening: socket.socket,
        tls: ssl.SSLContext | None,
        max_connections: int,
        make_protocol: MakeProtocol,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._tls = tls
        self._max_connections = max_connections
        self._make_protocol = make_protocol
        self._shared = Answering()
        self._num_open = 0
        self._is_accepting = False
        self._is_draining = False
        self._all_closed = asyncio.Event()
        self._is_enough = asyncio.Event()
        # With the time when each began, the oldest first.
        self._handshakes: dict[asyncio.Task[None], float] = {}
        listening.setblocking(False)
        self._start_accepting()

    async def drain(self, patience_s: float, break_off: Callable[[], None] | None = None) -> int:
        """Accept no more, let requests that are being answered finish, close all connections.

        Args:
            break_off: called after `patience_s`; it makes what is still being answered end, with an error.
        Returns: the number of requests that were broken off because they took longer than `patience_s`.
        """
        self._is_draining = True
        self._stop_accepting()
        self._listening.close()
        for connection in self._connections():
            connection.shutdown()
        self._note_end_if_all_closed()
        patience = self._loop.call_later(patience_s, self._is_enough.set)
        await self._is_enough.wait()
        patience.cancel()
        num_broken_off = sum(connection.is_answering for connection in self._connections())
        if num_broken_off and break_off is not None:
            break_off()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), _LAST_WORDS_S)
        for connection in self._connections():
            connection.transport.abort()
        for handshake in self._handshakes:
            handshake.cancel()
        if break_off is not None and self._shared.tasks:
            await asyncio.wait(self._shared.tasks, timeout=_LAST_WORDS_S)
        return num_broken_off

    def hurry(self) -> None:
        """A drain's patience is over."""
        self._is_enough.set()

    def _connections(self) -> list[BoundedProtocol]:
        return [one for one in self._shared.connections if isinstance(one, BoundedProtocol)]

    def _start_accepting(self) -> None:
        if not self._is_accepting and not self._is_draining:
            self._is_accepting = True
            self._loop.add_reader(self._listening, self._accept)

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listening)

    def _rest_from_accepting(self) -> None:
        """Until a connection closes, or for a while."""
        self._stop_accepting()
        self._loop.call_later(_FRESH_S, self._start_accepting)

    def _accept(self) -> None:
        if self._num_open >= self._max_connections:
            if not self._make_room():
                self._rest_from_accepting()
            return
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was quicker, or the client has left again
        except OSError as error:
            # Out of files or memory: trying again at once would have no end.
            logger.error("no connection can be accepted: %s", error.strerror or error)
            self._rest_from_accepting()
            return
        connection.setblocking(False)
        # Finds out, in the long run, that a silent client's machine is gone.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._num_open += 1
        handshake = self._loop.create_task(self._connect(connection))
        self._handshakes[handshake] = self._loop.time()
        handshake.add_done_callback(self._handshakes.pop)

    def _make_room(self) -> bool:
        most = max(1, self._max_connections // _GIVING_WAY_AT_ONCE)
        oldest_first = sorted(self._connections(), key=lambda one: one.waits_since_s)
        giving_way = (connection for connection in oldest_first if connection.give_way(_FRESH_S))
        num_given = sum(1 for _ in itertools.islice(giving_way, most))
        # Who does not go on with a handshake of TLS is no connection yet.
        stale_s = self._loop.time() - _FRESH_S
        stale = [handshake for handshake, began_s in self._handshakes.items() if began_s <= stale_s]
        for handshake in stale[: most - num_given]:
            handshake.cancel()
        return num_given > 0 or bool(stale)

    async def _connect(self, connection: socket.socket) -> None:
        protocols: list[BoundedProtocol] = []

        def make() -> BoundedProtocol:
            protocols.append(self._make_protocol(self._shared, self._on_lost))
            return protocols[-1]

        try:
            await self._loop.connect_accepted_socket(
                make,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=_TLS_HANDSHAKE_S if self._tls else None,
            )
        except (OSError, asyncio.CancelledError) as error:
            logger.debug("a connection failed before its first request: %s", error)
            connection.close()
            if not any(protocol.transport for protocol in protocols):
                self._on_lost()

    def _on_lost(self) -> None:
        self._num_open -= 1
        self._start_accepting()
        self._note_end_if_all_closed()

    def _note_end_if_all_closed(self) -> None:
        if self._is_draining and self._num_open == 0:
            self._all_closed.set()
            self._is_enough.set()
