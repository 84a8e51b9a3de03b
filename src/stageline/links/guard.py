"""The thread beside a process's TCP sockets: lets in who has the cluster key, tells of refusals and broken links.

One idea: it only ever waits. Connections come and go in ZeroMQ's own threads; this one hears of it, and no traffic
passes through it.
"""

from __future__ import annotations

import hmac
import logging
import os
import queue
import socket as sockets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from stageline.links.keys import LinkSecurity
from stageline.links.refusals import RefusalLog
from stageline.links.wakeup import Wakeup

logger = logging.getLogger(__name__)

ZAP_DOMAIN = b"stageline"
HANDSHAKE_S = 5.0
"""Who has not shown its key by then is cut off."""

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | _FAILED_HANDSHAKES
)
_WRONG_KEY = "its cluster key is not this one's, or it is no node of Stageline"
NOBODY = "nothing listens there, or a firewall is in between"
BROKEN = "the connection broke"
MUTE = "it takes connections and says nothing: it stands still, or is no node of Stageline"
_NO_KEY = "it hangs up on who has no cluster key, or is no node of Stageline; give --cluster-key-file if it has one"
_LEFT_EARLY = "it left, or took too long, before it had shown a key"

OnBroken = Callable[[str], None]
"""Hears, from the guard's thread, of a link that was up and is not: its address."""


class Guard:
    """Guards the TCP sockets of one context.

    Args:
        on_broken: called in this thread, so it may only ring a bell and keep a word.
    """

    def __init__(self, context: zmq.Context[Any], security: LinkSecurity | None, on_broken: OnBroken | None) -> None:
        self._on_broken = on_broken
        self._troubles: dict[str, str] = {}
        self._up: set[str] = set()
        self._news = threading.Condition()
        self._log = RefusalLog()
        self._bell = Wakeup()
        self._is_over = False
        self._arrivals: queue.SimpleQueue[Watched] = queue.SimpleQueue()
        self._zap: zmq.Socket[bytes] | None = None
        allowed = None if security is None else security.connecting
        if allowed is not None:
            self._allowed_key = z85.decode(allowed.public)
            self._zap = context.socket(zmq.REP)
            self._zap.bind(_ZAP_ADDRESS)
        self._hung_up = _NO_KEY if allowed is None else _WRONG_KEY
        self._thread = threading.Thread(target=self._watch, name="link guard", daemon=True)
        self._thread.start()

    def watch(self, socket: zmq.Socket[bytes]) -> Watched:
        """To be called before the socket is bound or connected, by the thread that owns it.

        Returns: what the caller tells the address, as soon as it is known.
        """
        watched = Watched(socket.get_monitor_socket(_EVENTS))
        self._arrivals.put(watched)
        self._bell.ring()
        return watched

    def trouble(self, address: str) -> str | None:
        """Why there is no connection to an address that this process connects to; None if nothing is known."""
        return self._troubles.get(address)

    def wait_until_up(self, address: str, timeout_s: float) -> bool:
        """Whether an address that this process connects to is connected within that time."""
        with self._news:
            return self._news.wait_for(lambda: address in self._up, timeout_s)

    def stop(self) -> None:
        """Returns when the thread has ended. The sockets' monitors must be disabled before."""
        self._is_over = True
        self._bell.ring()
        self._thread.join()
        self._bell.close()

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        if self._zap is not None:
            poller.register(self._zap, zmq.POLLIN)
        monitored: dict[zmq.Socket[bytes], Watched] = {}
        while not self._is_over:
            for ready, _ in poller.poll():
                if ready == self._bell.fd:
                    self._bell.heard()
                    while not self._arrivals.empty():
                        arrival = self._arrivals.get()
                        monitored[arrival.socket] = arrival
                        poller.register(arrival.socket, zmq.POLLIN)
                elif self._zap is not None and ready is self._zap:
                    self._answer_zap(self._zap)
                else:
                    self._hear(monitored[ready])
        for one in (*monitored, *([self._zap] if self._zap is not None else [])):
            one.close(linger=0)

    def _answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        """ZeroMQ asks about each client that knows the listening end's key. Source: ZMQ RFC 27."""
        frames = zap.recv_multipart()
        is_known = (
            len(frames) == 7
            and frames[0] == b"1.0"
            and frames[5] == b"CURVE"
            and hmac.compare_digest(frames[6], self._allowed_key)
        )
        request_id = frames[1] if len(frames) > 1 else b""
        verdict = [b"200", b"OK", b"node", b""] if is_known else [b"400", b"unknown key", b"", b""]
        zap.send_multipart([b"1.0", request_id, *verdict])

    def _hear(self, of: Watched) -> None:
        message = recv_monitor_message(of.socket)
        event, value = message["event"], message["value"]
        if event == zmq.EVENT_ACCEPTED:
            of.peers[value] = _peer_of(value)
        elif event == zmq.EVENT_CONNECTED:
            of.connected_s = time.monotonic()
        elif event & _FAILED_HANDSHAKES:
            of.failure = self._why(event, value, of)
            of.is_up = False
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnected(of, of.peers.pop(value, None))
        elif event == zmq.EVENT_CONNECT_RETRIED:
            self._troubles.setdefault(of.address, NOBODY)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            of.is_up, of.said = True, None
            self._troubles.pop(of.address, None)
            with self._news:
                self._up.add(of.address)
                self._news.notify_all()

    def _disconnected(self, of: Watched, peer: str | None) -> None:
        """Of a listening socket's connections it is not told which one was up: only connecting ends hear of breaks."""
        failure, of.failure = of.failure, None
        was_up, of.is_up = of.is_up, False
        if peer is None:
            self._troubles[of.address] = failure or (BROKEN if was_up else self._hung_up)
            self._up.discard(of.address)
            if was_up and self._on_broken is not None:
                self._on_broken(of.address)
            # It is tried again and again, and not every try ends with a reason: said once is enough.
            if failure is not None:
                failure, of.said = (None if failure == of.said else failure), failure
        if failure is not None:
            words = f"no connection to {of.address}" if peer is None else f"{of.address} refused {peer}"
            # Each try comes from another port.
            subject = f"{words.partition(' port ')[0]}: {failure}"
            if (line := self._log.line(f"{words}: {failure}", time.monotonic(), subject)) is not None:
                logger.warning("%s", line)

    def _why(self, event: int, value: int, of: Watched) -> str:
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            if of.connected_s is None:
                return _LEFT_EARLY
            # Who does not like the key hangs up at once.
            return MUTE if time.monotonic() - of.connected_s > HANDSHAKE_S / 2 else self._hung_up
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "one side has a cluster key, the other was started with --insecure"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "its cluster key is not this one's"
        return _WRONG_KEY


class Watched:
    """A socket, its monitor, and what was heard so far.

    Attributes:
        address: where it is bound or connects to; written by its owner.
        is_up: of a socket that connects: its handshake succeeded.
        connected_s: of a socket that connects: since when it has been, whatever became of the handshake.
        peers: accepted connections' file descriptors, and who is behind them.
        said: of a socket that connects: the failure that was logged.
        failure: of a handshake, until the end of its connection, which follows at once and says who it was.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.address = "?"
        self.socket = socket
        self.is_up = False
        self.connected_s: float | None = None
        self.peers: dict[int, str] = {}
        self.failure: str | None = None
        self.said: str | None = None


def _peer_of(fd: int) -> str:
    """The address behind a connection of this process, which may be gone again."""
    with suppress(OSError), _copy_of(fd) as connection:
        host, port = connection.getpeername()[:2]
        return f"{host} port {port}"
    return "a peer that left at once"


def _copy_of(fd: int) -> sockets.socket:
    """Raises: OSError, and leaves nothing open, if it is no socket: its number may be another file's by now."""
    copy = os.dup(fd)
    try:
        return sockets.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
