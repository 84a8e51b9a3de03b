"""A pipeline of any depth that never ran: what /debug would answer for it, made of the structs that answer."""

from __future__ import annotations

import msgspec

from stageline.engine.events import EngineEvent
from stageline.engine.stats import INTER_TOKEN_BOUNDS_S, TTFT_BOUNDS_S
from stageline.server.debug import Timeline
from stageline.server.pipeline_view import (
    JourneyView,
    KVView,
    LatencyView,
    LinkView,
    PipelineView,
    QueueView,
    RequestTotals,
    StageShares,
    StageTotals,
    StageView,
    WindowView,
)
from stageline.timeline.histogram import Histogram, HistogramCounter
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import LATENCY_BOUNDS_S

NOW_S = 1000.0
STEP_S = 0.02


def _histogram(bounds: tuple[float, ...], value: float) -> Histogram:
    counter = HistogramCounter(bounds)
    counter.observe(value, 10)
    return counter.snapshot()


def _stage(index: int, num_stages: int) -> StageView:
    busy = 0.95 if index == num_stages // 2 else 0.6 + 0.2 * (index * 7 % 11) / 11
    rest = (1 - busy) / 4
    return StageView(
        stage_index=index,
        first_layer=2 * index,
        end_layer=2 * index + 2,
        also_holds=["embedding"] if index == 0 else [],
        weight_bytes=3 * 2**30,
        kv_bytes=2**30,
        kv_unused_bytes=2**20,
        resident_bytes=2**32,
        totals=StageTotals(
            elapsed_s=900.0, busy_s=600.0, starved_s=200.0, blocked_s=50.0, preparing_s=20.0, idle_s=30.0,
            num_microbatches=50_000, num_tokens=800_000,
        ),
        shares=StageShares(busy=busy, starved=rest, in_transit=rest, blocked=rest, underfilled=rest, unused=0.0),
        step_s=busy * STEP_S,
        received=LinkView(num_messages=50_000, num_bytes=10**9, latency_s=_histogram(LATENCY_BOUNDS_S, 3e-4)),
    )


def _latency(total_s: float, num_stages: int) -> LatencyView:
    part_s = total_s / (4 * num_stages)
    return LatencyView(
        total_s=total_s, engine_s=total_s / 8, hops_s=[part_s / 2] * num_stages, queues_s=[part_s] * num_stages,
        stages_s=[2 * part_s] * num_stages, sampling_s=0.0,
    )  # fmt: skip


def made_up_view(num_stages: int) -> bytes:
    slowest = num_stages // 2
    view = PipelineView(
        model="made-up",
        version="0",
        now_s=NOW_S,
        started_s=100.0,
        max_model_len=8192,
        queue=QueueView(num_running=1000, num_waiting=24, num_waiting_tokens=12_000, max_num_seqs=1024),
        window=WindowView(size=num_stages + 4, group_rows=[16] * (num_stages + 2)),
        kv=KVView(num_blocks=10_000, num_used_blocks=7_500, block_size=16, limiting_stage=slowest),
        requests=RequestTotals(
            num_added=5000, num_finished=3900, num_aborted=76, num_refused=0, num_preemptions=3,
            num_prompt_tokens=10**6, num_cached_tokens=10**5, num_generation_tokens=2 * 10**6,
            ttft_s=_histogram(TTFT_BOUNDS_S, 0.3), itl_s=_histogram(INTER_TOKEN_BOUNDS_S, 0.04),
        ),
        stages=[_stage(index, num_stages) for index in range(num_stages)],
        slowest_stage=slowest,
        bubble_fraction=0.3,
        ttft=_latency(0.3, num_stages),
        itl=_latency(0.04, num_stages),
        journeys=[
            JourneyView(request_id=f"made-up-{number}", ttft=_latency(0.3, num_stages), itl=None) for number in range(8)
        ],
        advice=[f"slowest stage: s{slowest} (+18%); try --pp-layer-partition auto"],
        events=[EngineEvent(1, NOW_S - 5, "preemption", "preempted: <b>the KV cache is full</b>", None, 3)],
    )  # fmt: skip
    return msgspec.json.encode(view)


def made_up_timeline(num_stages: int) -> bytes:
    """Two seconds of microbatches, one behind the other, every thirteenth with prompt tokens."""
    spans = []
    for stage in range(num_stages):
        for place in range(100):
            number = 1000 + place - stage
            start_s = NOW_S - 2 + place * STEP_S
            num_tokens = 40 if number % 13 == 0 else 16
            spans.append(Span(stage, number, "receive_wait", start_s - 0.1 * STEP_S, start_s, num_tokens, 16))
            spans.append(Span(stage, number, "forward", start_s, start_s + 0.85 * STEP_S, num_tokens, 16))
    timeline = Timeline(start_s=NOW_S - 2, end_s=NOW_S, num_stages=num_stages, is_complete=True, spans=spans)
    return msgspec.json.encode(timeline)
