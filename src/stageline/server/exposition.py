"""The engine's statistics as Prometheus metrics: `vllm:*` for the dashboards there are, and `stageline:*` beside.

One idea: nothing is counted here. Every scrape is made from one snapshot, so its numbers belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from stageline.engine.stats import EngineStats, StageFacts
from stageline.timeline.histogram import Histogram
from stageline.timeline.stage_counters import StageCounters, StepCounters

Labels = Mapping[str, str]
Bounds = list[tuple[str, float]]


class Exposition:
    """Collects metric families that share some labels.

    Args:
        common: labels of every sample.
    """

    def __init__(self, common: Labels) -> None:
        self.families: list[Metric] = []
        self._common = dict(common)

    def gauge(self, name: str, text: str, value: float | Iterable[tuple[Labels, float]]) -> None:
        """One value, or one per set of further labels."""
        self._add(GaugeMetricFamily, name, text, _labelled(value))

    def counter(self, name: str, text: str, value: float | Iterable[tuple[Labels, float]]) -> None:
        """Named without the suffix `_total`, which the format adds."""
        self._add(CounterMetricFamily, name, text, _labelled(value))

    def histogram(self, name: str, text: str, value: Histogram | Iterable[tuple[Labels, Histogram]]) -> None:
        labelled = [({}, value)] if isinstance(value, Histogram) else list(value)
        family: HistogramMetricFamily | None = None
        for labels, histogram in labelled:
            family = family or HistogramMetricFamily(name, text, labels=[*self._common, *labels])
            values = [*self._common.values(), *labels.values()]
            family.add_metric(values, _cumulative(histogram), histogram.total)
        if family is not None:
            self.families.append(family)

    def _add(
        self,
        kind: Callable[..., GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        labelled: list[tuple[Labels, float]],
    ) -> None:
        if not labelled:
            return
        family = kind(name, text, labels=[*self._common, *labelled[0][0]])
        for labels, value in labelled:
            family.add_metric([*self._common.values(), *labels.values()], value)
        self.families.append(family)


def engine_families(stats: Mapping[int, EngineStats], model_name: str) -> list[Metric]:
    """Everything that snapshots tell, those of each replica with its number as the label `engine`."""
    by_name: dict[str, Metric] = {}
    for replica, its_stats in stats.items():
        for family in _families_of(its_stats, model_name, f"{replica}"):
            if family.name in by_name:
                by_name[family.name].samples.extend(family.samples)
            else:
                by_name[family.name] = family
    return list(by_name.values())


def _families_of(stats: EngineStats, model_name: str, engine: str) -> list[Metric]:
    page = Exposition({"model_name": model_name, "engine": engine})
    _add_queues(page, stats)
    _add_requests(page, stats)
    _add_microbatches(page, stats)
    _add_stages(page, stats)
    _add_links(page, stats)
    return page.families


def _add_queues(page: Exposition, stats: EngineStats) -> None:
    scheduler, facts = stats.scheduler, stats.facts
    usage = scheduler.num_used_blocks / scheduler.num_blocks
    page.gauge("vllm:num_requests_running", "Requests that are being computed.", scheduler.num_running)
    page.gauge("vllm:num_requests_waiting", "Requests that wait for their turn.", scheduler.num_waiting)
    page.gauge("stageline:waiting_tokens", "Prompt tokens of the requests that wait.", scheduler.num_waiting_tokens)
    page.gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 is all of it.", usage)
    page.gauge("vllm:gpu_cache_usage_perc", "The same under its older name.", usage)
    page.counter(
        "vllm:prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache.",
        scheduler.num_prefix_queries_tokens,
    )
    page.counter(
        "vllm:prefix_cache_hits", "Prompt tokens that the prefix cache had.", scheduler.num_prefix_hits_tokens
    )
    page.counter(
        "vllm:num_preemptions", "Times that a request lost its KV cache to another one.", scheduler.num_preemptions
    )
    config = {
        "block_size": f"{facts.block_size}",
        "num_gpu_blocks": f"{facts.num_blocks}",
        "enable_prefix_caching": f"{facts.enable_prefix_caching}",
    }
    page.gauge("vllm:cache_config_info", "How the KV cache is set up.", [(config, 1)])
    limits = {
        "max_model_len": f"{facts.max_model_len}",
        "max_num_seqs": f"{facts.max_num_seqs}",
        "max_num_batched_tokens": f"{facts.max_num_batched_tokens}",
        "pipeline_parallel_size": f"{len(facts.stages)}",
    }
    page.gauge("stageline:engine_info", "How the engine is set up.", [(limits, 1)])
    page.counter("stageline:engine_cpu_seconds", "CPU time of the engine's own process.", stats.process.cpu_s)
    page.gauge(
        "stageline:engine_resident_memory_bytes", "Memory of the engine's own process.", stats.process.resident_bytes
    )
    page.counter("stageline:engine_uptime_seconds", "Time since the engine was ready.", stats.now_s - stats.started_s)


def _add_requests(page: Exposition, stats: EngineStats) -> None:
    requests = stats.requests
    page.counter("stageline:requests_added", "Completions that were queued.", requests.num_added)
    page.counter("stageline:requests_refused", "Requests that found the queue full.", requests.num_refused)
    page.counter(
        "vllm:request_success",
        "Completions that ended, by reason.",
        [({"finished_reason": reason}, count) for reason, count in requests.num_finished.items()],
    )
    page.counter(
        "stageline:requests_aborted",
        "Completions that were given up: the client left, or time ran out.",
        requests.num_finished["abort"],
    )
    page.counter("vllm:prompt_tokens", "Prompt tokens of completions that began.", requests.num_prompt_tokens)
    page.counter("vllm:prompt_tokens_cached", "Those that came from the prefix cache.", requests.num_cached_tokens)
    page.counter("vllm:generation_tokens", "Tokens generated.", requests.num_generation_tokens)
    for name, text, histogram in (
        ("vllm:time_to_first_token_seconds", "From arrival to the first token.", requests.ttft_s),
        ("vllm:inter_token_latency_seconds", "From one token to the next.", requests.inter_token_s),
        ("vllm:time_per_output_token_seconds", "The same under its older name.", requests.inter_token_s),
        (
            "vllm:request_time_per_output_token_seconds",
            "Mean time from one token to the next, per completion.",
            requests.tpot_s,
        ),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end.", requests.e2e_s),
        ("vllm:request_queue_time_seconds", "From arrival to the first microbatch.", requests.queue_s),
        ("vllm:request_prefill_time_seconds", "From the first microbatch to the first token.", requests.prefill_s),
        ("vllm:request_decode_time_seconds", "From the first token to the end.", requests.decode_s),
        ("vllm:request_inference_time_seconds", "From the first microbatch to the end.", requests.inference_s),
        ("vllm:request_prompt_tokens", "Prompt tokens per completion.", requests.prompt_tokens),
        ("vllm:request_generation_tokens", "Generated tokens per completion.", requests.generation_tokens),
        ("vllm:request_params_n", "Completions that a request asked for.", requests.completions),
        ("vllm:request_params_max_tokens", "Most tokens that a completion may have.", requests.max_tokens),
    ):
        page.histogram(name, text, histogram)


def _add_microbatches(page: Exposition, stats: EngineStats) -> None:
    microbatches = stats.microbatches
    in_flight = microbatches.in_flight_rows
    page.histogram("vllm:iteration_tokens_total", "Tokens per microbatch.", microbatches.tokens)
    page.histogram("stageline:microbatch_requests", "Requests per microbatch.", microbatches.rows)
    page.gauge("stageline:microbatches_in_flight", "Microbatches in the pipeline now.", len(in_flight))
    page.gauge("stageline:window_microbatches", "Microbatches that may be in the pipeline.", microbatches.window)
    group = {"smallest": min(in_flight, default=0), "largest": max(in_flight, default=0)}
    page.gauge(
        "stageline:group_requests",
        "Requests of the smallest and the largest microbatch in the pipeline now.",
        [({"which": which}, size) for which, size in group.items()],
    )
    page.histogram(
        "stageline:ring_time_seconds",
        "From a microbatch's launch to its result.",
        [({"kind": kind}, ring.ring_s) for kind, ring in microbatches.by_kind.items()],
    )
    page.counter(
        "stageline:ring_computing_seconds",
        "The part of the ring times in which a stage computed the microbatch.",
        [({"kind": kind}, ring.computing_s) for kind, ring in microbatches.by_kind.items()],
    )


def _add_stages(page: Exposition, stats: EngineStats) -> None:
    stages = stats.stages
    page.counter(
        "stageline:stage_seconds", "Time since the stage was ready.", _per_stage(stages, lambda s: s.elapsed_s)
    )
    page.counter(
        "stageline:stage_busy_seconds", "Time a stage computed.", _per_stage(stages, lambda stage: stage.busy_s)
    )
    page.counter(
        "stageline:stage_bubble_seconds",
        "Time a stage did not compute: starved (its input had not come), blocked (handing its output over), preparing "
        "(reading what to do), idle (nothing was announced).",
        [({"stage": f"{s.stage_index}", "reason": reason}, time_s) for s in stages for reason, time_s in _bubbles(s)],
    )
    page.histogram(
        "stageline:stage_step_seconds",
        "Time a stage computed one microbatch.",
        [({"stage": f"{s.stage_index}", "kind": kind}, steps.time_s) for s in stages for kind, steps in _steps(s)],
    )
    page.counter(
        "stageline:stage_tokens",
        "Tokens that a stage computed.",
        [({"stage": f"{s.stage_index}", "kind": kind}, steps.num_tokens) for s in stages for kind, steps in _steps(s)],
    )
    page.gauge(
        "stageline:stage_resident_memory_bytes",
        "Memory of a stage's process.",
        _per_stage(stages, lambda stage: stage.resident_bytes),
    )
    usage = stats.scheduler.num_used_blocks / stats.scheduler.num_blocks
    by_stage: tuple[tuple[str, str, Callable[[StageFacts], float]], ...] = (
        ("stageline:stage_layers", "Layers that a stage holds.", lambda facts: facts.end_layer - facts.first_layer),
        ("stageline:stage_weight_bytes", "Memory of a stage's weights.", lambda facts: facts.weight_bytes),
        ("stageline:stage_kv_cache_bytes", "Memory of a stage's KV cache.", lambda facts: facts.kv_bytes),
        ("stageline:stage_kv_cache_used_bytes", "The part in use.", lambda facts: facts.kv_bytes * usage),
    )
    for name, text, value in by_stage:
        page.gauge(name, text, [({"stage": f"{facts.stage_index}"}, value(facts)) for facts in stats.facts.stages])


def _add_links(page: Exposition, stats: EngineStats) -> None:
    """A link's messages as its sender counts them, its latency as its receiver does."""
    links = [
        ({"link": f"s{sender.stage_index}-s{receiver.stage_index}"}, sender.sent, receiver.received)
        for sender, receiver in zip(stats.stages, stats.stages[1:], strict=False)
    ]
    page.counter(
        "stageline:link_bytes", "Bytes of activations sent.", [(labels, sent.num_bytes) for labels, sent, _ in links]
    )
    page.counter(
        "stageline:link_messages", "Activations sent.", [(labels, sent.num_messages) for labels, sent, _ in links]
    )
    page.histogram(
        "stageline:link_latency_seconds",
        "From sending to receiving, where the receiver waited for it.",
        [(labels, received.latency_s) for labels, _, received in links],
    )


def _per_stage(
    stages: Iterable[StageCounters], value: Callable[[StageCounters], float]
) -> list[tuple[Labels, float]]:
    return [({"stage": f"{stage.stage_index}"}, value(stage)) for stage in stages]


def _bubbles(stage: StageCounters) -> Iterator[tuple[str, float]]:
    yield "starved", stage.starved_s
    yield "blocked", stage.blocked_s
    yield "preparing", stage.preparing_s
    yield "idle", stage.idle_s


def _steps(stage: StageCounters) -> Iterator[tuple[str, StepCounters]]:
    yield "prefill", stage.prefill
    yield "decode", stage.decode
    yield "mixed", stage.mixed


def _labelled(value: float | Iterable[tuple[Labels, float]]) -> list[tuple[Labels, float]]:
    return [({}, value)] if isinstance(value, int | float) else list(value)


def _cumulative(histogram: Histogram) -> Bounds:
    """Values up to each bound, as the format wants them."""
    bounds: Bounds = []
    so_far = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        so_far += count
        bounds.append(("+Inf" if bound == float("inf") else f"{float(bound)}", so_far))
    return bounds
