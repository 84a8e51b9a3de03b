"""The answering side of a probe: echoes what it is asked to, and counts what it is sent.

One idea: it keeps nothing but a count per caller, and a few answers for who does not fetch them, so whoever probes
costs it little memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import zmq

from stageline.errors import ConfigError
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links, Socket, bound_address
from stageline.links.tcp_address import TcpAddress
from stageline.links.wakeup import Wakeup

ECHO, BLOCK, REPORT = b"echo", b"block", b"report"
"""Kinds of messages: say the same again; count this; say how many bytes of blocks came since the last report."""

BLOCK_BYTES = 256 * 2**10
_MAX_MESSAGE_BYTES = 2 * BLOCK_BYTES
_MOST_CALLERS = 256
_MOST_WAITING_FRAMES = 64
_BYTES_OF_A_COUNT = 8


class ProbeListener:
    """Answers probes from a thread of its own until `close`.

    Args:
        addresses: where; with port 0 a free one is taken.
        skips_unusable: leave out those that cannot be listened on.
        answers: to questions of other kinds, each from its body; called in the listener's thread. None as an answer
            says nothing.
    Attributes:
        addresses: where, with the ports that were taken.
    Raises: ConfigError if one cannot be listened on.
    """

    def __init__(
        self,
        addresses: Sequence[TcpAddress],
        security: LinkSecurity | None,
        skips_unusable: bool = False,
        answers: Mapping[bytes, Callable[[bytes], bytes | None]] | None = None,
    ) -> None:
        self._answers = answers or {}
        self._links = Links(security)
        self._bell = Wakeup()
        sockets = []
        try:
            for address in addresses:
                with suppress(*((ConfigError,) if skips_unusable else ())):
                    sockets.append(self._links.listener(address.url, _MAX_MESSAGE_BYTES, _MOST_WAITING_FRAMES))
        except BaseException:
            self._links.close()
            self._bell.close()
            raise
        self.addresses = [TcpAddress.parse(bound_address(socket)) for socket in sockets]
        self._counts: OrderedDict[tuple[int, bytes], int] = OrderedDict()
        self._thread = threading.Thread(target=self._answer, args=(sockets,), name="probe listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._bell.ring()
        self._thread.join()
        self._links.close()
        self._bell.close()

    def _answer(self, sockets: Sequence[Socket]) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        while True:
            for ready, _ in poller.poll():
                if ready == self._bell.fd:
                    return
                self._take(sockets.index(ready), ready)

    def _take(self, place: int, socket: Socket) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3:
            return  # of no prober of ours; what is not understood is not answered
        identity, kind, body = frames
        caller = (place, identity)
        if kind == BLOCK:
            self._counts[caller] = self._counts.get(caller, 0) + len(body)
            self._counts.move_to_end(caller)
            if len(self._counts) > _MOST_CALLERS:
                self._counts.popitem(last=False)
        elif kind == ECHO:
            self._send(socket, [identity, ECHO, body])
        elif kind == REPORT:
            count = self._counts.pop(caller, 0)
            self._send(socket, [identity, REPORT, count.to_bytes(_BYTES_OF_A_COUNT, "little")])
        elif kind in self._answers and (answer := self._answers[kind](body)) is not None:
            self._send(socket, [identity, kind, answer])

    def _send(self, socket: Socket, frames: list[bytes]) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # It left before it was answered, or lets more answers wait than it should.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
