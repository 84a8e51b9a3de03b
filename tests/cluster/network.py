"""Machines of a test: network namespaces on one switch, each with a link that can be shaped or pulled out.

One idea: a namespace has its own addresses, ports and routes, so processes in different ones are on different machines
as far as they can tell. Their names carry this process's id; all are deleted afterwards, however the test ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

_CLONE_NEWNET = 0x40000000
_PREFIX = "10.77.0."


class NotPermitted(Exception):
    """This process may not make network namespaces."""


class Network:
    """Args: num_machines: numbered from 0, each with the address of `address`."""

    def __init__(self, num_machines: int) -> None:
        self._switch = f"sl{os.getpid()}s"
        self._machines = [f"sl{os.getpid()}n{index}" for index in range(num_machines)]
        try:
            self._make()
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise NotPermitted(f"network namespaces cannot be made here: {error}") from None

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge0", "up")
        for index, name in enumerate(self._machines):
            _ip("netns", "add", name)
            other_end = ["peer", "name", f"p{index}", "netns", self._switch]
            _ip("link", "add", "eth0", "netns", name, "type", "veth", *other_end)
            _ip("-n", self._switch, "link", "set", f"p{index}", "master", "bridge0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def address(self, machine: int) -> str:
        return f"{_PREFIX}{machine + 1}"

    @contextmanager
    def inside(self, machine: int) -> Iterator[None]:
        """This thread is on that machine: for the sockets it makes and the processes it starts."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self._machines[machine]}") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def shape(self, machine: int, bits_per_s: float) -> None:
        """Let no more than that leave a machine: a token bucket, which a fifth of a millisecond fills."""
        burst_bytes = max(8 * 2**10, round(bits_per_s / 8 * 0.0002))
        words = ["rate", f"{bits_per_s:.0f}bit", "burst", str(burst_bytes), "latency", "1s"]
        command = ["tc", "-n", self._machines[machine], "qdisc", "replace", "dev", "eth0", "root", "tbf", *words]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    @contextmanager
    def second_link(self, machines: tuple[int, int]) -> Iterator[tuple[str, str]]:
        """A cable between two machines, besides the switch. Yields: their addresses on it."""
        names = [self._machines[machine] for machine in machines]
        addresses = ("10.78.0.1", "10.78.0.2")
        _ip("link", "add", "eth1", "netns", names[0], "type", "veth", "peer", "name", "eth1", "netns", names[1])
        try:
            for name, address in zip(names, addresses, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth1")
                _ip("-n", name, "link", "set", "eth1", "up")
            yield addresses
        finally:
            _ip("-n", names[0], "link", "del", "eth1")

    def unshape(self, machine: int) -> None:
        """What `shape` limited, if it did, is unlimited again."""
        command = ["tc", "-n", self._machines[machine], "qdisc", "replace", "dev", "eth0", "root", "noqueue"]
        subprocess.run(command, check=True, capture_output=True, timeout=20)

    def part(self, machines: Sequence[int], are_parted: bool = True) -> None:
        """Nothing gets through between these machines, each of which still reaches the others; or again."""
        for machine in machines:
            state = "on" if are_parted else "off"
            _ip("-n", self._switch, "link", "set", f"p{machine}", "type", "bridge_slave", "isolated", state)

    def pull_out(self, machine: int) -> None:
        """The cable of a machine: nothing gets through, and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"p{machine}", "nomaster")

    def plug_in(self, machine: int) -> None:
        _ip("-n", self._switch, "link", "set", f"p{machine}", "master", "bridge0")

    def close(self) -> None:
        for name in (*self._machines, self._switch):
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
