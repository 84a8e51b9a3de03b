"""ZeroMQ sockets as Stageline uses them: bounded messages, closed without waiting for the dead.

Inside a machine they are ipc sockets that only this user can enter. What can be reached over a network is encrypted for
those who have the cluster key, bound to one named address, and notices a peer that is gone. (ZeroMQ itself sets
TCP_NODELAY on every TCP connection.)
"""

from __future__ import annotations

import errno

import zmq

from stageline.errors import ConfigError, FrameError
from stageline.links.guard import HANDSHAKE_S, ZAP_DOMAIN, Guard, OnBroken, Watched
from stageline.links.keys import LinkSecurity
from stageline.links.tcp_address import TcpAddress, destination_of, is_tcp, why_not_permitted

MAX_CONTROL_BYTES = 256 * 2**20
"""Largest control message accepted: far above any microbatch, far below what would hurt."""

_MAX_BYTES_TO_A_SENDER = 64 * 2**10
"""A socket that only sends hears nothing but signs of life."""

_HEARTBEAT_S, _SILENCE_S = 2.0, 10.0
"""A sign of life waits behind the message that is under way. So only who gets small messages may take silence for
death; for the others a slow link would look like a dead one."""

_UNACKNOWLEDGED_S = 8.0
"""A link on which nothing that was sent arrives for this long is dead. The system knows how far a message got: a large
one may take as long as it likes."""

_CONNECT_S = 3.0
_RECONNECT_S, _RECONNECT_MOST_S = 0.1, 2.0

Socket = zmq.Socket[bytes]


class Links:
    """A process's sockets.

    Queues are not bounded here: the window bounds them. At most `max_microbatches_in_flight` microbatches are out, a
    link carries each of them once, and a message of each kind has a most.

    Args:
        security: how TCP is protected; with None, TCP stays on loopback addresses.
        on_broken: see `Guard`; hears of TCP connections only.
    """

    def __init__(self, security: LinkSecurity | None = None, on_broken: OnBroken | None = None) -> None:
        self._context = zmq.Context()
        # It knows a socket only weakly: one that nobody held would be gone before `close` lets it send the rest.
        self._sockets: list[Socket] = []
        self._security = security
        self._on_broken = on_broken
        self._guard: Guard | None = None
        self._guarded: list[Socket] = []

    def sender(self, address: str) -> Socket:
        """Connects to a receiver, which may not be there yet. Raises: ConfigError for an address it may not use."""
        return self._connect(self._new_socket(zmq.PUSH, _MAX_BYTES_TO_A_SENDER), address)

    def receiver(self, address: str, max_message_bytes: int = MAX_CONTROL_BYTES) -> Socket:
        """Binds an address that senders connect to; a sender of a larger message is cut off.

        Raises: ConfigError if there can be no such socket, as on a disk that is full or a port that is taken.
        """
        return self._bind(self._new_socket(zmq.PULL, max_message_bytes), address)

    def listener(
        self, address: str, max_message_bytes: int = MAX_CONTROL_BYTES, most_waiting: int = 0
    ) -> Socket:
        """Binds an address that many callers connect to: a ROUTER, whose messages begin with the caller's identity.

        Args:
            most_waiting: frames that may wait for one caller, or from it, before sending fails; 0 for any number.
        """
        socket = self._new_socket(zmq.ROUTER, max_message_bytes)
        socket.set_hwm(most_waiting)
        # A message to a caller that is gone is an error, not silence.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return self._bind(socket, address)

    def caller(
        self,
        address: str,
        max_message_bytes: int = MAX_CONTROL_BYTES,
        identity: bytes = b"",
        gets_large_messages: bool = False,
    ) -> Socket:
        """Connects to a listener: a DEALER, for messages both ways.

        Args:
            identity: what the listener knows it by; empty lets ZeroMQ choose.
            gets_large_messages: one may be under way for long, so a listener that stands still is not noticed here.
        """
        socket = self._new_socket(zmq.DEALER, max_message_bytes)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        return self._connect(socket, address, 0.0 if gets_large_messages else _SILENCE_S)

    def trouble(self, address: str) -> str | None:
        """Why there is no connection to a TCP address that was connected to; None if there is one, or none failed."""
        return None if self._guard is None else self._guard.trouble(address)

    def wait_until_up(self, address: str, timeout_s: float) -> bool:
        """Whether a sender's or caller's address is connected within that time; ipc is at once."""
        return self._guard is None or not is_tcp(address) or self._guard.wait_until_up(address, timeout_s)

    def close(self, linger_s: float = 0.0) -> None:
        """Close all sockets, giving what was sent at most `linger_s` seconds to leave. No other thread may use them."""
        if self._guard is not None:
            for socket in self._guarded:
                if not socket.closed:
                    socket.disable_monitor()
            self._guard.stop()
            self._guard = None
        self._context.destroy(linger=int(linger_s * 1000))

    def _new_socket(self, kind: int, max_message_bytes: int) -> Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        # One that is garbage must not wait for the dead, either.
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._sockets.append(socket)
        return socket

    def _connect(self, socket: Socket, address: str, silence_s: float = 0.0) -> Socket:
        if is_tcp(address):
            self._prepare_tcp(socket, address, silence_s).address = address
            if self._security is not None and (own := self._security.connecting) is not None:
                assert self._security.listening is not None
                socket.curve_serverkey = self._security.listening.public
                socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
        socket.connect(address)
        return socket

    def _bind(self, socket: Socket, address: str) -> Socket:
        watched = None
        if is_tcp(address):
            watched = self._prepare_tcp(socket, address)
            if self._security is not None and (own := self._security.listening) is not None:
                socket.curve_server = True
                socket.curve_publickey, socket.curve_secretkey = own.public, own.secret
                socket.zap_domain = ZAP_DOMAIN
                # Without an answer about its key nobody comes in.
                socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(_words_for(address, error)) from None
        if watched is not None:
            watched.address = bound_address(socket)
        return socket

    def _prepare_tcp(self, socket: Socket, address: str, silence_s: float = 0.0) -> Watched:
        """Args: silence_s: after which a peer is taken for gone; 0 waits for what the system finds."""
        tcp = destination_of(address)
        check_is_protected(tcp, self._security)
        socket.setsockopt(zmq.IPV6, tcp.is_ipv6())
        for option, duration_s in (*_TCP_TIMES_S.items(), (zmq.HEARTBEAT_TIMEOUT, silence_s)):
            socket.setsockopt(option, int(duration_s * 1000))
        if self._guard is None:
            self._guard = Guard(self._context, self._security, self._on_broken)
        self._guarded.append(socket)
        return self._guard.watch(socket)


_TCP_TIMES_S = {
    zmq.HANDSHAKE_IVL: HANDSHAKE_S,
    zmq.HEARTBEAT_IVL: _HEARTBEAT_S,
    zmq.HEARTBEAT_TTL: 0.0,
    zmq.TCP_MAXRT: _UNACKNOWLEDGED_S,
    zmq.CONNECT_TIMEOUT: _CONNECT_S,
    zmq.RECONNECT_IVL: _RECONNECT_S,
    zmq.RECONNECT_IVL_MAX: _RECONNECT_MOST_S,
}


def check_is_protected(address: TcpAddress, security: LinkSecurity | None) -> None:
    """Refuse an address that stands for every interface, and one that others can reach if nothing protects it.

    Raises: ConfigError.
    """
    if address.is_wildcard():
        raise ConfigError(f"{address} means every interface of this machine; give the address of one of them")
    if security is None and not address.is_loopback():
        raise ConfigError(
            f"{address} can be reached from other machines, and there is no cluster key; give --cluster-key-file FILE "
            "on every node (`stageline key new --out FILE` makes one), or type --insecure if the network is trusted"
        )


def receive_frame(socket: Socket) -> zmq.Frame:
    """The next message, where it was received. Raises: FrameError if it has more than one frame."""
    frame = socket.recv(copy=False)
    if frame.more:
        raise FrameError(f"a message of several frames, the first of {len(frame)} bytes; expected one frame")
    return frame


def bound_address(socket: Socket) -> str:
    """Where a socket is bound, with the port that was free if port 0 was asked for."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()


def _words_for(address: str, error: zmq.ZMQError) -> str:
    reason = zmq.strerror(error.errno or 0)
    if not is_tcp(address):
        return (
            f"a socket cannot be made at {address}: {reason}; if that is a folder for "
            "temporary files, set TMPDIR to one with space, in which files can be made"
        )
    if error.errno == errno.EADDRINUSE:
        return f"{address} is in use; stop what listens there, or give another port"
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"{address} is not an address of this machine; give one that is"
    if error.errno == errno.EACCES:
        return f"{address} cannot be listened on: {why_not_permitted(destination_of(address).port)}"
    return f"{address} cannot be listened on: {reason}"
