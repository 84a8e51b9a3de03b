"""A workload on a pipeline that need not exist: the real scheduler and engine loop on simulated stages.

One idea: nothing here decides anything. Requests arrive on the virtual clock, the core is stepped, and what its updates
and spans say is kept, as if it had been a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from stageline.clock import VirtualClock
from stageline.engine.core import EngineCore
from stageline.errors import ConfigError
from stageline.executor.simulated import SimulatedExecutor
from stageline.executor.simulated_stages import SimulatedPipeline
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.loadgen.workload import PlannedRequest
from stageline.outputs import RequestTimings
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.pipeline.partition import StageLayers
from stageline.request import EngineRequest, RequestUpdate
from stageline.sampling import SamplerSpec
from stageline.scheduler.limits import SchedulerLimits
from stageline.scheduler.scheduler import Scheduler
from stageline.timeline.analysis import PipelineReport, analyse
from stageline.timeline.span import Span

_BITS_PER_POSITION = 24
_VOCAB_SIZE = 1 << 62
"""Every content and position has a token of its own, so that prompts share what they are said to share."""

_MOST_SPANS = 300_000
"""What is kept of a run, the newest; more would take longer to analyse and to draw than to simulate."""


@dataclass(frozen=True)
class SimulatedMemory:
    """The KV cache that every stage has."""

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool = True


@dataclass
class SimulatedRequest:
    """What a client saw of a request, on the virtual clock."""

    num_prompt_tokens: int
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times_s: list[float] = field(default_factory=list)

    def take(self, update: RequestUpdate) -> None:
        self.token_times_s += [update.time_s] * len(update.token_ids)
        self.first_scheduled_s, self.first_token_s = update.first_scheduled_s, update.first_token_s
        self.finished_s = update.finished_s
        self.num_cached_tokens, self.num_preemptions = update.num_cached_tokens, update.num_preemptions

    @property
    def timings(self) -> RequestTimings:
        return RequestTimings(
            self.arrival_s,
            self.first_scheduled_s,
            self.first_token_s,
            self.finished_s,
            self.num_cached_tokens,
            self.num_preemptions,
            self.token_times_s,
        )


@dataclass(frozen=True)
class SimulatedRun:
    """What came of a workload.

    Args:
        requests: in the order of their arrival.
        busy_s: [stages] over the whole run.
        spans: the newest, of every stage equally many.
    """

    requests: tuple[SimulatedRequest, ...]
    num_stages: int
    num_microbatches: int
    duration_s: float
    busy_s: tuple[float, ...]
    spans: list[Span]

    @property
    def num_microbatches_kept(self) -> int:
        """Of which there are spans."""
        return len({span.microbatch for span in self.spans if span.stage_index == self.num_stages - 1})

    @property
    def num_output_tokens(self) -> int:
        return sum(len(request.token_times_s) for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s > 0 else 0.0

    @property
    def ttft_s(self) -> list[float]:
        return [time_s for one in self.requests if (time_s := one.timings.ttft_s) is not None]

    @property
    def tpot_s(self) -> list[float]:
        return [
            time_s for one in self.requests if (time_s := one.timings.tpot_s(len(one.token_times_s))) is not None
        ]

    @property
    def itl_s(self) -> list[float]:
        return [time_s for one in self.requests for time_s in one.timings.inter_token_s]

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """[stages] share of the whole run in which each computed nothing, filling, draining and pauses included."""
        return tuple(1 - busy_s / self.duration_s if self.duration_s > 0 else 0.0 for busy_s in self.busy_s)

    def report(self) -> PipelineReport:
        """The reasons of the bubbles, of the newest microbatches."""
        return analyse(self.spans, self.num_stages)


def simulate(
    requests: Sequence[PlannedRequest],
    pipeline: SimulatedPipeline,
    partition: tuple[StageLayers, ...],
    limits: SchedulerLimits,
    memory: SimulatedMemory,
    max_concurrency: int | None = None,
    warm_up: Sequence[Sequence[PlannedRequest]] = (),
) -> SimulatedRun:
    """Run a workload to its end.

    Args:
        requests: those without a time come at once, or as soon as `max_concurrency` lets them.
        max_concurrency: most requests unfinished at once; None for no bound.
        warm_up: rounds of requests that are served before, one after the other; nothing is told of them, but the
            scheduler has learnt what tokens cost.
    Raises: ConfigError if a request can never be served.
    """
    clock = VirtualClock()
    executor = SimulatedExecutor(pipeline, partition, clock)
    executor.allocate(_microbatch_limits(limits, memory))
    kv = KVCacheManager(memory.num_blocks, memory.block_size, memory.enable_prefix_caching)
    core = EngineCore(executor, Scheduler(kv, limits), clock)
    try:
        for number, before in enumerate(warm_up):
            _Clients([_of_round(request, number, len(warm_up)) for request in before], core, clock, None).run()
        start_s, num_before, busy_before_s = clock.now_s(), executor.num_microbatches, executor.busy_s
        clients = _Clients(requests, core, clock, max_concurrency)
        clients.run()
        most_per_stage = _MOST_SPANS // pipeline.num_stages
        core.ask_for_spans(start_s, most_per_stage)
        return SimulatedRun(
            requests=tuple(clients.records),
            num_stages=pipeline.num_stages,
            num_microbatches=executor.num_microbatches - num_before,
            duration_s=clock.now_s() - start_s,
            busy_s=tuple(busy_s - before_s for busy_s, before_s in zip(executor.busy_s, busy_before_s, strict=True)),
            spans=core.take_spans(start_s, most_per_stage) or [],
        )
    finally:
        core.close()


class _Clients:
    """Sends the requests when it is time, and keeps what becomes of them."""

    def __init__(
        self, requests: Sequence[PlannedRequest], core: EngineCore, clock: VirtualClock, max_concurrency: int | None
    ) -> None:
        self._requests = sorted(requests, key=lambda request: request.at_s or 0.0)
        self._core = core
        self._clock = clock
        self._most = max_concurrency or len(requests)
        self._start_s = clock.now_s()
        self._num_unfinished = 0
        self.records: list[SimulatedRequest] = []

    def run(self) -> None:
        while True:
            next_s = self._send_those_due()
            if self._core.has_work:
                for update in self._core.step(until_s=next_s):
                    self.records[int(update.request_id)].take(update)
                    self._num_unfinished -= update.finish_reason is not None
            elif next_s is None:
                return
            else:
                self._clock.advance_to(next_s)

    def _send_those_due(self) -> float | None:
        """Returns: when the next one comes; None if none will, or if it comes when another ends."""
        while (number := len(self.records)) < len(self._requests) and self._num_unfinished < self._most:
            planned = self._requests[number]
            at_s = self._start_s + (planned.at_s or 0.0)
            if at_s > self._clock.now_s():
                return at_s
            # Who had to wait for room sends late, and counts from then.
            arrival_s = at_s if self._most >= len(self._requests) else self._clock.now_s()
            self._core.add(_as_engine_request(number, planned, arrival_s))
            self.records.append(SimulatedRequest(planned.num_prompt_tokens, arrival_s))
            self._num_unfinished += 1
        return None


def _as_engine_request(number: int, planned: PlannedRequest, arrival_s: float) -> EngineRequest:
    token_ids: list[int] = []
    for segment in planned.segments:
        first = (segment.content << _BITS_PER_POSITION) % _VOCAB_SIZE
        token_ids += range(first, first + segment.num_tokens)
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=token_ids,
        sampler=SamplerSpec(seed=0),
        max_tokens=planned.num_output_tokens,
        eos_token_ids=(),
        stop_token_ids=(),
        arrival_s=arrival_s,
    )


def _of_round(planned: PlannedRequest, number: int, num_rounds: int) -> PlannedRequest:
    """The same lengths with contents that no other round has."""
    segments = (replace(one, content=-1 - number - num_rounds * one.content) for one in planned.segments)
    return replace(planned, segments=tuple(segments))


def _microbatch_limits(limits: SchedulerLimits, memory: SimulatedMemory) -> MicrobatchLimits:
    return MicrobatchLimits(
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        vocab_size=_VOCAB_SIZE,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )


def check_servable(requests: Sequence[PlannedRequest], limits: SchedulerLimits, memory: SimulatedMemory) -> None:
    """Raises: ConfigError for the first request that no pipeline with these limits can serve."""
    num_kv_tokens = memory.num_blocks * memory.block_size
    for number, request in enumerate(requests):
        num_tokens = request.num_prompt_tokens + request.num_output_tokens
        if request.num_prompt_tokens < 1:
            raise ConfigError(f"request {number} has no prompt, or one of text; a simulation needs lengths in tokens")
        if num_tokens > limits.max_model_len:
            raise ConfigError(
                f"request {number} has {num_tokens} tokens, above the model's length of {limits.max_model_len}"
            )
        if num_tokens - 1 > num_kv_tokens:
            raise ConfigError(f"request {number} needs room for {num_tokens - 1} tokens; there is for {num_kv_tokens}")
