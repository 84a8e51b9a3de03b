"""A pipeline over several machines of a test's network: a head that serves, and nodes that bring stages to it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.network import Network
from tests.pipeline.failing import is_alive, wait_for_end
from tests.server.served import Logged, Served

PORT = 29500
"""Of the head; what runs at the same time takes another."""


class Node(Logged):
    """A machine that brings stages. Its own processes are ended with it, whatever became of them."""

    def __init__(self, *words: str, home: Path) -> None:
        super().__init__(*words, home=home)
        self._seen: dict[int, psutil.Process] = {}

    def stage_pids(self) -> list[int]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        self._seen |= {child.pid: child for child in children}
        return [child.pid for child in children]

    def hurt(self, number: signal.Signals) -> None:
        """Send a signal to the agent and to its stages: as if the whole machine stood still, or were switched off."""
        for pid in [*self.stage_pids(), self.process.pid]:
            os.kill(pid, number)

    def leftovers(self) -> list[str]:
        """What is still there once it has ended."""
        alive = [f"process {pid}" for pid in self._seen if not wait_for_end(pid)]
        return alive + [str(path) for path in self.home.glob("stageline-*")]

    def destroy(self) -> None:
        if is_alive(self.process.pid):
            self.stage_pids()
        for pid in [self.process.pid, *self._seen]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for pid in self._seen:
            wait_for_end(pid)
        self._reader.join()


class Machines:
    """Args:
    key_file: the cluster key, the same everywhere.
    """

    def __init__(
        self, network: Network, model: str, key_file: Path, home: Path, stack: ExitStack, port: int
    ) -> None:
        self.network = network
        self.model = model
        self.key_file = key_file
        self.port = port
        self._home = home
        self._stack = stack

    @property
    def head_address(self) -> str:
        return f"{self.network.address(0)}:{self.port}"

    def flags(self, num_stages: int, *more: str) -> list[str]:
        """Those that the head and `serve --headless` share."""
        asked = ["-tp", "1", "-pp", str(num_stages), "--master-addr", self.network.address(0)]
        return [*asked, "--master-port", str(self.port), "--cluster-key-file", str(self.key_file), *more]

    def serve(self, num_stages: int, *more: str) -> Served:
        """The head, on machine 0."""
        with self.network.inside(0):
            head = Served(self.model, *self.flags(num_stages, *more), home=self._home)
        self._stack.callback(head.destroy)
        return head

    def node(self, machine: int, *words: str) -> Node:
        """Any command, on a machine."""
        home = Path(tempfile.mkdtemp(prefix=f"node{machine}-", dir=self._home))
        with self.network.inside(machine):
            node = Node(*words, home=home)
        self._stack.callback(node.destroy)
        return node

    def join(self, machine: int, *more: str, key_file: Path | None = None) -> Node:
        key = ["--cluster-key-file", str(key_file or self.key_file)]
        return self.node(machine, "join", self.head_address, "--no-bind-cores", *key, *more)

    def get(self, head: Served, path: str) -> tuple[int, Any]:
        with self.network.inside(0):
            return head.get(path)


def sharing_memory(pids: list[int]) -> list[int]:
    """Those of a machine's stages' processes that are ranks of one stage."""
    return [pid for pid in pids if "memfd:stageline-ranks" in Path(f"/proc/{pid}/maps").read_text()]


@contextmanager
def machines(network: Network, model: str, key_file: Path, port: int = PORT) -> Iterator[Machines]:
    """Whatever is started is ended afterwards."""
    with tempfile.TemporaryDirectory(prefix="home-") as home, ExitStack() as stack:
        yield Machines(network, model, key_file, Path(home), stack, port)
