"""Statistics made by hand, for tests of what is counted and of what is shown of it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from stageline.engine.stats import EngineFacts, EngineStats, ProcessUsage, SchedulerStats, StageFacts, StatsCollector
from stageline.pipeline.microbatch import Microbatch
from stageline.request import EngineRequest, RequestUpdate
from stageline.sampling import SamplerSpec
from stageline.timeline.stage_counters import StageAccount

MAX_MODEL_LEN = 1000


def request(request_id: str, num_prompt_tokens: int = 10, arrival_s: float = 0.0, **more) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt_tokens)),
        sampler=SamplerSpec(seed=0),
        max_tokens=5,
        eos_token_ids=(),
        stop_token_ids=(),
        arrival_s=arrival_s,
        **more,
    )


def update(request_id: str, time_s: float, num_tokens: int = 1, finish_reason=None, **more) -> RequestUpdate:
    facts = {"first_scheduled_s": 1.0, "first_token_s": 3.0, "num_cached_tokens": 0} | more
    return RequestUpdate(
        request_id=request_id,
        token_ids=[7] * num_tokens,
        logprobs=[],
        prompt_logprobs=[],
        finish_reason=finish_reason,
        stop_reason=None,
        time_s=time_s,
        finished_s=time_s if finish_reason else None,
        num_preemptions=0,
        **facts,
    )


def snapshot(collector: StatsCollector, in_flight: tuple[Microbatch, ...] = ()) -> EngineStats:
    stages = [StageFacts(stage_index=i, first_layer=i, end_layer=i + 1, weight_bytes=8, kv_bytes=80) for i in (0, 1)]
    facts = EngineFacts(
        block_size=16,
        num_blocks=10,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        stages=stages,
    )
    scheduler = SchedulerStats(
        num_running=2,
        num_waiting=1,
        num_waiting_tokens=30,
        num_blocks=10,
        num_used_blocks=4,
        num_preemptions=3,
        num_prefix_queries_tokens=100,
        num_prefix_hits_tokens=32,
    )
    counters = [StageAccount(1).snapshot(0.0), StageAccount(0).snapshot(0.0)]
    process = ProcessUsage(cpu_s=1.5, resident_bytes=2**20)
    return collector.snapshot(20.0, process, facts, scheduler, 2, in_flight, counters)


def microbatch(*num_tokens: int) -> Microbatch:
    return Microbatch(
        epoch=0,
        number=0,
        removed=[],
        added=[],
        extended=[],
        request_numbers=list(range(len(num_tokens))),
        num_computed_tokens=[0] * len(num_tokens),
        num_scheduled_tokens=list(num_tokens),
        token_ids=[1] * sum(num_tokens),
        sampling_rows=[],
    )


class _Families:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def read_back(families: list[Metric]) -> dict[str, Metric]:
    """Families by name, as a reader of their text sees them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}
