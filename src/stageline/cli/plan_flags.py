"""Refuses flags of `stageline plan` that what was asked for has no use for: none is ignored in silence.

One idea: every flag is in the row of each use that reads it. A flag that differs from its default and stands in no row
of what was asked for is refused, with the uses that would read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping

from stageline.cli.workload_flags import TRACES
from stageline.config.plan_config import PlanConfig
from stageline.errors import ConfigError

_GUESSES = frozenset({"speculate_tokens", "speculate_acceptance"})
_SETTINGS = frozenset(field.name for field in dataclasses.fields(PlanConfig))
_REQUESTS = frozenset(
    {"dataset_name", "dataset_path", "num_prompts", "range_ratio", "num_prefixes", "prefix_len", "seed", "request_rate",
     "burstiness", "max_concurrency", "time_scale"}
)  # fmt: skip
_SIMULATED = frozenset({"model", "simulate", "trace_out", "save"}) | _REQUESTS
_OF_A_HOST = frozenset({"concurrency", "prompt_tokens", "output_tokens", "pipeline_parallel_size"})
_OF_A_HOST |= {"max_num_batched_tokens"}

LAYOUTS, TABLE, LIST, CALIBRATION = "MODEL --cluster FILE", "--table", "--list", "--calibrate"
HOST, CLUSTER = "--simulate on this host", "--simulate --cluster FILE"
USES: Mapping[str, frozenset[str]] = {
    LAYOUTS: _SETTINGS | {"model", "cluster", "top", "yaml", "pareto"},
    TABLE: frozenset({"table"}),
    LIST: frozenset({"list"}),
    CALIBRATION: frozenset({"model", "calibrate"}),
    HOST: _SIMULATED | _OF_A_HOST,
    CLUSTER: _SIMULATED | (_SETTINGS - _GUESSES) | {"cluster"},
}
"""What reads which flags, by the names of the parsed values."""


def check_all_used(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Args: parser: that made them, for their defaults. Raises: ConfigError naming what would be ignored."""
    known = frozenset().union(*USES.values())
    given = {name for name, value in vars(args).items() if name in known and value != parser.get_default(name)}
    uses = _uses(args)
    unused = given.difference(*(USES[use] for use in uses))
    if HOST in uses:
        # Its stages are one process each, and it is one pipeline: whoever says so is right.
        unused -= {name for name in _SHARES if getattr(args, name) == 1}
    if unused:
        raise ConfigError(_refusal(sorted(unused), " ".join(uses)))
    if args.simulate:
        _check_requests(args, given, is_host=HOST in uses)


_SHARES = ("tensor_parallel_size", "data_parallel_size")


def _uses(args: argparse.Namespace) -> list[str]:
    """What was asked for; a calibration and a simulation may be asked for together."""
    found = [CALIBRATION] if args.calibrate else []
    if args.simulate:
        return [*found, HOST if args.cluster is None else CLUSTER]
    if found:
        return found
    if args.list:
        return [LIST]
    return [TABLE if args.table is not None else LAYOUTS]


def _refusal(unused: list[str], what: str) -> str:
    flags = " and ".join(map(_flag, unused))
    does, them = ("does", "it") if len(unused) == 1 else ("do", "them")
    readers = [use for use, names in USES.items() if names.issuperset(unused)]
    instead = f", or use {'it' if len(unused) == 1 else 'them'} with {' or '.join(readers)}" if readers else ""
    why = ""
    if what.endswith(HOST) and set(unused) & set(_SHARES):
        why = " (a host is measured as one pipeline whose stages are one process each)"
    return f"{flags} {does} nothing with {what}{why}; leave {them} out{instead}"


def _flag(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def _check_requests(args: argparse.Namespace, given: set[str], is_host: bool) -> None:
    """Flags of the requests that requests of this kind do not ask. Raises: ConfigError."""
    kind, is_trace = args.dataset_name, args.dataset_name in TRACES
    arrives = args.request_rate is not None and math.isfinite(args.request_rate)
    is_random = kind in ("random", "prefix")
    is_drawn = is_random or (kind == "sharegpt" and args.dataset_path is None)
    own_lengths = f"{kind} has lengths of its own"
    # Each with whether it is used, and why not.
    rules = [
        ("range_ratio", is_random, own_lengths),
        ("num_prefixes", kind == "prefix", "it is of --dataset-name prefix"),
        ("prefix_len", kind == "prefix", "it is of --dataset-name prefix"),
        ("time_scale", is_trace and not arrives, "it scales a trace's times where no --request-rate replaces them"),
        ("burstiness", arrives, "it is of the gaps of a finite --request-rate"),
        ("seed", is_drawn or arrives, "nothing is drawn"),
        ("request_rate", arrives or not is_trace, "a trace has times of its own; see --time-scale"),
        ("prompt_tokens", is_random or not is_host, own_lengths),
        ("output_tokens", is_random or not is_host, own_lengths),
    ]
    for name, is_used, reason in rules:
        if name in given and not is_used:
            raise ConfigError(f"{_flag(name)} does nothing here: {reason}; leave it out")
