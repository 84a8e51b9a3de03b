"""Takes connections from a listening socket that several processes may share.

One idea: one connection per turn. A process that would take all that wait, as asyncio's own server does, would leave
none to its idle neighbours; and one that has as many as it can hold takes no more: the rest wait in the system's queue.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from stageline.server.http_protocol import Answering, BoundedProtocol

logger = logging.getLogger(__name__)

_TLS_HANDSHAKE_S = 10.0

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
        self._handshakes: set[asyncio.Task[None]] = set()
        listening.setblocking(False)
        self._accept_if_there_is_room()

    async def drain(self, patience_s: float) -> int:
        """Accept no more, let requests that are being answered finish, close all connections.

        Returns: the number of connections that were cut off because they took longer than `patience_s`.
        """
        self._is_draining = True
        self._stop_accepting()
        self._listening.close()
        for connection in list(self._shared.connections):
            connection.shutdown()
        self._note_end_if_all_closed()
        try:
            await asyncio.wait_for(self._all_closed.wait(), patience_s)
        except TimeoutError:
            num_left = self._num_open
            for connection in list(self._shared.connections):
                connection.transport.abort()
            for handshake in self._handshakes:
                handshake.cancel()
            return num_left
        return 0

    def _accept_if_there_is_room(self) -> None:
        if not self._is_accepting and not self._is_draining and self._num_open < self._max_connections:
            self._is_accepting = True
            self._loop.add_reader(self._listening, self._accept)

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            self._loop.remove_reader(self._listening)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process was quicker, or the client has left again
        except OSError as error:
            # Out of files or memory: go on when a connection closes, or there would be no end to trying.
            logger.error("no connection can be accepted: %s", error.strerror or error)
            if self._num_open:
                self._stop_accepting()
            return
        connection.setblocking(False)
        # Finds out, in the long run, that a silent client's machine is gone.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._num_open += 1
        if self._num_open >= self._max_connections:
            self._stop_accepting()
        handshake = self._loop.create_task(self._connect(connection))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

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
        self._accept_if_there_is_room()
        self._note_end_if_all_closed()

    def _note_end_if_all_closed(self) -> None:
        if self._is_draining and self._num_open == 0:
            self._all_closed.set()
