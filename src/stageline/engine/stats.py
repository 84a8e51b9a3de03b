"""What the engine did since its start, as plain numbers: for `/metrics`, `/load`, and whoever embeds the engine.

One idea: everything is counted once, in the engine's process, as totals and histograms; a snapshot of it is a message.
So any number of server processes give the same answer, and asking often or never changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import psutil

from stageline.engine.events import EngineEvent
from stageline.kv.kv_plan import KVPlan
from stageline.outputs import FinishReason
from stageline.pipeline.microbatch import Microbatch
from stageline.request import EngineRequest, RequestUpdate
from stageline.timeline.histogram import Histogram, HistogramCounter
from stageline.timeline.request_journeys import RequestTrace
from stageline.timeline.stage_counters import (
    MICROBATCH_KINDS,
    STEP_BOUNDS_S,
    MicrobatchKind,
    StageCounters,
    kind_of_microbatch,
)

# The bounds that dashboards for vLLM's metrics expect.
TTFT_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_BOUNDS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
ITERATION_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS_BOUNDS = (1, 2, 5, 10, 20)
ROWS_BOUNDS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's queues and the KV cache, now; the last five are totals.

    Args:
        num_used_blocks: that some request refers to; cached blocks that nobody uses are free.
        num_prefix_queries_tokens, num_prefix_hits_tokens: prompt tokens looked up in the prefix cache, and found.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_used_blocks: int
    num_preemptions: int
    num_prefix_queries_tokens: int
    num_prefix_hits_tokens: int


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over completions; a request with n > 1 counts n times, but once in `completions`.

    Args:
        num_added, num_refused: that were queued, and that found the queue full.
        num_finished: by finish reason.
        num_prompt_tokens: of those whose first token came; `num_cached_tokens` of them were not computed.
        ttft_s: arrival to first token. inter_token_s: one token to the next, of all. tpot_s: its mean per completion.
        queue_s: arrival to its first microbatch; prefill_s: from there to the first token; decode_s: from there to the
            end; inference_s: both; e2e_s: all.
    """

    num_added: int
    num_refused: int
    num_finished: dict[FinishReason, int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    ttft_s: Histogram
    inter_token_s: Histogram
    tpot_s: Histogram
    e2e_s: Histogram
    queue_s: Histogram
    prefill_s: Histogram
    decode_s: Histogram
    inference_s: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    max_tokens: Histogram
    completions: Histogram


class RingStats(msgspec.Struct, frozen=True, kw_only=True):
    """Microbatches of one kind, from launch to result; `computing_s` is what all stages computed of that time."""

    ring_s: Histogram
    computing_s: float


class MicrobatchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Args:
    window: most that may be in flight now.
    in_flight_rows: rows of each microbatch that is in flight now, oldest first.
    tokens, rows: sizes of all microbatches so far.
    by_kind: prefill, decode, mixed.
    """

    window: int
    in_flight_rows: list[int]
    tokens: Histogram
    rows: Histogram
    by_kind: dict[MicrobatchKind, RingStats]


class StageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change: a stage's layers [first, end) and its memory."""

    stage_index: int
    first_layer: int
    end_layer: int
    weight_bytes: int
    kv_bytes: int


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while an engine runs."""

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    stages: list[StageFacts]
    kv_plan: KVPlan | None = None


class ProcessUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engine's own process: CPU time since its start, and memory now."""

    cpu_s: float
    resident_bytes: int

    @classmethod
    def of_this_process(cls) -> ProcessUsage:
        process = psutil.Process()
        times = process.cpu_times()
        return cls(cpu_s=times.user + times.system, resident_bytes=process.memory_info().rss)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. `now_s` and `started_s` are on the engine's clock; `stages` is in order, `events` newest first.

    Args:
        traces: of requests that ended lately, and of some that run.
    """

    started_s: float
    now_s: float
    process: ProcessUsage
    facts: EngineFacts
    scheduler: SchedulerStats
    requests: RequestStats
    microbatches: MicrobatchStats
    stages: list[StageCounters]
    events: list[EngineEvent] = []
    traces: list[RequestTrace] = []


@dataclass
class _Live:
    """A completion that goes on: what its next token and its end have to be compared with."""

    asked: EngineRequest
    num_tokens: int = 0
    last_token_s: float = 0.0


class StatsCollector:
    """Counts what the engine's loop reports to it. One owner calls it; nothing here waits or grows with time."""

    def __init__(self, max_model_len: int, now_s: float) -> None:
        self._started_s = now_s
        self._live: dict[str, _Live] = {}
        self._num_added = self._num_refused = 0
        self._num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self._num_prompt_tokens = self._num_cached_tokens = self._num_generation_tokens = 0
        self._ttft_s = HistogramCounter(TTFT_BOUNDS_S)
        self._inter_token_s = HistogramCounter(INTER_TOKEN_BOUNDS_S)
        self._tpot_s = HistogramCounter(INTER_TOKEN_BOUNDS_S)
        self._e2e_s, self._queue_s, self._prefill_s, self._decode_s, self._inference_s = (
            HistogramCounter(REQUEST_BOUNDS_S) for _ in range(5)
        )
        tokens_bounds = token_count_bounds(max_model_len)
        self._prompt_tokens, self._generation_tokens, self._max_tokens = (
            HistogramCounter(tokens_bounds) for _ in range(3)
        )
        self._completions = HistogramCounter(COMPLETIONS_BOUNDS)
        self._microbatch_tokens = HistogramCounter(ITERATION_TOKENS_BOUNDS)
        self._microbatch_rows = HistogramCounter(ROWS_BOUNDS)
        self._ring_s = {kind: HistogramCounter(STEP_BOUNDS_S) for kind in MICROBATCH_KINDS}
        self._computing_s = dict.fromkeys(MICROBATCH_KINDS, 0.0)

    def added(self, request: EngineRequest) -> None:
        """A request was queued."""
        self._num_added += 1
        self._live[request.request_id] = _Live(request)
        if request.num_completions:
            self._completions.observe(request.num_completions)

    def refused(self) -> None:
        """A request found the queue full."""
        self._num_refused += 1

    def updated(self, updates: Iterable[RequestUpdate]) -> None:
        """News of requests, in the engine's order."""
        for update in updates:
            live = self._live.get(update.request_id)
            if live is None:
                continue
            if update.token_ids:
                self._count_tokens(live, update)
            if update.finish_reason is not None:
                self.ended(update, update.finish_reason)

    def ended(self, update: RequestUpdate, finish_reason: FinishReason) -> None:
        """A request is over; the reason may be one that the engine does not know, such as a stop string."""
        live = self._live.pop(update.request_id, None)
        if live is None:
            return
        arrival_s, end_s = live.asked.arrival_s, update.time_s if update.finished_s is None else update.finished_s
        self._num_finished[finish_reason] += 1
        self._prompt_tokens.observe(len(live.asked.prompt_token_ids))
        self._generation_tokens.observe(live.num_tokens)
        self._max_tokens.observe(live.asked.max_tokens)
        self._e2e_s.observe(end_s - arrival_s)
        if update.first_scheduled_s is None:
            return
        self._queue_s.observe(update.first_scheduled_s - arrival_s)
        self._inference_s.observe(end_s - update.first_scheduled_s)
        if update.first_token_s is None:
            return
        self._prefill_s.observe(update.first_token_s - update.first_scheduled_s)
        self._decode_s.observe(end_s - update.first_token_s)
        if live.num_tokens > 1:
            self._tpot_s.observe((end_s - update.first_token_s) / (live.num_tokens - 1))

    def _count_tokens(self, live: _Live, update: RequestUpdate) -> None:
        num_tokens = len(update.token_ids)
        if live.num_tokens == 0:
            first_s = update.time_s if update.first_token_s is None else update.first_token_s
            self._ttft_s.observe(first_s - live.asked.arrival_s)
            self._num_prompt_tokens += len(live.asked.prompt_token_ids)
            self._num_cached_tokens += update.num_cached_tokens
        else:
            # Tokens that came together were made together: the first of them waited for all.
            self._inter_token_s.observe(update.time_s - live.last_token_s)
        self._inter_token_s.observe(0.0, num_tokens - 1)
        live.num_tokens += num_tokens
        live.last_token_s = update.time_s
        self._num_generation_tokens += num_tokens

    def launched(self, microbatch: Microbatch) -> None:
        """A microbatch left."""
        self._microbatch_tokens.observe(microbatch.num_tokens)
        self._microbatch_rows.observe(microbatch.num_rows)

    def completed(self, microbatch: Microbatch, ring_s: float, computing_s: float) -> None:
        """A microbatch's result is back, `ring_s` after its launch; stages computed `computing_s` of that."""
        kind = kind_of_microbatch(microbatch.num_rows, microbatch.num_decode_rows)
        self._ring_s[kind].observe(ring_s)
        self._computing_s[kind] += computing_s

    def snapshot(
        self,
        now_s: float,
        process: ProcessUsage,
        facts: EngineFacts,
        scheduler: SchedulerStats,
        window: int,
        in_flight: Iterable[Microbatch],
        stages: Sequence[StageCounters],
        events: Sequence[EngineEvent] = (),
        traces: Sequence[RequestTrace] = (),
    ) -> EngineStats:
        """Everything counted so far, beside what its owners tell of now."""
        return EngineStats(
            started_s=self._started_s,
            now_s=now_s,
            process=process,
            facts=facts,
            scheduler=scheduler,
            requests=self._requests(),
            microbatches=MicrobatchStats(
                window=window,
                in_flight_rows=[microbatch.num_rows for microbatch in in_flight],
                tokens=self._microbatch_tokens.snapshot(),
                rows=self._microbatch_rows.snapshot(),
                by_kind={
                    kind: RingStats(ring_s=self._ring_s[kind].snapshot(), computing_s=self._computing_s[kind])
                    for kind in MICROBATCH_KINDS
                },
            ),
            stages=sorted(stages, key=lambda stage: stage.stage_index),
            events=list(events),
            traces=list(traces),
        )

    def _requests(self) -> RequestStats:
        return RequestStats(
            num_added=self._num_added,
            num_refused=self._num_refused,
            num_finished=dict(self._num_finished),
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generation_tokens=self._num_generation_tokens,
            ttft_s=self._ttft_s.snapshot(),
            inter_token_s=self._inter_token_s.snapshot(),
            tpot_s=self._tpot_s.snapshot(),
            e2e_s=self._e2e_s.snapshot(),
            queue_s=self._queue_s.snapshot(),
            prefill_s=self._prefill_s.snapshot(),
            decode_s=self._decode_s.snapshot(),
            inference_s=self._inference_s.snapshot(),
            prompt_tokens=self._prompt_tokens.snapshot(),
            generation_tokens=self._generation_tokens.snapshot(),
            max_tokens=self._max_tokens.snapshot(),
            completions=self._completions.snapshot(),
        )


def token_count_bounds(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... as far as a request can be long."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(max_model_len))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= max_model_len)
