"""Which way activations take from a machine to the next: every pair of addresses is measured, the best one is pinned.

One idea: who will send measures, just before the stages start, where the receiver will listen: same port, same
encryption. So what a firewall would stop is found before anything is loaded.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Sequence
from contextlib import suppress

from stageline.cluster.addresses import OwnAddress, candidate_pairs, own_addresses
from stageline.cluster.messages import FindWay, WayFound
from stageline.cluster.probe import Stopped, Way, choose_address
from stageline.cluster.probe_listener import ProbeListener
from stageline.errors import ConfigError
from stageline.links.keys import LinkSecurity
from stageline.links.tcp_address import TcpAddress, destination_of
from stageline.links.wakeup import Wakeup

_STEP_TOKENS = 64
_BYTES_PER_NUMBER = 2


def step_bytes(hidden_size: int) -> int:
    """What a typical step sends, by which latency and bandwidth are weighed."""
    return _STEP_TOKENS * hidden_size * _BYTES_PER_NUMBER


def own_hosts(own: str, interface: str | None, is_only: bool) -> list[OwnAddress]:
    """This machine's addresses that activations may use.

    Args:
        own: the one that it reaches the head from, or the head's own; only this one if others do not reach it.
        interface: of `--interface`.
        is_only: the operator named `own`.
    Raises: ConfigError if the operator's choice of interfaces leaves none.
    """
    alone = OwnAddress("", own, own)
    if is_only or ipaddress.ip_address(own).is_loopback:
        return [alone]
    found = own_addresses(interface)
    return found if interface is not None or any(one.host == own for one in found) else [alone, *found]


def listen(hosts: Sequence[OwnAddress], port: int, security: LinkSecurity | None) -> ProbeListener:
    """Answer probes where activations will arrive; an address that cannot be listened on is left out."""
    return ProbeListener([TcpAddress(host.host, port) for host in hosts], security, skips_unusable=True)


def find_way(
    hosts: Sequence[OwnAddress], asked: FindWay, security: LinkSecurity | None, stop: Wakeup | None = None
) -> WayFound:
    """Measure the ways to another machine; takes a few seconds. Raises: Stopped, when `stop` is rung."""
    try:
        pairs = candidate_pairs(hosts, [TcpAddress.parse(address) for address in asked.addresses])
        way, found = choose_address(pairs, security, asked.step_bytes, stop)
    except ConfigError as error:
        return WayFound(asked.number, None, str(error))
    num_ways = sum(isinstance(one, Way) for one in found)
    return WayFound(asked.number, way.url, str(way) + (f", best of {num_ways} ways" if num_ways > 1 else ""))


def leads_to(found: WayFound, addresses: Sequence[str]) -> bool:
    """Whether a way was found, to one of these addresses; what a node says is not believed unseen."""
    try:
        return found.url is not None and str(destination_of(found.url)) in addresses
    except ConfigError:
        return False


class WaySearch:
    """`find_way` in a thread of its own, for who hears other things meanwhile.

    Args:
        bell: rung when there is something to `take`.
    """

    def __init__(
        self, hosts: Sequence[OwnAddress], asked: FindWay, security: LinkSecurity | None, bell: Wakeup
    ) -> None:
        self._stop = Wakeup()
        self._found: WayFound | None = None
        self._thread = threading.Thread(target=self._run, args=(hosts, asked, security, bell), name="ways", daemon=True)
        self._thread.start()

    def _run(
        self, hosts: Sequence[OwnAddress], asked: FindWay, security: LinkSecurity | None, bell: Wakeup
    ) -> None:
        with suppress(Stopped):
            self._found = find_way(hosts, asked, security, self._stop)
            bell.ring()

    def take(self) -> WayFound | None:
        """What was found, if it is by now."""
        return self._found

    def end(self) -> None:
        """At once, whatever is not yet measured."""
        self._stop.ring()
        self._thread.join()
        self._stop.close()
