"""Where a node and its head are reached, looked at again while the node waits: both may come back elsewhere.

One idea: an address is what was found last. A machine that was off gets another one, and a name may lead to another
machine; whoever looks for a name may wait for long, so a thread of its own does.
"""

from __future__ import annotations

import ipaddress
import threading
from contextlib import suppress

from stageline.cluster.handshake import HandshakeError
from stageline.cluster.ports import own_address_towards, resolve
from stageline.cluster.ways import own_hosts
from stageline.errors import ConfigError
from stageline.links.tcp_address import TcpAddress


class Places:
    """Args:
    head_name: or its address in figures, which stays what it is.
    own_name: of `--node-address`; None takes the address that packets to the head carry.
    interface: of `--interface`.
    Attributes:
        head, own, hosts: as they were last taken: the head's address, this machine's, and all that activations may use.
    Raises: ConfigError if there is no way to the head, and for the operator's choices.
    """

    def __init__(self, head_name: str, head_port: int, own_name: str | None, interface: str | None) -> None:
        self._head_name = head_name
        self._own_name = own_name
        self._interface = interface
        self._thread: threading.Thread | None = None
        self.head = self._found = TcpAddress(_resolve_head(head_name), head_port)
        self._find_own()

    def look(self) -> bool:
        """Whether something has changed, as far as that is known by now."""
        if not _is_in_figures(self._head_name) and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._find_head, name="head's name", daemon=True)
            self._thread.start()
        return self._found != self.head or (self._own_name is None and _own_towards(self.head) not in (None, self.own))

    def take(self) -> None:
        """From now on what was found counts; where nothing is, what was before does."""
        self.head = self._found
        with suppress(ConfigError):
            self._find_own()

    def _find_own(self) -> None:
        """Raises: ConfigError."""
        name = self._own_name
        own = own_address_towards(self.head) if name is None else resolve(name, "--node-address")
        self.hosts = own_hosts(own, self._interface, is_only=name is not None)
        self.own = own

    def _find_head(self) -> None:
        # Unknown for now: it stays where it was.
        with suppress(ConfigError):
            self._found = TcpAddress(_resolve_head(self._head_name), self.head.port)


def _own_towards(head: TcpAddress) -> str | None:
    try:
        return own_address_towards(head)
    except ConfigError:
        return None


def _resolve_head(name: str) -> str:
    """Raises: HandshakeError."""
    try:
        return resolve(name, "HEAD")
    except ConfigError as error:
        raise HandshakeError("connection", str(error)) from None


def _is_in_figures(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
