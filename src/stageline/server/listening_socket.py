"""The TCP socket that the server listens on, bound before anything is started. One idea: an address has to be named.

Nobody listens on every interface by accident: wildcard addresses are refused, and an address that others can reach
needs either a key or the word `--insecure`.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

import psutil

from stageline.config.serve_config import ServeConfig
from stageline.errors import ConfigError
from stageline.links.tcp_address import FIRST_UNPRIVILEGED_PORT, why_not_permitted

logger = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the system holds for processes that are too busy to accept them."""


def bind(config: ServeConfig) -> socket.socket:
    """A socket bound to `config.host` and `config.port`, not listening yet. Raises: ConfigError."""
    family, address = _resolve(config)
    _check_is_protected(config, address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restart need not wait for the connections of the run before; a second server is refused all the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((str(address), config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(_words_for(config, error)) from None
    return listener


def url_of(listener: socket.socket, is_tls: bool) -> str:
    """Where clients reach it, such as http://127.0.0.1:8000."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _resolve(config: ServeConfig) -> tuple[socket.AddressFamily, _Address]:
    """A name may have several addresses; IPv4 goes first, as clients that were told of `localhost` expect."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {config.host} is neither an address nor a name that this machine knows "
            f"({getattr(error, 'strerror', None) or error}); give an address of this machine, such as 127.0.0.1"
        ) from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, ipaddress.ip_address(address[0])


def _check_is_protected(config: ServeConfig, address: _Address) -> None:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if (mapped or address).is_unspecified:
        others = _addresses_for_others()
        reached_by = f", or {' or '.join(others)} for other machines" if others else ""
        raise ConfigError(
            f"--host {config.host} means every interface of this machine; name the address to listen on: 127.0.0.1 "
            f"for this machine alone{reached_by}"
        )
    if (mapped or address).is_loopback:
        return
    if not config.api_key and not config.insecure:
        raise ConfigError(
            f"--host {config.host} can be reached from other machines, and no key is asked for; give --api-key-file "
            "FILE (or STAGELINE_API_KEY), listen on 127.0.0.1, or type --insecure if the network is trusted"
        )
    if config.api_key and config.ssl_certfile is None:
        logger.warning(
            "keys and prompts travel unencrypted to %s; give --ssl-certfile, or let a proxy in front speak TLS", address
        )


def _addresses_for_others() -> list[str]:
    """This machine's addresses but for loopback and those that only a neighbour on the same link could use."""
    found = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [text for text in found if "%" not in text and not ipaddress.ip_address(text).is_loopback]
    return [text for text in usable if not ipaddress.ip_address(text).is_link_local]


def _words_for(config: ServeConfig, error: OSError) -> str:
    host, port = config.host, config.port
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; stop what listens there, or give another --port (0 takes any)"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine; give one that is, such as 127.0.0.1"
    if error.errno == errno.EACCES and port < FIRST_UNPRIVILEGED_PORT:
        return (
            f"--port {port} is below {FIRST_UNPRIVILEGED_PORT} and needs privileges; give a higher port, and let a "
            "proxy in front listen on the low one"
        )
    if error.errno == errno.EACCES:
        return f"--port {port} cannot be listened on: {why_not_permitted(port)}"
    return f"{host} port {port} cannot be listened on: {error.strerror or error}"
