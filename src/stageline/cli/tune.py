"""`stageline tune`: measure a pipeline's items, propose a partition, and show what it is worth on this machine."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stageline.checkpoint import open_checkpoint
from stageline.cli.opening import OpenLLM, SubParsers, add_command, check_can_write, open_llm, written
from stageline.cli.tune_report import counts_text, format_items, format_trials, trials_as_json
from stageline.config.engine_config import AUTO_PARTITIONS, PLANNED_CONTEXT_TOKENS, PLANNED_REQUESTS, EngineConfig
from stageline.config.flags import add_engine_flags, engine_config_from_args
from stageline.cost.profile import Profile, save_profile
from stageline.errors import ConfigError
from stageline.pipeline.partition import default_layer_counts, parse_layer_counts
from stageline.pipeline.partition_by_cost import stage_times_s

if TYPE_CHECKING:
    from stageline.checkpoint.checkpoint import Checkpoint
    from stageline.engine.llm import LLM
    from stageline.engine.tuning import DecodeLoad, Proposal, Trial

_USAGE = "stageline tune MODEL -pp STAGES [--concurrency N] [--context TOKENS] [--apply] [options]"
_EXAMPLE = """example:
  stageline tune ./SmolLM2-135M-Instruct -pp 2 --concurrency 64 --context 256 --apply

With --apply the measured times are kept, and --pp-layer-partition auto uses them from then on.
"""


def add_parser(commands: SubParsers) -> None:
    tune = add_command(commands, "tune", "find the partition that suits this machine", _USAGE, _EXAMPLE)
    _add_count(tune, "--concurrency", PLANNED_REQUESTS, "requests decoding at once", "N")
    _add_count(tune, "--context", PLANNED_CONTEXT_TOKENS, "tokens of each request, halfway", "TOKENS")
    _add_count(tune, "--output-len", 48, "tokens per answer", "TOKENS")
    _add_count(tune, "--repetitions", 3, "runs of each partition, taking turns", "N")
    tune.add_argument("--apply", action="store_true", help="keep the times for --pp-layer-partition auto")
    tune.add_argument("--output", metavar="FILE", help="write the result as JSON")
    add_engine_flags(tune)
    tune.set_defaults(run=run_tune)


def _add_count(parser: argparse.ArgumentParser, flag: str, default: int, text: str, metavar: str) -> None:
    parser.add_argument(flag, type=int, default=default, metavar=metavar, help=f"{text} (default: {default})")


def run_tune(args: argparse.Namespace, open_llm: OpenLLM = open_llm) -> int:
    config, checkpoint = _checked(args)
    from stageline.engine.tuning import DecodeLoad, advice_on, as_profile, run_load

    load = DecodeLoad(args.concurrency, args.context, args.output_len)
    with ExitStack() as opened:
        first = opened.enter_context(open_llm(config))
        load.check(config, first.max_model_len)
        trial, proposal = _measure_items(first, checkpoint, load, args.repetitions)
        print(format_items(proposal))
        trials = [trial]
        if proposal.counts == trial.counts:
            print(f"\n{counts_text(trial.counts)} is the best partition there is")
            trial.runs += [run_load(first, load) for _ in range(args.repetitions)]
        else:
            trials.append(_compare(opened, first, config, trial, proposal, load, args.repetitions, open_llm))
        print(f"\n{format_trials(trials, _predicted(trials, proposal))}")
        for line in advice_on(trials[-1], load, first.kv_plan if len(trials) == 1 else None):
            print(line)
    is_written = _write_result(args.output, trials, proposal)
    is_kept = _keep(as_profile(proposal, config, checkpoint)) if args.apply else True
    return 0 if is_written and is_kept else 1


def _write_result(path: str | None, trials: Sequence[Trial], proposal: Proposal) -> bool:
    if path is None:
        return True
    result = msgspec.json.encode(trials_as_json(trials, _predicted(trials, proposal), proposal))
    if not written("--output", path, lambda: Path(path).write_bytes(msgspec.json.format(result) + b"\n")):
        return False
    print(f"result: {path}")
    return True


def _keep(profile: Profile) -> bool:
    path = profile.key.path
    if not written("--apply: the profile", str(path), lambda: save_profile(profile)):
        return False
    print(f"profile: {path}; --pp-layer-partition auto uses it from now on")
    return True


def _checked(args: argparse.Namespace) -> tuple[EngineConfig, Checkpoint]:
    """What to measure first: the partition asked for, or the default one."""
    for name in ("concurrency", "context", "output_len", "repetitions"):
        lowest = 2 if name in ("context", "output_len") else 1
        if getattr(args, name) < lowest:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {lowest}")
    check_can_write("--output", args.output)
    config = engine_config_from_args(args)
    num_stages = config.pipeline_parallel_size
    if num_stages < 2:
        raise ConfigError(f"-pp is {num_stages}: one stage holds all layers anyway; tune at least 2 stages")
    if config.distributed_executor_backend == "in_process":
        raise ConfigError(
            "--distributed-executor-backend is in_process: stages of one process take turns, whatever the partition; "
            "tune with multi_process"
        )
    if args.concurrency < num_stages:
        raise ConfigError(
            f"--concurrency is {args.concurrency} for {num_stages} stages; fewer requests than stages leave stages "
            f"idle: give at least {num_stages}"
        )
    checkpoint = open_checkpoint(config.model)
    num_layers, asked = checkpoint.spec.num_layers, config.pp_layer_partition
    if asked is None or asked.strip() in AUTO_PARTITIONS:
        counts = default_layer_counts(num_layers, num_stages)
    else:
        counts = parse_layer_counts(asked, num_layers, num_stages, "--pp-layer-partition")
    # Decodes are what is measured: no request may be over before the last prompt is computed.
    return dataclasses.replace(
        config, pp_layer_partition=counts_text(counts), max_decode_slowdown=math.inf
    ), checkpoint


def _measure_items(
    llm: LLM, checkpoint: Checkpoint, load: DecodeLoad, num_runs: int
) -> tuple[Trial, Proposal]:
    from stageline.engine.tuning import Trial, propose, run_load

    counts = tuple(len(stage.layers) for stage in llm.partition)
    _say(f"timing the items of {counts_text(counts)} under {load.num_requests} requests")
    run_load(llm, load)
    llm.item_times()
    for _ in range(min(2, num_runs)):
        run_load(llm, load)
    return Trial(counts), propose(llm, checkpoint, llm.item_times(), load.context_tokens)


def _compare(
    opened: ExitStack,
    first: LLM,
    config: EngineConfig,
    trial: Trial,
    proposal: Proposal,
    load: DecodeLoad,
    num_runs: int,
    open_llm: OpenLLM,
) -> Trial:
    """Run both partitions, in turn if memory allows, else one after the other. Returns: the proposal's trial."""
    from stageline.engine.tuning import Trial, has_room_for_another, run_load

    takes_turns = has_room_for_another(first)
    proposed = Trial(proposal.counts)
    if not takes_turns:
        _say("both do not fit into memory at once: they run one after the other")
        trial.runs += [run_load(first, load) for _ in range(num_runs)]
        first.close()
    _say(f"starting the proposal, {counts_text(proposal.counts)}")
    second = opened.enter_context(
        open_llm(dataclasses.replace(config, pp_layer_partition=counts_text(proposal.counts)))
    )
    run_load(second, load)
    for number in range(num_runs):
        _say(f"run {number + 1} of {num_runs}")
        if takes_turns:
            trial.runs.append(run_load(first, load))
        proposed.runs.append(run_load(second, load))
    return proposed


def _predicted(trials: Sequence[Trial], proposal: Proposal) -> list[tuple[float, ...]]:
    return [stage_times_s(proposal.costs.items, proposal.rooms, trial.counts) for trial in trials]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
