"""How good the ways between two machines are, measured as links will use them: same sockets, same encryption.

One idea: what counts is how long a step's activations take. A way's score is half its round trip plus the time that a
step's bytes take, so latency and bandwidth are weighed by what the model needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from stageline.cluster.addresses import Pair
from stageline.cluster.probe_listener import BLOCK, BLOCK_BYTES, ECHO, REPORT
from stageline.errors import ConfigError
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links, Socket
from stageline.links.tcp_address import TcpAddress, tcp_url

TYPICAL_STEP_BYTES = 64 * 4096 * 2
"""Activations of 64 requests of a model with hidden size 4096, in 16 bits."""

_REACH_S = 3.0
"""Who has not answered by then is taken for unreachable."""

_NUM_ROUND_TRIPS = 30
_ROUND_TRIPS_S = 0.5
_LONG_ENOUGH_S = 0.15
_MOST_BYTES = 256 * 2**20
_PATIENCE_S = 5.0
_TINY = b"\0" * 64


@dataclass(frozen=True)
class Way:
    """A measured way to another machine.

    Args:
        source: the address it was left from; None as the system chooses.
        round_trip_s: the shortest of many, with small messages.
        bytes_per_s: with the encryption that links have.
    """

    source: str | None
    destination: TcpAddress
    round_trip_s: float
    bytes_per_s: float

    def step_s(self, num_bytes: int = TYPICAL_STEP_BYTES) -> float:
        """How long a step's activations take to the other machine."""
        return self.round_trip_s / 2 + num_bytes / self.bytes_per_s

    @property
    def url(self) -> str:
        """For `Links.sender`: it leaves from the same address."""
        return tcp_url(self.destination, self.source)

    def __str__(self) -> str:
        source = f"{self.source} -> " if self.source else ""
        return (
            f"{source}{self.destination}: round trip {self.round_trip_s * 1000:.3g} ms, "
            f"{self.bytes_per_s * 8 / 1e9:.3g} Gbit/s"
        )


@dataclass(frozen=True)
class NoWay:
    """An address that did not answer, and why as far as that can be told."""

    source: str | None
    destination: TcpAddress
    reason: str

    def __str__(self) -> str:
        source = f"{self.source} -> " if self.source else ""
        return f"{source}{self.destination}: {self.reason}"


def choose_address(
    pairs: Sequence[Pair], security: LinkSecurity | None, step_bytes: int = TYPICAL_STEP_BYTES
) -> tuple[Way, list[Way | NoWay]]:
    """Measure every pair of addresses and take the one on which a step is quickest.

    Args:
        pairs: of `candidate_pairs`, with addresses of the other machine's `ProbeListener`.
        step_bytes: what a step sends.
    Returns: the best way, and what was found on each.
    Raises: ConfigError if the other machine can be reached on none of them, with the reason for each.
    """
    found = measure([(pair.source, pair.destination) for pair in pairs], security)
    ways = [one for one in found if isinstance(one, Way)]
    if not ways:
        reasons = "; ".join(map(str, found)) or "there is no pair of addresses of the same kind"
        raise ConfigError(f"the other machine cannot be reached: {reasons}")
    return min(ways, key=lambda way: way.step_s(step_bytes)), found


def measure(
    targets: Sequence[tuple[str | None, TcpAddress]], security: LinkSecurity | None
) -> list[Way | NoWay]:
    """Measure each way to a `ProbeListener`, one after the other, so that they do not disturb each other.

    Takes at most 3 seconds for all that do not answer together, and about one for each that does.
    """
    links = Links(security)
    try:
        sockets = [links.caller(tcp_url(address, source)) for source, address in targets]
        reached = _reach(sockets)
        found: list[Way | NoWay] = []
        for socket, (source, address), is_reached in zip(sockets, targets, reached, strict=True):
            if not is_reached:
                reason = links.trouble(tcp_url(address, source)) or f"no answer within {_REACH_S:g} s"
                found.append(NoWay(source, address, reason))
                continue
            try:
                round_trip_s = _round_trip_s(socket)
                found.append(Way(source, address, round_trip_s, _bytes_per_s(socket, round_trip_s)))
            except TimeoutError:
                found.append(NoWay(source, address, f"it answered, and then not for {_PATIENCE_S:g} s"))
        return found
    finally:
        links.close()


def _reach(sockets: Sequence[Socket]) -> list[bool]:
    """Which of them answer, all asked at once."""
    poller = zmq.Poller()
    for socket in sockets:
        socket.send_multipart([ECHO, _TINY])
        poller.register(socket, zmq.POLLIN)
    silent = set(sockets)
    deadline_s = time.monotonic() + _REACH_S
    while silent and (left_s := deadline_s - time.monotonic()) > 0:
        for socket, _ in poller.poll(math.ceil(left_s * 1000)):
            socket.recv_multipart()
            silent.discard(socket)
    return [socket not in silent for socket in sockets]


def _round_trip_s(socket: Socket) -> float:
    """The shortest: longer ones waited for something else."""
    shortest_s = math.inf
    began_s = time.monotonic()
    for _ in range(_NUM_ROUND_TRIPS):
        sent_s = time.perf_counter()
        socket.send_multipart([ECHO, _TINY])
        _answer(socket, ECHO)
        shortest_s = min(shortest_s, time.perf_counter() - sent_s)
        if time.monotonic() - began_s > _ROUND_TRIPS_S:
            break
    return shortest_s


def _bytes_per_s(socket: Socket, round_trip_s: float) -> float:
    """Send twice as much until it takes long enough to be timed."""
    block = bytes(BLOCK_BYTES)
    num_blocks = 1
    while True:
        sent_s = time.perf_counter()
        for _ in range(num_blocks):
            socket.send_multipart([BLOCK, block], copy=False)
        socket.send_multipart([REPORT, b""])
        count = int.from_bytes(_answer(socket, REPORT), "little")
        took_s = time.perf_counter() - sent_s
        if count != num_blocks * BLOCK_BYTES:
            raise TimeoutError
        if took_s >= _LONG_ENOUGH_S + round_trip_s or 2 * count > _MOST_BYTES:
            return count / max(took_s - round_trip_s, 1e-9)
        num_blocks *= 2


def _answer(socket: Socket, kind: bytes) -> bytes:
    if not socket.poll(int(_PATIENCE_S * 1000)):
        raise TimeoutError
    frames = socket.recv_multipart()
    if len(frames) != 2 or frames[0] != kind:
        raise TimeoutError
    return frames[1]
