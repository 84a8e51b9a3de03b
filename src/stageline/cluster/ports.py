"""Names and ports of this machine: one address a name stands for, one port of a range that is free."""

from __future__ import annotations

import errno
import ipaddress
import socket

from stageline.errors import ConfigError
from stageline.links.tcp_address import TcpAddress


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


def free_port(address: str, ports: range) -> int:
    """The first port of a range that nothing on this machine listens on. Raises: ConfigError if there is none."""
    for port in ports:
        with _bound(address, port) as candidate:
            if candidate is not None:
                return port
    raise ConfigError(
        f"ports {ports.start} to {ports.stop - 1} of {address} are all in use; give another --port-range"
    )


def check_port(address: str, port: int, flag: str) -> None:
    """Raises: ConfigError if it cannot be listened on."""
    with _bound(address, port) as candidate:
        if candidate is None:
            raise ConfigError(f"port {port} of {address} is in use; stop what listens there, or give another {flag}")


class _bound:
    """A socket that was bound and is closed again; None if the port is in use. Raises: ConfigError for the address."""

    def __init__(self, address: str, port: int) -> None:
        self._place = (address, port)

    def __enter__(self) -> socket.socket | None:
        is_v6 = ipaddress.ip_address(self._place[0]).version == 6
        self._socket = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(self._place)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return None
            raise ConfigError(
                f"{self._place[0]} is not an address of this machine ({error.strerror or error}); give one that is"
            ) from None
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close()


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
