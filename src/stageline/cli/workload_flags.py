"""Flags that say what is asked of a server, or of a simulated one: the requests and when they come."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

from stageline.errors import ConfigError
from stageline.loadgen import traces, workload
from stageline.loadgen.workload import PlannedRequest

TRACES: dict[str, Callable[[str, int | None], list[PlannedRequest]]] = {
    "azure": traces.read_azure,
    "mooncake": traces.read_mooncake,
    "burstgpt": traces.read_burstgpt,
}
_DATASETS = ("random", "prefix", "sharegpt", *TRACES)
_DEFAULT_NUM_PROMPTS = 100


def add_workload_flags(group: Any, with_lengths: bool = True) -> None:
    """What the requests are. Args: with_lengths: whether `--input-len` and `--output-len` say how long."""
    group.add_argument(
        "--dataset-name",
        choices=_DATASETS,
        default="random",
        help="random: prompts that share nothing; prefix: groups of prompts that begin alike; sharegpt: lengths as in "
        "conversations, or those of --dataset-path; azure, mooncake, burstgpt: traces (default: %(default)s)",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="the trace, or ShareGPT's JSON")
    group.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"requests to send (default: {_DEFAULT_NUM_PROMPTS}; all of a trace)",
    )
    if with_lengths:
        _add_lengths(group)
    group.add_argument(
        "--range-ratio",
        type=float,
        default=0.0,
        metavar="RATIO",
        help="lengths vary evenly by this share of their mean, up and down (default: %(default)s)",
    )
    group.add_argument(
        "--num-prefixes", type=int, default=8, metavar="N", help="groups of prefix prompts (default: %(default)s)"
    )
    group.add_argument(
        "--prefix-len", type=int, default=256, metavar="TOKENS", help="that a group shares (default: %(default)s)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything drawn (default: %(default)s)")


def _add_lengths(group: Any) -> None:
    group.add_argument(
        "--input-len",
        type=int,
        default=128,
        metavar="TOKENS",
        help="of random prompts, and of prefix prompts after their prefix (default: %(default)s)",
    )
    group.add_argument(
        "--output-len", type=int, default=64, metavar="TOKENS", help="of their answers (default: %(default)s)"
    )


def add_arrival_flags(group: Any) -> None:
    """When they come."""
    group.add_argument(
        "--request-rate", type=float, metavar="R", help="requests per second; inf sends all at once (default)"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="SHAPE",
        help="shape of the gamma-distributed gaps: 1 is a Poisson process, below 1 comes in bursts, inf is a constant "
        "rate (default: %(default)s)",
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests under way (default: any number)")
    group.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="a trace's times are multiplied by it: 0.5 comes twice as fast (default: %(default)s)",
    )


def add_simulation_flags(parser: argparse.ArgumentParser) -> None:
    """Of `stageline plan`: what is simulated, and where it is written to."""
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--simulate",
        action="store_true",
        help="run requests through the real scheduler on simulated stages: the best layout of --cluster, or this host "
        "as --calibrate measured it; lengths are --prompt-tokens and --output-tokens, and --concurrency requests are "
        "always under way unless --request-rate or a trace says when they come",
    )
    add_workload_flags(group, with_lengths=False)
    add_arrival_flags(group)
    group.add_argument("--trace-out", metavar="FILE", help="write a Chrome trace of all stages, for ui.perfetto.dev")
    group.add_argument("--save", metavar="FILE", help="write the spans as JSON, for stageline timeline")


def check_workload(args: argparse.Namespace) -> None:
    """Raises: ConfigError for flags that make no workload."""
    for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "prefix_len", "max_concurrency"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    for name in ("request_rate", "burstiness", "time_scale"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if not 0 <= args.range_ratio < 1:
        raise ConfigError(f"--range-ratio is {args.range_ratio}; it must be at least 0 and below 1")
    if args.dataset_name in TRACES and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} reads a file; give --dataset-path")
    if args.dataset_path is not None and args.dataset_name not in (*TRACES, "sharegpt"):
        raise ConfigError(f"--dataset-name {args.dataset_name} reads no file; leave --dataset-path out")


def planned_requests(args: argparse.Namespace) -> list[PlannedRequest]:
    """What the flags ask for; a trace with the times it has. Raises: ConfigError if a file cannot be read."""
    generator = random.Random(args.seed)
    num_prompts = args.num_prompts or _DEFAULT_NUM_PROMPTS
    lengths = (workload.uniform(args.input_len, args.range_ratio), workload.uniform(args.output_len, args.range_ratio))
    match args.dataset_name:
        case "random":
            return workload.draw_random(num_prompts, *lengths, generator)
        case "prefix":
            return workload.draw_sharing(num_prompts, args.num_prefixes, args.prefix_len, *lengths, generator)
        case "sharegpt" if args.dataset_path is None:
            return workload.draw_like_sharegpt(num_prompts, generator)
        case "sharegpt":
            return traces.read_sharegpt(args.dataset_path, num_prompts)
        case trace:
            return workload.scaled(TRACES[trace](args.dataset_path, args.num_prompts), args.time_scale)
