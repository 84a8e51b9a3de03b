"""Which of a machine's addresses links may use: what the operator allows, and which pairs of two machines can meet.

Interfaces are named as NCCL_SOCKET_IFNAME names them, for users have such a line already: `eth,ib` are beginnings of
names, `=eth0` is one exact name, `^docker,lo` is every interface but those.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from stageline.config import environment
from stageline.errors import ConfigError
from stageline.links.tcp_address import TcpAddress

_NEVER_BY_DEFAULT = ("lo", "docker")
MOST_PAIRS = 16


@dataclass(frozen=True)
class OwnAddress:
    """One address of this machine. `network` is the subnet that its neighbours are in, such as 10.1.2.0/24."""

    interface: str
    host: str
    network: str


@dataclass(frozen=True)
class Pair:
    """Two machines' addresses of the same kind: this one's, in figures, and one that the other listens on."""

    source: str
    destination: TcpAddress


@dataclass(frozen=True)
class InterfaceFilter:
    """Args: names: beginnings of names, or whole ones if `is_exact`. is_exclusion: every interface but those."""

    names: tuple[str, ...]
    is_exact: bool = False
    is_exclusion: bool = False

    @staticmethod
    def parse(text: str, source: str) -> InterfaceFilter:
        """Of `eth,ib`, `=eth0`, `^docker` or `^=eth3`. Args: source: flag or variable. Raises: ConfigError."""
        rest = text.strip()
        is_exclusion, rest = rest.startswith("^"), rest.removeprefix("^")
        is_exact, rest = rest.startswith("="), rest.removeprefix("=")
        names = tuple(name.strip() for name in rest.split(","))
        if not all(names):
            raise ConfigError(
                f"{source} is {text!r}; give names of interfaces such as eth0, beginnings of names such as eth,ib, or "
                "^docker for all but those"
            )
        return InterfaceFilter(names, is_exact, is_exclusion)

    def allows(self, interface: str) -> bool:
        is_named = any(interface == name if self.is_exact else interface.startswith(name) for name in self.names)
        return is_named != self.is_exclusion


def wanted_interfaces(flag: str | None) -> tuple[InterfaceFilter, str] | None:
    """What `--interface`, STAGELINE_INTERFACE or NCCL_SOCKET_IFNAME asks for, and which of them; the first one wins."""
    if flag is not None:
        return InterfaceFilter.parse(flag, "--interface"), f"--interface {flag}"
    variable = environment.interface()
    if variable is None:
        return None
    return InterfaceFilter.parse(variable.value, variable.name), f"{variable.name}={variable.value}"


def own_addresses(interface_flag: str | None) -> list[OwnAddress]:
    """This machine's addresses that links may use, of interfaces that are up; IPv4 first.

    Without a choice of the operator's: all that other machines could reach, but for Docker's bridges.

    Raises: ConfigError if the operator's choice leaves none, naming the interfaces that there are.
    """
    there = _all_addresses()
    wanted = wanted_interfaces(interface_flag)
    if wanted is None:
        return [address for address in there if not address.interface.startswith(_NEVER_BY_DEFAULT)]
    allowed, words = wanted
    if not (found := [address for address in there if allowed.allows(address.interface)]):
        names = ", ".join(dict.fromkeys(f"{address.interface} ({address.host})" for address in there)) or "none"
        raise ConfigError(f"{words} fits no interface that is up; there are: {names}")
    return found


def candidate_pairs(own: Sequence[OwnAddress], peers: Sequence[TcpAddress]) -> list[Pair]:
    """Every pair of addresses of the same kind that can meet, those within one subnet first; at most `MOST_PAIRS`.

    A neighbour is left for only from the subnet it is in: from another address, what comes back would take another way.

    Args:
        peers: where the other machine listens.
    """
    near: list[Pair] = []
    far: list[Pair] = []
    for peer in peers:
        alike = [one for one in own if _is_alike(one.host, peer)]
        neighbours = [one for one in alike if _is_within(peer.host, one.network)]
        pairs = near if neighbours else far
        pairs += [Pair(one.host, peer) for one in neighbours or alike]
    return [*near, *far][:MOST_PAIRS]


def _is_alike(host: str, peer: TcpAddress) -> bool:
    return (":" in host) == peer.is_ipv6() and ipaddress.ip_address(host).is_loopback == peer.is_loopback()


def _all_addresses() -> list[OwnAddress]:
    states = psutil.net_if_stats()
    found = []
    for interface, addresses in psutil.net_if_addrs().items():
        if interface in states and not states[interface].isup:
            continue
        for address in addresses:
            # A scoped address (fe80::1%eth0) has no meaning on the other machine.
            if address.family.name in ("AF_INET", "AF_INET6") and "%" not in address.address:
                found.append(OwnAddress(interface, address.address, _network(address.address, address.netmask)))
    return sorted(found, key=lambda one: ":" in one.host)


def _network(host: str, netmask: str | None) -> str:
    if netmask is None:
        return host
    if ":" in netmask:
        netmask = str(int(ipaddress.IPv6Address(netmask)).bit_count())
    return str(ipaddress.ip_network(f"{host}/{netmask}", strict=False))


def _is_within(host: str, network: str) -> bool:
    return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
