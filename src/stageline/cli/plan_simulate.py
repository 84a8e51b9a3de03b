"""`stageline plan --simulate`: requests arrive, the real scheduler schedules them, and the stages are arithmetic."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from stageline.cli.opening import check_can_write, newest_simulation, written
from stageline.cli.workload_flags import check_workload, planned_requests
from stageline.config.flags import plan_config_from_args
from stageline.config.plan_config import PlanConfig
from stageline.errors import ConfigError
from stageline.loadgen import workload
from stageline.loadgen.workload import PlannedRequest
from stageline.planner.cluster import read_cluster
from stageline.planner.known_models import find_model
from stageline.planner.scenario import on_cluster, on_this_host
from stageline.planner.simulate import SimulatedRun
from stageline.planner.simulation_report import format_simulation
from stageline.timeline.chrome_trace import write_chrome_trace
from stageline.timeline.saved import SavedTimeline


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
    if args.cluster is None:
        scenario = on_this_host(model, config)
    else:
        scenario = on_cluster(model, read_cluster(args.cluster), config)
    run = scenario.run(requests, max_concurrency)
    print(f"{model.name} on {scenario.title}\n{format_simulation(run)}")
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


def _write_files(args: argparse.Namespace, run: SimulatedRun) -> bool:
    recording = SavedTimeline.of(run.spans, run.num_stages)
    is_all_written = True
    if args.trace_out is not None:
        is_all_written &= written("--trace-out", args.trace_out, lambda: write_chrome_trace(args.trace_out, run.spans))
    if args.save is not None:
        is_all_written &= written("--save", args.save, lambda: recording.save(Path(args.save)))
    newest = newest_simulation()
    return is_all_written & written("the newest simulation", str(newest), lambda: recording.save(newest))
