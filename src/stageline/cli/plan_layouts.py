"""What `stageline plan` does: ranks layouts, prints the table of decode layouts and the names that are known."""

from __future__ import annotations

import argparse
from pathlib import Path

from stageline.cli.opening import check_can_write, written
from stageline.config.flags import plan_config_from_args
from stageline.config.plan_config import KV_DTYPES, PlanConfig
from stageline.cost.model_costs import BYTES_PER_WEIGHT, WeightFormat, model_costs
from stageline.errors import ConfigError
from stageline.planner.advice import advise_speculation
from stageline.planner.advisor import advise
from stageline.planner.cluster import Cluster, read_cluster
from stageline.planner.commands import KEY_FILE, plan_file, serve_commands
from stageline.planner.decode_table import format_table, preset, table_rows
from stageline.planner.known_models import KnownModel, find_model
from stageline.planner.pareto import check_can_draw, write_pareto
from stageline.planner.report import (
    format_advice,
    format_commands,
    format_known,
    format_layouts,
    format_model,
    format_stages,
)
from stageline.planner.search import SearchResult, search


def print_known() -> int:
    print(format_known())
    return 0


def print_table(name: str) -> int:
    """Raises: ConfigError if there is no such table."""
    chosen = preset(name)
    print(f"{chosen.name}: {chosen.summary}\n{format_table(table_rows(chosen))}")
    return 0


def run(args: argparse.Namespace) -> int:
    """Rank the layouts of a model on a cluster. Raises: ConfigError."""
    config = plan_config_from_args(args)
    _check(args, config)
    model, cluster = find_model(args.model), read_cluster(args.cluster)
    weights = model.weights if config.weights == "auto" else WeightFormat(config.weights, config.weights)
    model = KnownModel(model.name, model.spec, weights, model.source)
    _check_length(model, config)
    costs = model_costs(model.spec, weights, KV_DTYPES[config.kv_cache_dtype])
    result = search(costs, cluster, config)
    commands = serve_commands(result.best, model.name, cluster, config)
    guesses = [advise_speculation(result.best.decode.ring, config)] if config.speculate_tokens else []
    sections = (
        format_model(model, cluster, config),
        format_layouts(result, args.top, any(node.device.price_per_hour for node in cluster.nodes)),
        f"best: {result.best.layout}\n{format_stages(result.best, cluster, config)}",
        f"advice:\n{format_advice([*advise(costs, cluster, config, result), *guesses])}",
        f"to start it:\n{_notes(result, weights, config)}{format_commands(commands)}",
    )
    print("\n\n".join(sections))
    return 0 if _write_files(args, result, model, cluster, config) else 1


def _check(args: argparse.Namespace, config: PlanConfig) -> None:
    if args.model is None or args.cluster is None:
        raise ConfigError("give a model and --cluster FILE, or --table, or --list (see stageline plan --help)")
    if config.speculate_acceptance != PlanConfig.speculate_acceptance and not config.speculate_tokens:
        raise ConfigError("--speculate-acceptance is of the guesses of --speculate-tokens; give that too")
    if args.top < 1:
        raise ConfigError(f"--top is {args.top}; it must be at least 1")
    for flag in ("yaml", "pareto"):
        check_can_write(f"--{flag}", getattr(args, flag))
    if args.pareto is not None:
        check_can_draw("--pareto")


def _check_length(model: KnownModel, config: PlanConfig) -> None:
    longest = model.spec.max_position_embeddings
    if config.context_tokens > longest:
        raise ConfigError(
            f"--prompt-tokens {config.prompt_tokens} and --output-tokens {config.output_tokens} are "
            f"{config.context_tokens:,} tokens, but {model.name} takes at most {longest:,}"
        )


def _notes(result: SearchResult, weights: WeightFormat, config: PlanConfig) -> str:
    """What the commands do not say."""
    units = [unit for replica in result.best.replicas for unit in replica]
    is_on_cpus = all(unit.where.device.kind == "cpu" for unit in units)
    notes = ""
    if any(len({index for unit in replica for index in unit.nodes}) > 1 for replica in result.best.replicas):
        notes += f"# once, and copied to every machine: stageline key new --out {KEY_FILE}\n"
    if (num_nodes := max(len(unit.nodes) for unit in units)) > 1:
        most = result.best.layout.tensor_parallel_size // num_nodes
        notes += f"# a stage is planned over {num_nodes} machines, but the engine keeps its ranks on one: "
        notes += f"plan with -tp {most}\n"
    if result.best.layout.tensor_parallel_size > 1 and not is_on_cpus:
        notes += "# -tp above 1 has been measured on CPUs only; with -tp 1 nothing is shared\n"
    small = [name for name in dict.fromkeys((weights.dense, weights.experts)) if BYTES_PER_WEIGHT[name] < 2]
    if small:
        way_out = "" if not is_on_cpus else " unless --quantization int8 is given and can keep them"
        notes += f"# weights are planned in {' and '.join(small)}, but the engine makes them 16 bits when it loads them"
        notes += f"{way_out}; --weights bf16 plans that\n"
    if KV_DTYPES[config.kv_cache_dtype] < 2:
        notes += f"# the KV cache is planned in {config.kv_cache_dtype}, but the engine keeps it in its compute dtype\n"
    return notes


def _write_files(
    args: argparse.Namespace, result: SearchResult, model: KnownModel, cluster: Cluster, config: PlanConfig
) -> bool:
    is_all_written = True
    if args.yaml is not None:
        text = plan_file(result.best, model.name, cluster, config)
        is_all_written &= written("--yaml", args.yaml, lambda: Path(args.yaml).write_bytes(text))
    if args.pareto is not None:
        load = f"{config.prompt_tokens:,} + {config.output_tokens:,} tokens"
        title = f"{model.name} on {cluster}\n{load}; at the points: layout, requests"
        is_all_written &= written("--pareto", args.pareto, lambda: write_pareto(args.pareto, result, config, title))
    return is_all_written
