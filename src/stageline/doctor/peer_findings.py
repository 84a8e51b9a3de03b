"""What is said of one other machine: how it is named, why it is not reached, and what differs from this one."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from stageline.cluster.handshake import HandshakeError, check_software, this_software
from stageline.cluster.ports import own_address_towards, resolve
from stageline.cluster.probe import Way
from stageline.doctor.finding import Finding, failed, ok, warning
from stageline.doctor.peer import Facts, mtu_of
from stageline.errors import ConfigError
from stageline.links.tcp_address import TcpAddress, host_and_port, is_port

_CLOCK_NOTICE_S = 1.0
_STUCK = "it answered, and then not"
"""What a probe says of a way on which small messages arrive and large ones do not."""


@dataclass(frozen=True)
class Peer:
    """A machine that answered.

    Args:
        clock_s: how far its time of day is ahead of this machine's.
        uncertain_s: by which that may be wrong.
    """

    name: str
    address: TcpAddress
    way: Way
    facts: Facts | None = None
    clock_s: float = 0.0
    uncertain_s: float = 0.0


def address_of_peer(name: str, port: int) -> TcpAddress:
    """Of HOST or HOST:PORT. Args: port: if it names none. Raises: ConfigError."""
    host, text = host_and_port(name)
    if text is not None and not (is_port(text) and int(text)):
        raise ConfigError(f"--peers {name}: {text!r} is no port; give HOST or HOST:PORT")
    return TcpAddress(resolve(host, "--peers"), port if text is None else int(text))


def why_not_reached(address: TcpAddress, reason: str) -> str:
    """One line with the way out."""
    if reason.startswith(_STUCK):
        return (
            f"{address}: small messages arrive and large ones do not: some device in between lets no packets of this "
            "size through; set the same, smaller MTU on both machines (ip link set DEVICE mtu 1400)"
        )
    return (
        f"{address}: {reason}; type there: stageline doctor --listen {address.host}, with the same key, and let TCP "
        f"port {address.port} through its firewall"
    )


def judge_software(facts: Facts, where: str) -> Finding:
    try:
        check_software(facts.hello.software, this_software())
    except HandshakeError as error:
        return failed("software", error.reason, where)
    return ok("software", f"stageline {facts.hello.software.stageline}, torch {facts.hello.software.torch}", where)


def judge_python(facts: Facts, where: str) -> Finding:
    own = platform.python_version()
    if facts.python.rpartition(".")[0] != own.rpartition(".")[0]:
        return warning(
            "environment", f"Python is {facts.python} there and {own} here; it may work, and the same on all machines "
            "is what was tested", where,
        )  # fmt: skip
    return ok("environment", f"Python {facts.python}", where)


def judge_clock(peer: Peer) -> Finding:
    """What a head would warn of when the machine joins."""
    shown = f"{peer.clock_s:+.3f} s from this machine's, within {peer.uncertain_s:.3f} s"
    if abs(peer.clock_s) > _CLOCK_NOTICE_S + peer.uncertain_s:
        return warning("clock", f"{shown}: logs will not fit together; run NTP (chrony) on both", peer.name)
    return ok("clock", shown, peer.name)


def own_mtu(peer: Peer) -> int:
    try:
        return mtu_of(own_address_towards(peer.address))
    except ConfigError:
        return 0


def judge_mtu(own_bytes: int, peer: Peer) -> Finding:
    """Args: own_bytes: of this machine's interface towards it."""
    there = 0 if peer.facts is None else peer.facts.mtu_bytes
    if own_bytes and there and own_bytes != there:
        return warning(
            "MTU", f"{there} there and {own_bytes} here; large packets may get lost: give both the same (ip link set "
            f"DEVICE mtu {min(own_bytes, there)})", peer.name,
        )  # fmt: skip
    return ok("MTU", f"{there or own_bytes or 'unknown'} on both", peer.name)
