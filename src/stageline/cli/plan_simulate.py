"""`stageline plan --simulate`: requests arrive, the real scheduler schedules them, and the stages are arithmetic."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

import psutil

from stageline.cli.opening import check_can_write, newest_simulation, written
from stageline.cli.workload_flags import check_workload, planned_requests
from stageline.config.engine_config import EngineConfig
from stageline.config.flags import plan_config_from_args
from stageline.config.plan_config import KV_DTYPES, PlanConfig
from stageline.cost.host_profile import layer_shape, load_host_profile
from stageline.cost.model_costs import WeightFormat, model_costs
from stageline.engine.startup import scheduler_limits
from stageline.errors import ConfigError
from stageline.executor.simulated_stages import SimulatedPipeline
from stageline.loadgen import workload
from stageline.loadgen.workload import PlannedRequest
from stageline.pipeline.partition import StageLayers, partition_layers
from stageline.planner.calibrate import this_host
from stageline.planner.cluster import read_cluster
from stageline.planner.host_pipeline import host_pipeline
from stageline.planner.known_models import KnownModel, find_model
from stageline.planner.placed_pipeline import placed_pipeline
from stageline.planner.search import search
from stageline.planner.simulate import SimulatedMemory, SimulatedRun, check_servable, simulate
from stageline.planner.simulation_report import format_simulation
from stageline.scheduler.limits import SchedulerLimits
from stageline.timeline.chrome_trace import write_chrome_trace
from stageline.timeline.saved import SavedTimeline

_KV_FRACTION_OF_FREE = 0.3


@dataclass(frozen=True)
class _Simulated:
    """What is to be simulated. `title`: in words; `num_replicas`: that share the requests."""

    title: str
    pipeline: SimulatedPipeline
    partition: tuple[StageLayers, ...]
    memory: SimulatedMemory
    limits: SchedulerLimits
    num_replicas: int = 1


def run_simulation(args: argparse.Namespace) -> int:
    """Returns: the exit status, 1 if a file could not be written. Raises: ConfigError."""
    config = plan_config_from_args(args)
    if args.model is None:
        raise ConfigError("--simulate needs a model (see stageline plan --help)")
    args.input_len, args.output_len = config.prompt_tokens, config.output_tokens
    check_workload(args)
    for flag in ("trace_out", "save"):
        check_can_write(f"--{flag.replace('_', '-')}", getattr(args, flag))
    model = find_model(args.model)
    requests, max_concurrency = _workload(args, config, model.spec.max_position_embeddings)
    what = _on_this_host(model, config) if args.cluster is None else _on_cluster(args, model, config)
    if what.num_replicas > 1:
        requests = requests[:: what.num_replicas]
        max_concurrency = max_concurrency and -(-max_concurrency // what.num_replicas)
    check_servable(requests, what.limits, what.memory)
    run = simulate(requests, what.pipeline, what.partition, what.limits, what.memory, max_concurrency)
    print(f"{model.name} on {what.title}\n{format_simulation(run)}")
    return 0 if _write_files(args, run) else 1


def _workload(
    args: argparse.Namespace, config: PlanConfig, max_model_len: int
) -> tuple[list[PlannedRequest], int | None]:
    """The requests, and how many may be under way."""
    requests, _ = workload.fitted(planned_requests(args), max_model_len)
    if args.request_rate is not None and args.request_rate < float("inf"):
        times_s = workload.arrival_times(args.request_rate, args.burstiness, random.Random(args.seed))
        return workload.arriving(requests, times_s), args.max_concurrency
    has_times = any(request.at_s is not None for request in requests)
    is_closed = args.max_concurrency is None and args.request_rate is None and not has_times
    return requests, config.concurrency if is_closed else args.max_concurrency


def _limits(args_len: int, num_stages: int, config: PlanConfig, max_num_seqs: int) -> SchedulerLimits:
    engine = EngineConfig(
        model="simulated",
        pipeline_parallel_size=num_stages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return scheduler_limits(engine, args_len)


def _on_this_host(model: KnownModel, config: PlanConfig) -> _Simulated:
    engine = EngineConfig(model=model.name)
    key = this_host(engine, model.spec)
    profile = load_host_profile(key)
    if profile is None:
        raise ConfigError(
            f"this host was not measured yet ({key.machine}, {key.dtype}); run `stageline plan {model.name} "
            "--calibrate`, or give --cluster FILE"
        )
    costs = model_costs(model.spec)
    num_stages = config.pipeline_parallel_size or 1
    partition = partition_layers(model.spec.num_layers, num_stages, None)
    room_bytes = _KV_FRACTION_OF_FREE * psutil.virtual_memory().available
    memory = SimulatedMemory(int(room_bytes / costs.kv_bytes_per_token) // engine.block_size, engine.block_size)
    return _Simulated(
        f"{num_stages} stage{'s' * (num_stages > 1)} of this host, measured with {profile.model}",
        host_pipeline(profile, layer_shape(costs), partition),
        partition,
        memory,
        _limits(model.spec.max_position_embeddings, num_stages, config, max(engine.max_num_seqs, config.concurrency)),
    )


def _on_cluster(args: argparse.Namespace, model: KnownModel, config: PlanConfig) -> _Simulated:
    weights = model.weights if config.weights == "auto" else WeightFormat(config.weights, config.weights)
    costs = model_costs(model.spec, weights, KV_DTYPES[config.kv_cache_dtype])
    cluster = read_cluster(args.cluster)
    best = search(costs, cluster, config).best
    layout, block_size = best.layout, EngineConfig(model="simulated").block_size
    return _Simulated(
        f"{cluster}: {layout}, partition {','.join(map(str, best.placement.layer_counts))}",
        placed_pipeline(best.placement),
        best.placement.cut,
        SimulatedMemory(best.capacity.num_tokens // block_size, block_size),
        _limits(
            model.spec.max_position_embeddings,
            layout.pipeline_parallel_size,
            config,
            max(EngineConfig(model="simulated").max_num_seqs, -(-config.concurrency // layout.data_parallel_size)),
        ),
        layout.data_parallel_size,
    )


def _write_files(args: argparse.Namespace, run: SimulatedRun) -> bool:
    recording = SavedTimeline.of(run.spans, run.num_stages)
    is_all_written = True
    if args.trace_out is not None:
        is_all_written &= written("--trace-out", args.trace_out, lambda: write_chrome_trace(args.trace_out, run.spans))
    if args.save is not None:
        is_all_written &= written("--save", args.save, lambda: recording.save(Path(args.save)))
    newest = newest_simulation()
    return is_all_written & written("the newest simulation", str(newest), lambda: recording.save(newest))
