"""Addresses and probes: what the operator allows is used, what is measured is what links do, the quickest way wins."""

from __future__ import annotations

import errno
import json
import socket
from collections import namedtuple
from collections.abc import Iterator

import psutil
import pytest
import zmq

from stageline.cli.main import main
from stageline.cluster.addresses import InterfaceFilter, OwnAddress, Pair, candidate_pairs, own_addresses
from stageline.cluster.messages import FindWay, WayFound
from stageline.cluster.probe import NoWay, Way, choose_address, measure
from stageline.cluster.probe_listener import BLOCK, ECHO, REPORT, ProbeListener
from stageline.cluster.ways import find_way
from stageline.doctor.peer import Reached, reach
from stageline.errors import ConfigError
from stageline.links.keys import ClusterKey, LinkSecurity
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress

KEY = LinkSecurity(ClusterKey(bytes(32)))
ANYWHERE = TcpAddress("127.0.0.1", 0)
PATIENCE_MS = 20_000


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAGELINE_INTERFACE", "NCCL_SOCKET_IFNAME", "STAGELINE_CLUSTER_KEY", "STAGELINE_CLUSTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    # Here everything that answers is near.
    monkeypatch.setattr("stageline.cluster.probe._REACH_S", 1.0)


@pytest.fixture
def listener() -> Iterator[ProbeListener]:
    listener = ProbeListener([ANYWHERE, ANYWHERE], KEY)
    yield listener
    listener.close()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    address = namedtuple("address", "family address netmask")
    state = namedtuple("state", "isup")
    there = {
        "lo": [("127.0.0.1", "255.0.0.0")],
        "eth0": [("10.0.0.1", "255.255.255.0"), ("fd00::1", "ffff:ffff:ffff:ffff::"), ("fe80::1%eth0", None)],
        "eth1": [("192.168.1.1", "255.255.255.0")],
        "ib0": [("10.9.0.1", "255.255.0.0")],
        "docker0": [("172.17.0.1", "255.255.0.0")],
        "eth2": [("10.5.0.1", "255.255.255.0")],
    }
    found = {
        name: [address(socket.AF_INET6 if ":" in host else socket.AF_INET, host, mask) for host, mask in entries]
        for name, entries in there.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: state(name != "eth2") for name in there})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        (None, ["10.0.0.1", "192.168.1.1", "10.9.0.1", "fd00::1"]),
        ("eth", ["10.0.0.1", "192.168.1.1", "fd00::1"]),
        ("eth0,ib", ["10.0.0.1", "10.9.0.1", "fd00::1"]),
        ("=eth1", ["192.168.1.1"]),
        ("=lo", ["127.0.0.1"]),
        ("^docker,lo,eth0", ["192.168.1.1", "10.9.0.1"]),
        ("^=eth0,lo", ["192.168.1.1", "10.9.0.1", "172.17.0.1"]),
    ],
)
def test_interfaces_are_chosen_as_users_of_nccl_write_it(machine: None, text: str | None, hosts: list[str]) -> None:
    """What is down, or has a meaning on one link only, is never taken."""
    assert [address.host for address in own_addresses(text)] == hosts


def test_the_flag_wins_over_the_own_variable_and_that_over_nccls(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert [address.interface for address in own_addresses(None)] == ["ib0"]
    monkeypatch.setenv("STAGELINE_INTERFACE", "eth1")
    assert [address.interface for address in own_addresses(None)] == ["eth1"]
    assert [address.interface for address in own_addresses("docker")] == ["docker0"]


def test_a_choice_that_fits_nothing_is_refused_with_what_there_is(
    machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_INTERFACE", "=eth")
    with pytest.raises(ConfigError, match=r"STAGELINE_INTERFACE==eth fits no interface .*eth0 \(10\.0\.0\.1\)"):
        own_addresses(None)
    for text in ("", "^", "eth0,", "="):
        with pytest.raises(ConfigError, match="--interface is"):
            InterfaceFilter.parse(text, "--interface")


def test_pairs_are_of_one_kind_and_neighbours_go_first(machine: None) -> None:
    peers = [TcpAddress("10.50.0.7", 5), TcpAddress("192.168.1.7", 5), TcpAddress("fd00::7", 5)]
    pairs = candidate_pairs(own_addresses(None), peers)
    assert set(pairs[:2]) == {Pair("192.168.1.1", peers[1]), Pair("fd00::1", peers[2])}
    assert set(pairs[2:]) == {Pair(host, peers[0]) for host in ("10.0.0.1", "192.168.1.1", "10.9.0.1")}
    many = [OwnAddress(f"e{number}", f"10.0.0.{number}", "10.0.0.0/24") for number in range(1, 100)]
    assert len(candidate_pairs(many, peers)) == 16


def test_what_is_reached_is_measured_and_what_is_not_says_why(listener: ProbeListener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        nobody = TcpAddress("127.0.0.1", other.getsockname()[1])
    there = listener.addresses[0]
    way, from_own, silent = measure([(None, there), ("127.0.0.2", there), (None, nobody)], KEY)
    for found in (way, from_own):
        assert isinstance(found, Way), found
        assert 0 < found.round_trip_s < 10 and found.bytes_per_s > 1000
        assert found.step_s(10**6) > found.step_s(10**3) > found.round_trip_s / 2
    assert from_own.url == f"tcp://127.0.0.2:0;{there}" and way.url == there.url
    assert silent == NoWay(None, nobody, "nothing listens there, or a firewall is in between")


def test_who_can_open_no_more_sockets_says_so_to_whoever_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(Links, "caller", refuse)
    asked = FindWay(7, ["127.0.0.1:5"], 1000)
    hosts = [OwnAddress("", "127.0.0.1", "127.0.0.1")]
    reason = "the ways to other machines cannot be measured: Too many open files"
    assert find_way(hosts, asked, KEY) == WayFound(7, None, reason)
    assert reach(hosts, asked, KEY) == Reached(reason)


def test_the_way_with_the_quickest_step_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fat = Way("10.0.0.1", TcpAddress("10.0.0.2", 1), round_trip_s=0.010, bytes_per_s=1e9)
    near = Way("10.1.0.1", TcpAddress("10.1.0.2", 1), round_trip_s=0.001, bytes_per_s=1e8)
    found = [NoWay("10.2.0.1", TcpAddress("10.2.0.2", 1), "no answer"), near, fat]
    monkeypatch.setattr("stageline.cluster.probe.measure", lambda *_: found)
    pairs = [Pair(str(one.source), one.destination) for one in found]
    assert choose_address(pairs, KEY, step_bytes=10**5) == (near, found)
    assert choose_address(pairs, KEY, step_bytes=10**7) == (fat, found)
    del found[1:]
    with pytest.raises(ConfigError, match=r"cannot be reached: 10\.2\.0\.1 -> 10\.2\.0\.2:1: no answer"):
        choose_address(pairs[:1], KEY)


def test_a_listener_understands_nothing_else_and_counts_for_each_caller_alone(listener: ProbeListener) -> None:
    links = Links(KEY)
    try:
        callers = [links.caller(address.url) for address in listener.addresses]
        for number, caller in enumerate(callers):
            for hostile in ([b""], [b"x", b"y"], [ECHO], [BLOCK, b"1", b"2"], [REPORT + b"!", b""]):
                caller.send_multipart(hostile)
            caller.send_multipart([BLOCK, b"x" * (10 + number)])
        for number, caller in enumerate(callers):
            caller.send_multipart([REPORT, b""])
            assert caller.poll(PATIENCE_MS)
            assert caller.recv_multipart() == [REPORT, (10 + number).to_bytes(8, "little")]
    finally:
        links.close()


def test_the_command_measures_each_host_and_tells_in_json(
    listener: ProbeListener, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KEY.key is not None
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", KEY.key.text())
    port = str(listener.addresses[0].port)
    assert main(["probe", "127.0.0.1", "--port", port, "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert report["address"] == f"127.0.0.1:{port}" and report["error"] is None
    assert report["step_s"] > report["round_trip_s"] / 2 > 0
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", ClusterKey(bytes([1]) * 32).text())
    assert main(["probe", "127.0.0.1", "--port", port]) == 1
    assert "cluster key is not this one's" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["a", "--listen", "127.0.0.1"], ["no.such.host.invalid"], ["--listen", "me:x"]])
def test_the_command_refuses_what_it_cannot_do(argv: list[str]) -> None:
    assert main(["probe", *argv]) == 2
