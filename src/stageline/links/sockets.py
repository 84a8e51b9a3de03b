"""ZeroMQ sockets as Stageline uses them: one-way pipes, bounded messages, no waiting for a dead peer."""

from __future__ import annotations

import zmq

MAX_CONTROL_BYTES = 256 * 2**20
"""Largest control message accepted: far above any microbatch, far below what would hurt."""


class Links:
    """A process's sockets. Queues are not bounded here: the window of microbatches bounds what can be in them."""

    def __init__(self) -> None:
        self._context = zmq.Context()

    def sender(self, address: str) -> zmq.Socket[bytes]:
        """Connects to a receiver, which may not be there yet."""
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(address)
        return socket

    def receiver(self, address: str, max_message_bytes: int = MAX_CONTROL_BYTES) -> zmq.Socket[bytes]:
        """Binds an address that senders connect to; a sender of a larger message is cut off."""
        socket = self._context.socket(zmq.PULL)
        socket.set_hwm(0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.bind(address)
        return socket

    def close(self, linger_s: float = 0.0) -> None:
        """Close all sockets, giving what was sent at most `linger_s` seconds to leave."""
        self._context.destroy(linger=int(linger_s * 1000))
