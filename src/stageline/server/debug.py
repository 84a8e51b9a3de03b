"""`/debug/timeline` and `/debug/pipeline`: what the pipeline is doing now, for the dashboard and the command line.

One idea: the engine only hands out what it recorded anyway. What follows from it (reports, advice) is computed here, in
a thread, once for all viewers.
"""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.server.errors import JSON, ApiError, bad_request
from stageline.server.operations import Operation, QueryParameter
from stageline.server.pipeline_view import Diagnoser, PipelineView, pipeline_view
from stageline.server.routing import endpoint
from stageline.server.state import ServerState
from stageline.timeline.chrome_trace import chrome_trace
from stageline.timeline.span import Span

DEFAULT_SECONDS = 5.0
MOST_SECONDS = 60.0
MOST_SPANS = 50_000
"""In one answer: a few megabytes of JSON, and a fraction of a second of the engine's time."""

_PATIENCE_S = 10.0
_NUMBER = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)


class Timeline(msgspec.Struct, kw_only=True):
    """What every stage and the engine did in the last seconds.

    Args:
        start_s, end_s: on the clock of the spans, which counts from some moment in the past.
        spans: [stage (-1 is the engine), microbatch, kind, start, end, tokens, rows]; only those that ended in between.
        is_complete: false if there was more than one answer holds; `start_s` is later then.
    """

    start_s: float
    end_s: float
    num_stages: int
    is_complete: bool
    spans: list[Span]


class ChromeTrace(msgspec.Struct, kw_only=True, rename="camel"):
    """For ui.perfetto.dev."""

    trace_events: list[dict[str, Any]]
    display_time_unit: Literal["ms"]


_ENGINE = QueryParameter("engine", {"type": "integer", "minimum": 0})
"""Which one of several replicas; without it the first that is there."""

OPERATIONS = [
    Operation(
        "GET",
        "/debug/timeline",
        "What every stage did in the last seconds",
        tag="server",
        answer=Timeline,
        other_answer=ChromeTrace,
        errors=(400, 504),
        query=(
            QueryParameter(
                "seconds",
                {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS, "default": DEFAULT_SECONDS},
            ),
            QueryParameter("format", {"enum": ["spans", "chrome"], "default": "spans"}),
            _ENGINE,
        ),
    ),
    Operation(
        "GET",
        "/debug/pipeline",
        "What the pipeline holds and does",
        tag="server",
        answer=PipelineView,
        errors=(400, 504),
        query=(_ENGINE,),
    ),
]


def routes(state: ServerState) -> list[Route]:
    diagnosers = {replica: Diagnoser(state.llm, replica) for replica in [None, *range(state.llm.num_replicas)]}

    async def show_pipeline(state: ServerState, http: Request) -> Response:
        replica = _replica(state, http)

        async def gather() -> PipelineView:
            stats = await state.llm.stats(replica)
            return pipeline_view(state.model_names[0], stats, await diagnosers[replica].diagnosis(stats))

        return _json(await _in_time(gather()))

    return [
        Route("/debug/timeline", endpoint(state, show_timeline), methods=["GET"]),
        Route("/debug/pipeline", endpoint(state, show_pipeline), methods=["GET"]),
    ]


async def show_timeline(state: ServerState, http: Request) -> Response:
    seconds = _seconds(http.query_params.get("seconds"))
    kind = http.query_params.get("format", "spans")
    if kind not in ("spans", "chrome"):
        raise bad_request(f"format is {kind[:100]!r}; it must be spans or chrome", "format")
    timeline = await _in_time(recent(state, seconds, _replica(state, http)))
    if kind == "chrome":
        return Response(await asyncio.to_thread(_chrome_json, timeline), media_type=JSON)
    return Response(await asyncio.to_thread(msgspec.json.encode, timeline), media_type=JSON)


async def recent(state: ServerState, seconds: float, replica: int | None = None) -> Timeline:
    """The last seconds, or as much of them as fits into one answer."""
    num_stages = state.llm.config.pipeline_parallel_size
    most = MOST_SPANS // (num_stages + 1)
    end_s = state.llm.clock.now_s()
    spans = await state.llm.spans(end_s - seconds, most, replica)
    return await asyncio.to_thread(_timeline, spans, num_stages, end_s - seconds, end_s, most)


def _timeline(spans: list[Span], num_stages: int, start_s: float, end_s: float, most: int) -> Timeline:
    """Where one stage's spans were cut off, those of all stages are: no stage looks idle for want of them."""
    by_stage: dict[int, list[Span]] = {}
    for span in spans:
        by_stage.setdefault(span.stage_index, []).append(span)
    cut_s = max((its[0].end_s for its in by_stage.values() if len(its) >= most), default=start_s)
    kept = [_rounded(span) for span in spans if span.end_s >= cut_s]
    return Timeline(
        start_s=round(max(start_s, cut_s), 6),
        end_s=round(end_s, 6),
        num_stages=num_stages,
        is_complete=cut_s <= start_s,
        spans=kept,
    )


def _rounded(span: Span) -> Span:
    """To microseconds: half the size as JSON."""
    return Span(
        span.stage_index,
        span.microbatch,
        span.kind,
        round(span.start_s, 6),
        round(span.end_s, 6),
        span.num_tokens,
        span.num_rows,
    )


def _chrome_json(timeline: Timeline) -> bytes:
    return msgspec.json.encode(chrome_trace(timeline.spans))


def _seconds(text: str | None) -> float:
    if text is None:
        return DEFAULT_SECONDS
    seconds = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 < seconds <= MOST_SECONDS:
        raise bad_request(f"seconds is {text[:100]!r}; it must be above 0 and at most {MOST_SECONDS:g}", "seconds")
    return seconds


def _replica(state: ServerState, http: Request) -> int | None:
    text, num_replicas = http.query_params.get("engine"), state.llm.num_replicas
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) < num_replicas):
        raise bad_request(f"engine is {text[:100]!r}; it must be between 0 and {num_replicas - 1}", "engine")
    return int(text)


async def _in_time(answer: Any) -> Any:
    """Raises: ApiError 504 if the engine or a stage does not answer."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await answer
    except TimeoutError:
        message = f"the pipeline did not answer within {_PATIENCE_S:g} s; /health tells whether it still works"
        raise ApiError(504, message, code="timeout") from None


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
