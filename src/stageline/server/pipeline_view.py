"""The pipeline as its viewers see it: what each stage holds and does, what moves, and what should be changed.

One idea: a view is statistics of now and totals since the start, made by the engine, and a diagnosis of the last
seconds, made here from spans. Whoever wants rates takes the difference of two views.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

import msgspec

import stageline
from stageline.engine.advice import Advice, RunFacts, advise
from stageline.engine.async_llm import AsyncLLM
from stageline.engine.events import EngineEvent
from stageline.engine.stats import EngineStats
from stageline.timeline.analysis import StageReport, analyse
from stageline.timeline.histogram import Histogram
from stageline.timeline.journeys import Journey, LatencySplit, journeys
from stageline.timeline.request_journeys import RequestTrace, mean_of, split_itl, split_ttft
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import LinkCounters, StageCounters

_DIAGNOSED_S = 8.0
_FRESH_S = 2.0
_MOST_JOURNEYS = 8
_MOST_SPANS = 12_000
"""That one diagnosis looks at; it takes some tens of milliseconds."""


class LinkView(msgspec.Struct, kw_only=True):
    """Activations that came over a link since the start; `latency_s` is of those that the receiver waited for."""

    num_messages: int
    num_bytes: int
    latency_s: Histogram


class StageTotals(msgspec.Struct, kw_only=True):
    """Since the stage was ready; the five times of its states sum to `elapsed_s`."""

    elapsed_s: float
    busy_s: float
    starved_s: float
    blocked_s: float
    preparing_s: float
    idle_s: float
    num_microbatches: int
    num_tokens: int


class StageShares(msgspec.Struct, kw_only=True):
    """Of the diagnosed seconds, 0 to 1; they sum to 1.

    Args:
        starved: a stage before still computed its input. in_transit: its input was on the way.
        blocked: its output was handed over.
        underfilled: it had nothing to do, though microbatches were in flight elsewhere. unused: none were.
    """

    busy: float
    starved: float
    in_transit: float
    blocked: float
    underfilled: float
    unused: float


class StageView(msgspec.Struct, kw_only=True):
    """Args:
    first_layer, end_layer: its layers, half-open.
    also_holds: embedding, head.
    kv_bytes: of its KV cache.
    kv_unused_bytes: that it could hold, but another stage could not.
    shares: None if nothing ran lately.
    step_s: its mean time per microbatch in the diagnosed seconds.
    resident_bytes: of its process; 0 if it has none of its own.
    received: activations from the stage before; none reach the first stage.
    """

    stage_index: int
    first_layer: int
    end_layer: int
    also_holds: list[str]
    weight_bytes: int
    kv_bytes: int
    kv_unused_bytes: int
    resident_bytes: int
    totals: StageTotals
    shares: StageShares | None
    step_s: float
    received: LinkView


class QueueView(msgspec.Struct, kw_only=True):
    """Requests, now."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    max_num_seqs: int


class WindowView(msgspec.Struct, kw_only=True):
    """Args:
    size: most microbatches that may be in flight now.
    group_rows: requests in each microbatch that is in flight, oldest first.
    """

    size: int
    group_rows: list[int]


class KVView(msgspec.Struct, kw_only=True):
    """Blocks hold the KV of `block_size` tokens on every stage. `limiting_stage` limits their number, if one does."""

    num_blocks: int
    num_used_blocks: int
    block_size: int
    limiting_stage: int | None


class RequestTotals(msgspec.Struct, kw_only=True):
    """Since the start. Latencies are histograms: [upper bounds, counts and one more for what is above, sum]."""

    num_added: int
    num_finished: int
    num_aborted: int
    num_refused: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    ttft_s: Histogram
    itl_s: Histogram


class LatencyView(msgspec.Struct, kw_only=True):
    """What a time was spent on; the parts sum to `total_s`.

    Args:
        engine_s: not scheduled yet, or the token was on its way back.
        hops_s: [stages] on the way to each. queues_s: [stages] waiting there for other microbatches.
        stages_s: [stages] computed by each, without sampling.
    """

    total_s: float
    engine_s: float
    hops_s: list[float]
    queues_s: list[float]
    stages_s: list[float]
    sampling_s: float

    @classmethod
    def of(cls, split: LatencySplit | None) -> LatencyView | None:
        if split is None:
            return None
        return cls(
            total_s=split.total_s,
            engine_s=split.engine_s,
            hops_s=list(split.hops_s),
            queues_s=list(split.queues_s),
            stages_s=list(split.stages_s),
            sampling_s=split.sampling_s,
        )


class JourneyView(msgspec.Struct, kw_only=True):
    """One request's time to its first token and between its newest ones; None where the spans do not reach back."""

    request_id: str
    ttft: LatencyView | None
    itl: LatencyView | None


class PipelineView(msgspec.Struct, kw_only=True):
    """Args:
    now_s, started_s: on the engine's clock, which the timeline's spans and `events` share.
    slowest_stage: that computed longest in the diagnosed seconds; None if nothing ran.
    bubble_fraction: of all stages' time in the diagnosed seconds; 0 if nothing ran.
    advice: what should be changed, most useful first.
    ttft, itl: what these times were spent on, the mean of requests of the diagnosed seconds; None if there are none.
    journeys: of some of these requests, the newest last.
    events: newest first.
    """

    model: str
    version: str
    now_s: float
    started_s: float
    max_model_len: int
    queue: QueueView
    window: WindowView
    kv: KVView
    requests: RequestTotals
    stages: list[StageView]
    slowest_stage: int | None
    bubble_fraction: float
    advice: list[str]
    ttft: LatencyView | None
    itl: LatencyView | None
    journeys: list[JourneyView]
    events: list[EngineEvent]


@dataclass(frozen=True)
class Diagnosis:
    """What the spans of some seconds say. `stages` is empty if nothing ran."""

    stages: tuple[StageReport, ...]
    advice: list[Advice]
    ttft: LatencySplit | None = None
    itl: LatencySplit | None = None
    journeys: tuple[JourneyView, ...] = ()


class Diagnoser:
    """Computes a diagnosis when one is asked for and the last one is no longer fresh; for any number of viewers.

    Args:
        replica: which one of several engines it is of; None for the first that is there.
    """

    def __init__(self, llm: AsyncLLM, replica: int | None = None) -> None:
        self._llm = llm
        self._replica = replica
        self._lock = asyncio.Lock()
        self._last: Diagnosis | None = None
        self._last_s = 0.0
        self._most_running = 0

    async def diagnosis(self, stats: EngineStats) -> Diagnosis:
        async with self._lock:
            now_s = self._llm.clock.now_s()
            self._most_running = max(self._most_running, stats.scheduler.num_running)
            if self._last is None or now_s - self._last_s > _FRESH_S:
                num_stages = len(stats.facts.stages)
                spans = await self._llm.spans(
                    now_s - _DIAGNOSED_S, _MOST_SPANS // (num_stages + 1), self._replica
                )
                self._last = await asyncio.to_thread(diagnose, spans, stats, self._most_running)
                self._last_s, self._most_running = now_s, stats.scheduler.num_running
            return self._last


def diagnose(spans: list[Span], stats: EngineStats, num_requests: int) -> Diagnosis:
    """Args: num_requests: most that were running at once meanwhile."""
    facts = stats.facts
    num_stages = len(facts.stages)
    report = analyse(spans, num_stages)
    if report.window_s <= 0:
        return Diagnosis((), [])
    layer_counts = [stage.end_layer - stage.first_layer for stage in facts.stages]
    whole = journeys(spans, num_stages)
    advice = advise(RunFacts(report, whole, layer_counts, num_requests, facts.kv_plan))
    return _with_journeys(Diagnosis(report.stages, advice), whole, stats.traces, num_stages)


def _with_journeys(
    diagnosis: Diagnosis, whole: list[Journey], traces: list[RequestTrace], num_stages: int
) -> Diagnosis:
    found = {journey.microbatch: journey for journey in whole}
    splits = [(trace, split_ttft(trace, found, num_stages), split_itl(trace, found, num_stages)) for trace in traces]
    told = [split for split in splits if split[1] is not None or split[2] is not None]
    return replace(
        diagnosis,
        ttft=mean_of([ttft for _, ttft, _ in told if ttft is not None]),
        itl=mean_of([itl for _, _, itl in told if itl is not None]),
        journeys=tuple(
            JourneyView(request_id=trace.request_id, ttft=LatencyView.of(ttft), itl=LatencyView.of(itl))
            for trace, ttft, itl in told[-_MOST_JOURNEYS:]
        ),
    )


def pipeline_view(model: str, stats: EngineStats, diagnosis: Diagnosis) -> PipelineView:
    facts, scheduler, requests = stats.facts, stats.scheduler, stats.requests
    reports = {report.stage_index: report for report in diagnosis.stages}
    plan = facts.kv_plan
    return PipelineView(
        model=model,
        version=stageline.__version__,
        now_s=stats.now_s,
        started_s=stats.started_s,
        max_model_len=facts.max_model_len,
        queue=QueueView(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            max_num_seqs=facts.max_num_seqs,
        ),
        window=WindowView(size=stats.microbatches.window, group_rows=stats.microbatches.in_flight_rows),
        kv=KVView(
            num_blocks=scheduler.num_blocks,
            num_used_blocks=scheduler.num_used_blocks,
            block_size=facts.block_size,
            limiting_stage=None if plan is None else plan.limiting_stage,
        ),
        requests=RequestTotals(
            num_added=requests.num_added,
            num_finished=requests.num_finished["stop"] + requests.num_finished["length"],
            num_aborted=requests.num_finished["abort"] + requests.num_finished["error"],
            num_refused=requests.num_refused,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=requests.num_prompt_tokens,
            num_cached_tokens=requests.num_cached_tokens,
            num_generation_tokens=requests.num_generation_tokens,
            ttft_s=requests.ttft_s,
            itl_s=requests.inter_token_s,
        ),
        stages=[_stage_view(stats, counters, reports.get(counters.stage_index)) for counters in stats.stages],
        slowest_stage=max(reports.values(), key=lambda one: one.busy_s).stage_index if reports else None,
        bubble_fraction=sum(one.bubble_fraction for one in reports.values()) / max(1, len(reports)),
        advice=[advice.text for advice in diagnosis.advice],
        ttft=LatencyView.of(diagnosis.ttft),
        itl=LatencyView.of(diagnosis.itl),
        journeys=list(diagnosis.journeys),
        events=stats.events,
    )


def _stage_view(stats: EngineStats, counters: StageCounters, report: StageReport | None) -> StageView:
    index = counters.stage_index
    facts, plan = stats.facts.stages[index], stats.facts.kv_plan
    ends = [("embedding", index == 0), ("norm + LM head", index == len(stats.facts.stages) - 1)]
    return StageView(
        stage_index=index,
        first_layer=facts.first_layer,
        end_layer=facts.end_layer,
        also_holds=[name for name, is_there in ends if is_there],
        weight_bytes=facts.weight_bytes,
        kv_bytes=facts.kv_bytes,
        kv_unused_bytes=0 if plan is None else plan.stages[index].unused_bytes,
        resident_bytes=counters.resident_bytes,
        totals=StageTotals(
            elapsed_s=counters.elapsed_s,
            busy_s=counters.busy_s,
            starved_s=counters.starved_s,
            blocked_s=counters.blocked_s,
            preparing_s=counters.preparing_s,
            idle_s=counters.idle_s,
            num_microbatches=counters.num_microbatches,
            num_tokens=counters.num_tokens,
        ),
        shares=None if report is None else _shares(report),
        step_s=0.0 if report is None else report.busy_s / max(1, report.num_microbatches),
        received=_link(counters.received),
    )


def _shares(report: StageReport) -> StageShares:
    def share(time_s: float) -> float:
        return round(time_s / report.window_s, 4)

    return StageShares(
        busy=share(report.busy_s),
        starved=share(report.starved_s),
        in_transit=share(report.in_transit_s),
        blocked=share(report.blocked_on_output_s),
        underfilled=share(report.underfilled_s),
        unused=share(report.unused_s),
    )


def _link(counters: LinkCounters) -> LinkView:
    return LinkView(num_messages=counters.num_messages, num_bytes=counters.num_bytes, latency_s=counters.latency_s)
