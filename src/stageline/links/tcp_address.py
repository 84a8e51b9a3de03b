"""Addresses of TCP sockets: an interface by its number and a port, never every interface at once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from stageline.errors import ConfigError

_SCHEME = "tcp://"
_HIGHEST_PORT, _MOST_DIGITS = 65535, 9
FIRST_UNPRIVILEGED_PORT = 1024


@dataclass(frozen=True)
class TcpAddress:
    """`host` is an IPv4 or IPv6 address in figures; port 0 means any that is free, where a socket is bound."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> TcpAddress:
        """Of `tcp://10.0.0.1:5000`, `10.0.0.1:5000` or `[fe80::1]:5000`. Raises: ConfigError."""
        host, colon, port = text.removeprefix(_SCHEME).rpartition(":")
        if not colon or not is_port(port):
            raise ConfigError(f"{text!r} is no address with a port; give one such as 10.0.0.1:5000")
        host = host.removeprefix("[").removesuffix("]")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(f"{text!r}: {host!r} is no IP address; give figures, such as 10.0.0.1:5000") from None
        return TcpAddress(host, int(port))

    def is_loopback(self) -> bool:
        """Only this machine reaches it."""
        return _unmapped(self.host).is_loopback

    def is_wildcard(self) -> bool:
        """It stands for every interface."""
        return _unmapped(self.host).is_unspecified

    def is_ipv6(self) -> bool:
        return ":" in self.host

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6() else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """As ZeroMQ wants it."""
        return f"{_SCHEME}{self}"


def host_and_port(text: str) -> tuple[str, str | None]:
    """Of what people type: `10.0.0.1`, `head.local:29500`, `fe80::1` or `[fe80::1]:29500`.

    Returns: the host, without brackets, and what stands where a port would; None if nothing does. Neither is checked.
    """
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":") if rest else None
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None


def is_port(text: str) -> bool:
    """Whether it is a number that TCP has a port for, or 0; the text may be anything, of any length."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return is_number and int(text) <= _HIGHEST_PORT


def why_not_permitted(port: int) -> str:
    """Why the system lets nobody listen on a port that nobody else has, and what to do."""
    if port < FIRST_UNPRIVILEGED_PORT:
        return f"ports below {FIRST_UNPRIVILEGED_PORT} need privileges; give a higher one"
    return "this system does not permit it; give another one, or ask whoever set up its sandbox or security rules"


def tcp_url(address: TcpAddress, source: str | None = None) -> str:
    """Where to connect to, for ZeroMQ. Args: source: this machine's address to leave from, in figures."""
    if source is None:
        return address.url
    return f"{_SCHEME}{TcpAddress(source, 0)};{address}"


def destination_of(url: str) -> TcpAddress:
    """Of what `tcp_url` wrote. Raises: ConfigError."""
    return TcpAddress.parse(url.rpartition(";")[2])


def is_tcp(url: str) -> bool:
    return url.startswith(_SCHEME)


def _unmapped(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
