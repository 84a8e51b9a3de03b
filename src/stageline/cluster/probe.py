"""How good the ways between two machines are, measured as links will use them: same sockets, same encryption.

One idea: what counts is how long a step's activations take. A way's score is half its round trip plus the time that a
step's bytes take, so latency and bandwidth are weighed by what the model needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import zmq

from stageline.cluster.addresses import Pair
from stageline.cluster.probe_listener import BLOCK, BLOCK_BYTES, ECHO, REPORT
from stageline.errors import ConfigError
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links, Socket
from stageline.links.tcp_address import TcpAddress, tcp_url
from stageline.links.wakeup import Wakeup

TYPICAL_STEP_BYTES = 64 * 4096 * 2
"""Activations of 64 requests of a model with hidden size 4096, in 16 bits."""

_REACH_S = 3.0
"""Who has not answered by then is taken for unreachable."""

_NUM_ROUND_TRIPS = 30
_ROUND_TRIPS_S = 0.5
_LONG_ENOUGH_S = 0.15
_FIRST_BYTES, _MOST_BYTES = 8 * 2**10, 256 * 2**20
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


class Stopped(Exception):
    """Nobody wants to know any more."""


def choose_address(
    pairs: Sequence[Pair],
    security: LinkSecurity | None,
    step_bytes: int = TYPICAL_STEP_BYTES,
    stop: Wakeup | None = None,
) -> tuple[Way, list[Way | NoWay]]:
    """Measure every pair of addresses and take the one on which a step is quickest.

    Args:
        pairs: of `candidate_pairs`, with addresses of the other machine's `ProbeListener`.
        step_bytes: what a step sends.
        stop: as for `measure`.
    Returns: the best way, and what was found on each.
    Raises: ConfigError if the other machine can be reached on none of them, with the reason for each; Stopped.
    """
    found = measure([(pair.source, pair.destination) for pair in pairs], security, stop)
    ways = [one for one in found if isinstance(one, Way)]
    if not ways:
        reasons = "; ".join(map(str, found)) or "there is no pair of addresses of the same kind"
        raise ConfigError(f"the other machine cannot be reached: {reasons}")
    return min(ways, key=lambda way: way.step_s(step_bytes)), found


def measure(
    targets: Sequence[tuple[str | None, TcpAddress]], security: LinkSecurity | None, stop: Wakeup | None = None
) -> list[Way | NoWay]:
    """Measure each way to a `ProbeListener`, one after the other, so that they do not disturb each other.

    Takes at most 3 seconds for all that do not answer together, and about one for each that does.

    Args:
        stop: rung by another thread, ends this at once; it is left unheard.
    Raises: Stopped; ConfigError if this machine opens no sockets for it.
    """
    try:
        with closing(Links(security)) as links:
            return _measured(links, targets, stop)
    except zmq.ZMQError as error:
        raise ConfigError(f"the ways to other machines cannot be measured: {error.strerror or error}") from None


def _measured(
    links: Links, targets: Sequence[tuple[str | None, TcpAddress]], stop: Wakeup | None
) -> list[Way | NoWay]:
    """Raises: Stopped."""
    probers = [_Prober(links.caller(tcp_url(address, source)), stop) for source, address in targets]
    reached = _reach(probers, stop)
    found: list[Way | NoWay] = []
    for prober, (source, address), is_reached in zip(probers, targets, reached, strict=True):
        if not is_reached:
            reason = links.trouble(tcp_url(address, source)) or f"no answer within {_REACH_S:g} s"
            found.append(NoWay(source, address, reason))
            continue
        try:
            round_trip_s = _round_trip_s(prober)
            found.append(Way(source, address, round_trip_s, _bytes_per_s(prober, round_trip_s)))
        except TimeoutError:
            found.append(NoWay(source, address, f"it answered, and then not for {_PATIENCE_S:g} s"))
    return found


class _Prober:
    """One way's socket, and who may say that it is enough."""

    def __init__(self, socket: Socket, stop: Wakeup | None) -> None:
        self.socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if stop is not None:
            self._poller.register(stop.fd, zmq.POLLIN)

    def ask(self, kind: bytes, body: bytes) -> bytes:
        """Raises: TimeoutError if no answer comes, or another one; Stopped."""
        self.socket.send_multipart([kind, body])
        ready = dict(self._poller.poll(int(_PATIENCE_S * 1000)))
        if ready and self.socket not in ready:
            raise Stopped
        frames = self.socket.recv_multipart() if ready else []
        if len(frames) != 2 or frames[0] != kind:
            raise TimeoutError
        return frames[1]


def _reach(probers: Sequence[_Prober], stop: Wakeup | None) -> list[bool]:
    """Which of them answer, all asked at once. Raises: Stopped."""
    poller = zmq.Poller()
    if stop is not None:
        poller.register(stop.fd, zmq.POLLIN)
    for prober in probers:
        prober.socket.send_multipart([ECHO, _TINY])
        poller.register(prober.socket, zmq.POLLIN)
    silent = {prober.socket for prober in probers}
    deadline_s = time.monotonic() + _REACH_S
    while silent and (left_s := deadline_s - time.monotonic()) > 0:
        for ready, _ in poller.poll(math.ceil(left_s * 1000)):
            if stop is not None and ready == stop.fd:
                raise Stopped
            ready.recv_multipart()
            silent.discard(ready)
    return [prober.socket not in silent for prober in probers]


def _round_trip_s(prober: _Prober) -> float:
    """The shortest: longer ones waited for something else."""
    shortest_s = math.inf
    began_s = time.monotonic()
    for _ in range(_NUM_ROUND_TRIPS):
        sent_s = time.perf_counter()
        prober.ask(ECHO, _TINY)
        shortest_s = min(shortest_s, time.perf_counter() - sent_s)
        if time.monotonic() - began_s > _ROUND_TRIPS_S:
            break
    return shortest_s


def _bytes_per_s(prober: _Prober, round_trip_s: float) -> float:
    """Send twice as much until it takes long enough to be timed; so little at first that a slow way answers in time."""
    num_bytes = _FIRST_BYTES
    while True:
        block = bytes(min(num_bytes, BLOCK_BYTES))
        sent_s = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            prober.socket.send_multipart([BLOCK, block], copy=False)
        count = int.from_bytes(prober.ask(REPORT, b""), "little")
        took_s = time.perf_counter() - sent_s
        if count != num_bytes:
            raise TimeoutError
        if took_s >= _LONG_ENOUGH_S + round_trip_s or 2 * count > _MOST_BYTES:
            return count / max(took_s - round_trip_s, 1e-9)
        num_bytes *= 2
