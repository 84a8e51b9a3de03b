"""Names and ports of this machine: one address a name stands for, one port of a range that is kept."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping, Sequence

from stageline.errors import ConfigError
from stageline.links.tcp_address import TcpAddress, why_not_permitted


def resolve(name: str, flag: str) -> str:
    """The address, in figures, that a name stands for; IPv4 first. Raises: ConfigError."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{flag} {name} is neither an address nor a name that this machine knows "
            f"({getattr(error, 'strerror', None) or error}); give an address, such as 10.0.0.1"
        ) from None
    *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(address[0])


class HeldPort:
    """A port that is kept for the stages this machine will start: other programs that look for one pass it by.

    It is bound and does not listen, and lets a socket that reuses addresses, as ZeroMQ's do, bind it too. Another
    `HeldPort` that looks twice could do the same: the UDP port of this number, which nobody reuses, tells it not to.

    Args:
        ports: the first one that is free is taken.
    Raises: ConfigError if there is none, or the address is not this machine's.
    """

    def __init__(self, address: str, ports: Sequence[int]) -> None:
        if TcpAddress(address, 0).is_wildcard():
            raise ConfigError(f"{address} means every interface of this machine; give the address of one of them")
        # Connections of a run before, which may still be closing, make a port look taken at the first sight.
        refusals: dict[int, OSError] = {}
        for reuses in (False, True):
            for port in ports:
                try:
                    self._sockets = _hold(address, port, reuses)
                except OSError as error:
                    refusals[port] = error
                    continue
                self.address = TcpAddress(address, port)
                return
        raise ConfigError(_words_for_range(address, refusals))

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def _words_for_range(address: str, refusals: Mapping[int, OSError]) -> str:
    """Why none of a range's ports can be had. Args: refusals: of each of them."""
    if not refusals:
        return f"no port of {address} is left; give a longer --port-range"
    shown = f"ports {min(refusals)} to {max(refusals)} of {address}"
    denied = [port for port, error in refusals.items() if error.errno == errno.EACCES]
    if not denied:
        return f"{shown} are all in use; give another --port-range"
    if len(denied) == len(refusals):
        return f"{shown} cannot be listened on: {why_not_permitted(denied[0])} with --port-range"
    return (
        f"{shown}: up to {max(denied)} they cannot be listened on, for {why_not_permitted(denied[0])}; the others are "
        "in use; give another --port-range"
    )


def check_port(address: str, port: int, flag: str) -> None:
    """Raises: ConfigError if it cannot be listened on."""
    try:
        _bind(address, port, reuses=True).close()
    except PermissionError:
        raise ConfigError(
            f"port {port} of {address} cannot be listened on: {why_not_permitted(port)} with {flag}"
        ) from None
    except OSError:
        raise ConfigError(
            f"port {port} of {address} is in use; stop what listens there, or give another {flag}"
        ) from None


def _hold(address: str, port: int, reuses: bool) -> tuple[socket.socket, socket.socket]:
    """Raises: OSError if the port cannot be had; ConfigError for the address."""
    held = _bind(address, port, reuses)
    try:
        mark = _bind(address, port, reuses=False, kind=socket.SOCK_DGRAM)
    except BaseException:
        held.close()
        raise
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held, mark


def _bind(address: str, port: int, reuses: bool, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Raises: OSError if the port is in use, or the system does not permit it; ConfigError for the address."""
    is_v6 = ipaddress.ip_address(address).version == 6
    candidate = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, kind)
    candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
    try:
        candidate.bind((address, port))
    except OSError as error:
        candidate.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ConfigError(
            f"{address} is not an address of this machine ({error.strerror or error}); give one that is"
        ) from None
    return candidate


def own_address_towards(head: TcpAddress) -> str:
    """The address of this machine that its packets to the head carry; nothing is sent for it. Raises: ConfigError."""
    with socket.socket(socket.AF_INET6 if head.is_ipv6() else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head.host, head.port))
        except OSError as error:
            raise ConfigError(
                f"this machine has no way to {head}: {error.strerror or error}; is the address right, and is the "
                "network up?"
            ) from None
        return str(probe.getsockname()[0])
