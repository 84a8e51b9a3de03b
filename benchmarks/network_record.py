"""What the network sweep keeps on disk, and what is made of it: predictions, a table, a picture.

One idea: every measured point is a sample, and samples are only ever added. So a sweep can be made in short pieces, on
a machine that others use too, and the table shows medians of all of them.

What stages take is fitted to the spans of the loopback runs, over the number of requests in a microbatch, the last
stage's sampling included: it samples before it takes the next one. What a hop takes follows from `stageline probe` on
the same link. With M microbatches of C/M requests, a step takes max(R, M * slowest) (stageline.cost.ring), and M is the
best. Prompts are computed in the order they come, a few in a microbatch beside the others' decodes: one of them waits
for half of the others, and all together make a request's steps longer by their own time. Both machines, the server and
its clients share this host's cores, so a token takes at least its CPU time, of all processes together on loopback, over
their number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from stageline.cost.ring import Ring
from stageline.timeline.span import Span

LOOPBACK, UNLIMITED = "loopback", "unlimited"
_NUM_STAGES = 2
_WIDEST = 8


class Setting(msgspec.Struct, frozen=True):
    """What stays the same over all samples. `hidden_bytes`: what a token's hidden state takes on the wire."""

    model: str
    hidden_bytes: int
    num_cores: int
    input_len: int
    output_len: int


class Sample(msgspec.Struct, frozen=True):
    """One run. `link` is loopback, unlimited, or a number of Gbit/s. `cpu_s`: of all processes, per token."""

    link: str
    num_requests: int
    tokens_per_s: float
    tpot_s: float
    ttft_s: float
    cpu_s: float = 0.0


class Way(msgspec.Struct, frozen=True):
    """A link as `stageline probe --json` tells it."""

    round_trip_s: float
    bytes_per_s: float


class Forwards(msgspec.Struct, frozen=True, array_like=True):
    """A stage's microbatches of one kind, in one run: how many, and the median of their times, sampling included."""

    stage_index: int
    num_rows: int
    num_tokens: int
    count: int
    median_s: float


class Record(msgspec.Struct):
    """All there is so far."""

    setting: Setting
    ways: dict[str, Way] = {}
    forwards: list[Forwards] = []
    samples: list[Sample] = []

    def sampled(self, link: str, num_requests: int) -> Sample | None:
        """The median of each figure over all samples of a point."""
        own = [one for one in self.samples if (one.link, one.num_requests) == (link, num_requests)]
        if not own:
            return None
        names = ("tokens_per_s", "tpot_s", "ttft_s", "cpu_s")
        medians = (statistics.median(getattr(one, name) for one in own) for name in names)
        return Sample(link, num_requests, *medians)

    def share_of_loopback(self, link: str, num_requests: int) -> float | None:
        """Throughput over that of loopback: the median over pairs of samples, the nth of one and of the other."""
        rates = [
            [one.tokens_per_s for one in self.samples if (one.link, one.num_requests) == (of, num_requests)]
            for of in (link, LOOPBACK)
        ]
        pairs = list(zip(*rates, strict=False))
        return statistics.median(far / near for far, near in pairs) if pairs else None

    def points(self) -> list[Sample]:
        """One for each link and number of requests, from the quickest link to the slowest."""
        links = sorted({one.link for one in self.samples}, key=_slowness)
        numbers = sorted({one.num_requests for one in self.samples})
        found = [self.sampled(link, number) for link in links for number in numbers]
        return [point for point in found if point is not None]


def load_record(path: Path, setting: Setting) -> Record:
    """What is on disk, or a new one. Exits if that is of other runs."""
    if not path.exists():
        return Record(setting)
    record = msgspec.json.decode(path.read_bytes(), type=Record)
    if record.setting != setting:
        raise SystemExit(f"{path} has samples of {record.setting}, not of {setting}; give another --out, or delete it")
    return record


def save_record(path: Path, record: Record) -> None:
    path.write_bytes(msgspec.json.encode(record) + b"\n")


def forwards_of(spans: Sequence[Span]) -> list[Forwards]:
    """Of a run's spans; a forward that was interrupted does not count much among the others."""
    sampling_s = {(span.stage_index, span.microbatch): span.duration_s for span in spans if span.kind == "sample"}
    times_s: dict[tuple[int, int, int], list[float]] = {}
    for span in spans:
        if span.kind == "forward" and span.num_rows:
            time_s = span.duration_s + sampling_s.get((span.stage_index, span.microbatch), 0.0)
            times_s.setdefault((span.stage_index, span.num_rows, span.num_tokens), []).append(time_s)
    return [Forwards(*key, len(own), float(statistics.median(own))) for key, own in sorted(times_s.items())]


# ---- what is predicted ----


@dataclass(frozen=True)
class StageTimes:
    """Fitted: a stage's time for a microbatch, [stages] each.

    Args:
        fixed_s, row_s: with b decodes it takes fixed_s + b * row_s.
        token_s: what a token of a prompt adds.
        rest_s: what a token needs besides stages and hops, on loopback: engine, wake-ups.
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


def fit(record: Record) -> StageTimes:
    """What a stage's forward takes, by decodes and prompt tokens in it: least squares of relative errors."""
    fitted = []
    for stage in range(_NUM_STAGES):
        own = [one for one in record.forwards if one.stage_index == stage]
        weights = np.array([one.count**0.5 / one.median_s for one in own])
        columns = np.array([[1.0, one.num_rows, one.num_tokens - one.num_rows] for one in own])
        medians_s = np.array([one.median_s for one in own])
        found = np.linalg.lstsq(columns * weights[:, None], medians_s * weights, rcond=None)[0]
        fitted.append([float(value) for value in np.maximum(found, 0.0)])
    times = StageTimes(*(tuple(values) for values in zip(*fitted, strict=True)))
    alone = record.sampled(LOOPBACK, 1)
    if alone is None:
        return times
    rest_s = max(0.0, alone.tpot_s - _ring(record, times, LOOPBACK, 1).ring_s)
    return replace(times, rest_s=rest_s)


def predict(record: Record, times: StageTimes, link: str, num_requests: int) -> Sample:
    setting = record.setting
    cycle_s, num_microbatches = min(
        (_ring(record, times, link, num_requests / number).cycle_s(number), number)
        for number in range(1, min(num_requests, _WIDEST) + 1)
    )
    num_rows, prompt_tokens = num_requests / num_microbatches, setting.input_len - 1
    decodes, with_prompt = (_ring(record, times, link, num_rows, tokens) for tokens in (0.0, prompt_tokens))
    prompt_s = with_prompt.slowest_s - decodes.slowest_s
    ttft_s = with_prompt.ring_s + (num_requests - 1) / 2 * prompt_s
    near = record.sampled(LOOPBACK, num_requests)
    cpu_s = 0.0 if near is None else near.cpu_s * num_requests * setting.output_len / setting.num_cores
    prompts_s = max(num_requests * prompt_s, with_prompt.ring_s - decodes.ring_s)
    request_s = max(setting.output_len * cycle_s + prompts_s, cpu_s)
    tpot_s = (request_s - ttft_s) / (setting.output_len - 1)
    return Sample(link, num_requests, num_requests * setting.output_len / request_s, tpot_s, ttft_s)


def _ring(record: Record, times: StageTimes, link: str, num_rows: float, num_prompt_tokens: float = 0.0) -> Ring:
    way = record.ways[link]
    stages_s = times.of(num_rows, num_prompt_tokens)
    wire_s = (num_rows + num_prompt_tokens) * record.setting.hidden_bytes / way.bytes_per_s
    num_hops = len(stages_s) - 1
    return Ring(
        stages_s,
        hops_s=(way.round_trip_s / 2 + wire_s,) * num_hops,
        wires_s=(wire_s,) * num_hops,
        sampling_s=times.rest_s,
        return_s=way.round_trip_s / 2,
    )


# ---- what is shown ----


def as_markdown(record: Record) -> str:
    times, setting = fit(record), record.setting
    lines = [
        "| link | round trip | bandwidth |",
        "|---|---|---|",
        *(
            f"| {_name(link)} | {way.round_trip_s * 1e3:.2f} ms | {way.bytes_per_s * 8 / 1e9:.2f} Gbit/s |"
            for link, way in sorted(record.ways.items(), key=lambda item: _slowness(item[0]))
        ),
        "",
        f"{setting.model}, two stages, prompts of {setting.input_len} tokens, answers of {setting.output_len}. Each "
        "cell: measured (predicted).",
        "",
        "| link | requests | samples | tokens/s | of loopback | TPOT, ms | TTFT, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in record.points():
        link, number = point.link, point.num_requests
        told = predict(record, times, link, number)
        share = record.share_of_loopback(link, number)
        expected = told.tokens_per_s / predict(record, times, LOOPBACK, number).tokens_per_s
        count = sum((one.link, one.num_requests) == (link, number) for one in record.samples)
        lines.append(
            f"| {_name(link)} | {number} | {count} | {point.tokens_per_s:.0f} ({told.tokens_per_s:.0f}) "
            f"| {'' if share is None else f'{share:.1%} ({expected:.1%})'} "
            f"| {point.tpot_s * 1e3:.1f} ({told.tpot_s * 1e3:.1f}) "
            f"| {point.ttft_s * 1e3:.0f} ({told.ttft_s * 1e3:.0f}) |"
        )
    return "\n".join(lines) + "\n"


def draw(path: Path, record: Record) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    times, points = fit(record), record.points()
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Two stages over links of different speed: measured (lines), predicted (dashed)")
    curves: tuple[tuple[str, Callable[[Sample], float]], ...] = (
        ("tokens/s", lambda point: point.tokens_per_s),
        ("TPOT, ms", lambda point: point.tpot_s * 1e3),
        ("TTFT, ms", lambda point: point.ttft_s * 1e3),
    )
    for axes, (name, curve) in zip(figure.subplots(1, len(curves)), curves, strict=True):
        for index, link in enumerate(dict.fromkeys(point.link for point in points)):
            own = [point for point in points if point.link == link]
            numbers = [point.num_requests for point in own]
            told = [predict(record, times, link, number) for number in numbers]
            axes.plot(numbers, [curve(point) for point in own], "o-", color=f"C{index}", label=_name(link))
            axes.plot(numbers, [curve(point) for point in told], "--", color=f"C{index}", alpha=0.6)
        axes.set(xlabel="requests at once", ylabel=name, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=100)


def _slowness(link: str) -> float:
    return {LOOPBACK: -2.0, UNLIMITED: -1.0}[link] if link in (LOOPBACK, UNLIMITED) else 1 / float(link)


def _name(link: str) -> str:
    return link if link in (LOOPBACK, UNLIMITED) else f"{link} Gbit/s"
