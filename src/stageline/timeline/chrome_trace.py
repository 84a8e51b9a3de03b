"""Spans as a Chrome trace, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

Each stage is a process row; computing, receiving and sending are its tracks, because slices of one track must not
overlap. Arrows follow a microbatch from its scheduling through the forward passes of all stages.

Source: "Trace Event Format" (Google): complete events "X", flow events "s", "t", "f", metadata "M"; times in µs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stageline.timeline.span import Span, SpanKind

_TRACKS: dict[SpanKind, tuple[int, str]] = {
    "schedule": (0, "schedule"),
    "forward": (0, "compute"),
    "sample": (0, "compute"),
    "receive_wait": (1, "receive"),
    "send": (2, "send"),
}

Event = dict[str, Any]


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace as JSON-ready data: metadata first, then events by time; time 0 is the first span's start."""
    in_order = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    origin_s = in_order[0].start_s if in_order else 0.0
    events = [_slice(span, origin_s) for span in in_order]
    for flow_id, chain in enumerate(_chains(in_order)):
        events.extend(_flow(flow_id, chain, origin_s))
    # A slice sorts before the flow events inside it, which must find it open.
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X"))
    return {"traceEvents": [*_metadata(in_order), *events], "displayTimeUnit": "ms"}


def write_chrome_trace(path: str | Path, spans: Iterable[Span]) -> None:
    """Write the trace as JSON. Raises: OSError."""
    Path(path).write_bytes(msgspec.json.encode(chrome_trace(spans)))


def spans_of_chrome_trace(trace: dict[str, Any]) -> list[Span]:
    """The spans that a trace of `chrome_trace` was made of, its time 0 being the first one's start.

    Raises: ValueError if it was made by something else.
    """
    spans = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        try:
            name = event["name"].split(" ")[0]
            start_s = event["ts"] / 1e6
            end_s = start_s + event["dur"] / 1e6
            sizes = event["args"]["tokens"], event["args"]["rows"]
            values = (event["pid"] - 1, int(name.removeprefix("m")), event["cat"], start_s, end_s, *sizes)
            spans.append(msgspec.convert(values, Span))
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"event {event.get('name')!r}: {error}") from error
    return spans


def _process_id(stage_index: int) -> int:
    """The engine, stage -1, is process 0."""
    return stage_index + 1


def _microseconds(time_s: float, origin_s: float) -> float:
    return round((time_s - origin_s) * 1e6, 3)


def _slice(span: Span, origin_s: float) -> Event:
    start_us = _microseconds(span.start_s, origin_s)
    return {
        "name": f"m{span.microbatch} {span.kind}",
        "cat": span.kind,
        "ph": "X",
        "pid": _process_id(span.stage_index),
        "tid": _TRACKS[span.kind][0],
        "ts": start_us,
        "dur": round(_microseconds(span.end_s, origin_s) - start_us, 3),
        "args": {"tokens": span.num_tokens, "rows": span.num_rows},
    }


def _chains(in_order: Sequence[Span]) -> list[list[Span]]:
    """Per microbatch the slices its arrow visits: scheduling, then each stage's forward pass.

    Microbatch numbers start again with every epoch, so a stage that comes a second time begins a new chain.
    """
    chains: list[list[Span]] = []
    open_chains: dict[int, list[Span]] = {}
    for span in in_order:
        if span.kind not in ("schedule", "forward"):
            continue
        chain = open_chains.get(span.microbatch)
        if chain is None or span.stage_index <= chain[-1].stage_index:
            chain = open_chains[span.microbatch] = []
            chains.append(chain)
        chain.append(span)
    return [chain for chain in chains if len(chain) > 1]


def _flow(flow_id: int, chain: Sequence[Span], origin_s: float) -> list[Event]:
    phases = ["s", *["t"] * (len(chain) - 2), "f"]
    return [_flow_event(phase, flow_id, span, origin_s) for phase, span in zip(phases, chain, strict=True)]


def _flow_event(phase: str, flow_id: int, span: Span, origin_s: float) -> Event:
    event: Event = {
        "name": f"m{span.microbatch}",
        "cat": "microbatch",
        "ph": phase,
        "id": flow_id,
        "pid": _process_id(span.stage_index),
        "tid": _TRACKS[span.kind][0],
        # The middle of the slice lies inside of it whatever rounding does to its ends.
        "ts": _microseconds((span.start_s + span.end_s) / 2, origin_s),
    }
    if phase != "s":
        # Bind to the slice around this moment; without it viewers bind to the next slice of the track.
        event["bp"] = "e"
    return event


def _metadata(spans: Iterable[Span]) -> list[Event]:
    tracks = sorted({(span.stage_index, *_TRACKS[span.kind]) for span in spans})
    events: list[Event] = []
    for stage_index in dict.fromkeys(stage_index for stage_index, _, _ in tracks):
        name = "engine" if stage_index < 0 else f"s{stage_index}"
        events.append(_named("process_name", stage_index, 0, {"name": name}))
        events.append(_named("process_sort_index", stage_index, 0, {"sort_index": _process_id(stage_index)}))
    events.extend(_named("thread_name", stage_index, tid, {"name": name}) for stage_index, tid, name in tracks)
    return events


def _named(name: str, stage_index: int, tid: int, args: dict[str, object]) -> Event:
    return {"name": name, "ph": "M", "pid": _process_id(stage_index), "tid": tid, "args": args}
