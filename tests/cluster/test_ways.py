"""Between two machines with several links the best one is found, whichever they know each other by."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from stageline.cluster.messages import FindWay, WayFound
from stageline.cluster.ways import find_way, leads_to, listen, own_hosts
from stageline.links.keys import ClusterKey, LinkSecurity
from tests.cluster.network import Network
from tests.server.served import wait_until

KEY = LinkSecurity(ClusterKey(bytes(32)))
PORT = 29700
SLOW_BITS_PER_S = 20e6
MODEM_BITS_PER_S = 200e3


@pytest.fixture
def two_links(network: Network) -> Iterator[tuple[str, str]]:
    """Machines 0 and 1 have a slow link, by which they know each other, and one as quick as memory."""
    for machine in (0, 1):
        network.shape(machine, SLOW_BITS_PER_S)
    try:
        with network.second_link((0, 1)) as addresses:
            for machine in (0, 1):
                with network.inside(machine):
                    wait_until(lambda: psutil.net_if_stats()["eth1"].isup)
            yield addresses
    finally:
        for machine in (0, 1):
            network.unshape(machine)


def test_the_quicker_of_two_links_is_found_and_an_interface_that_was_asked_for_is_kept_to(
    network: Network, two_links: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STAGELINE_INTERFACE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    with network.inside(1):
        hosts = own_hosts(network.address(1), None, is_only=False)
        listener = listen(hosts, PORT, KEY)
    try:
        assert {host.host for host in hosts} >= {network.address(1), two_links[1]}
        with network.inside(0):
            everywhere = FindWay(7, [str(address) for address in listener.addresses], step_bytes=10**6)
            anyhow = find_way(own_hosts(network.address(0), None, is_only=False), everywhere, KEY)
            # As with --interface =eth0 on both.
            there = FindWay(8, [f"{host.host}:{PORT}" for host in hosts if host.interface == "eth0"], step_bytes=10**6)
            asked_for = find_way(own_hosts(network.address(0), "=eth0", is_only=False), there, KEY)
    finally:
        listener.close()
    assert anyhow.url == f"tcp://{two_links[0]}:0;{two_links[1]}:{PORT}", anyhow
    assert asked_for.url == f"tcp://{network.address(0)}:0;{network.address(1)}:{PORT}", asked_for
    assert anyhow.number == 7 and "best of" in anyhow.words


def test_a_way_over_the_slowest_of_links_is_a_way(network: Network) -> None:
    network.shape(0, MODEM_BITS_PER_S)
    try:
        with network.inside(1):
            listener = listen(own_hosts(network.address(1), "=eth0", is_only=True), PORT, KEY)
        try:
            with network.inside(0):
                asked = FindWay(1, [f"{network.address(1)}:{PORT}"], step_bytes=10**6)
                found = find_way(own_hosts(network.address(0), "=eth0", is_only=True), asked, KEY)
        finally:
            listener.close()
    finally:
        network.unshape(0)
    assert found.url is not None, found.words


def test_a_way_that_leads_elsewhere_is_not_believed() -> None:
    addresses = ["10.0.0.2:5", "[fd00::2]:5"]
    assert leads_to(WayFound(1, "tcp://10.0.0.1:0;10.0.0.2:5", ""), addresses)
    assert leads_to(WayFound(1, "tcp://[fd00::2]:5", ""), addresses)
    for url in (None, "", "ipc:///x", "tcp://10.0.0.3:5", "tcp://10.0.0.2:6", "tcp://10.0.0.2:5;10.0.0.3:5"):
        assert not leads_to(WayFound(1, url, ""), addresses)
