"""A chosen layout as what to type on every machine, and as a file.

One idea: replicas that lie in one machine are one command, with one port (`-dp`). Of others, each is a pipeline of its
own, with a head that serves the API; whoever has several puts a load balancer in front of their ports.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stageline.config.cluster_config import DEFAULT_CLUSTER_PORT
from stageline.config.engine_config import EngineConfig
from stageline.config.plan_config import PlanConfig
from stageline.planner.cluster import Cluster
from stageline.planner.layouts import LayoutPlan
from stageline.planner.units import Unit

_FIRST_API_PORT = 8000
KEY_FILE = "cluster.key"
_PORTS_PER_REPLICA = 100


class NodeCommand(msgspec.Struct, frozen=True):
    """What one machine runs for one replica.

    Args:
        address: the machine's.
        layers: first and one past the last that it runs.
    """

    replica: int
    address: str
    layers: tuple[int, int]
    command: str


@dataclass(frozen=True)
class _NodeShare:
    """A node's stages of a replica: `first` and `end` are stage indices."""

    node: int
    units: tuple[Unit, ...]
    first: int
    end: int


def serve_commands(plan: LayoutPlan, model: str, cluster: Cluster, config: PlanConfig) -> list[NodeCommand]:
    """One line per node and replica, heads first within a replica; one line for replicas in one node."""
    if len(plan.replicas) > 1 and len({unit.nodes for replica in plan.replicas for unit in replica}) == 1:
        return [_replicas_in_one_node(plan, model, cluster, config)]
    commands = []
    for index, replica in enumerate(plan.replicas):
        shares = _shares(replica)
        head = cluster.nodes[shares[0].node].address
        ends = [0]
        for count in plan.placement.layer_counts:
            ends.append(ends[-1] + count)
        for rank, share in enumerate(shares):
            words = [*_devices(share, cluster), "stageline", "serve", model, *_shape(plan)]
            if len(shares) > 1:
                words += _place(rank, share, len(shares), head, index)
            words += [*_threads(replica), *_limits(plan, config)]
            if rank == 0:
                words += ["--port", str(_FIRST_API_PORT + index)]
            commands.append(
                NodeCommand(
                    replica=index,
                    address=cluster.nodes[share.node].address,
                    layers=(ends[share.first], ends[share.end]),
                    command=_typed(words),
                )
            )
    return commands


def _replicas_in_one_node(plan: LayoutPlan, model: str, cluster: Cluster, config: PlanConfig) -> NodeCommand:
    units = tuple(unit for replica in plan.replicas for unit in replica)
    share = _NodeShare(units[0].nodes[0], units, 0, plan.layout.pipeline_parallel_size)
    words = [*_devices(share, cluster), "stageline", "serve", model, *_shape(plan), "-dp", str(len(plan.replicas))]
    words += [*_threads(units), *_limits(plan, config), "--port", str(_FIRST_API_PORT)]
    return NodeCommand(
        replica=0,
        address=cluster.nodes[share.node].address,
        layers=(0, sum(plan.placement.layer_counts)),
        command=_typed(words),
    )


def _typed(words: Sequence[str]) -> str:
    return " ".join(word if _is_assignment(word) else shlex.quote(word) for word in words)


def _is_assignment(word: str) -> bool:
    return word.startswith("CUDA_VISIBLE_DEVICES=")


def _shares(replica: Sequence[Unit]) -> list[_NodeShare]:
    """The nodes of a replica in the order of its stages. A stage over several nodes is a share of each."""
    shares: list[_NodeShare] = []
    for stage, unit in enumerate(replica):
        for node in unit.nodes:
            if shares and shares[-1].node == node and len(unit.nodes) == 1:
                last = shares[-1]
                shares[-1] = _NodeShare(node, (*last.units, unit), last.first, stage + 1)
            else:
                shares.append(_NodeShare(node, (unit,), stage, stage + 1))
    return shares


def _devices(share: _NodeShare, cluster: Cluster) -> list[str]:
    """Which of a node's accelerators, where not all are used."""
    node = cluster.nodes[share.node]
    if node.device.kind == "cpu" or len(share.units[0].nodes) > 1:
        return []
    used = [unit.first_device + number for unit in share.units for number in range(unit.where.num_devices)]
    if len(used) == node.num_devices:
        return []
    return [f"CUDA_VISIBLE_DEVICES={','.join(map(str, sorted(used)))}"]


def _shape(plan: LayoutPlan) -> list[str]:
    layout = plan.layout
    words = ["-tp", str(layout.tensor_parallel_size), "-pp", str(layout.pipeline_parallel_size)]
    if layout.deals_experts:
        words.append("--enable-expert-parallel")
    if layout.pipeline_parallel_size > 1:
        words += ["--pp-layer-partition", ",".join(map(str, plan.placement.layer_counts))]
    return words


def _place(rank: int, share: _NodeShare, num_nodes: int, head: str, replica: int) -> list[str]:
    port = DEFAULT_CLUSTER_PORT + _PORTS_PER_REPLICA * replica
    words = ["--nnodes", str(num_nodes), "--node-rank", str(rank), "--master-addr", head, "--master-port", str(port)]
    words += ["--cluster-key-file", KEY_FILE]
    if len(share.units[0].nodes) == 1:
        words += ["--stages", str(share.end - share.first)]
    return words + (["--headless"] if rank else [])


def _threads(replica: Sequence[Unit]) -> list[str]:
    """A stage on a CPU has a thread per core; the same number on all machines, for the head's counts."""
    cores = [unit.where.device.num_cores for unit in replica if unit.where.device.kind == "cpu"]
    return ["--threads-per-stage", str(min(cores))] if cores and min(cores) > 1 else []


def _limits(plan: LayoutPlan, config: PlanConfig) -> list[str]:
    decode = plan.decode
    words = ["--max-model-len", str(config.context_tokens), "--max-num-seqs", str(decode.num_requests)]
    budget = min(max(plan.batched_tokens, plan.prompt.chunk_tokens, decode.rows), config.max_num_batched_tokens)
    words += ["--max-num-batched-tokens", str(budget), "--kv-cache-memory", _kv_cache_memory(plan, config)]
    if decode.num_microbatches > plan.layout.pipeline_parallel_size > 1:
        words += ["--max-microbatches-in-flight", str(decode.num_microbatches)]
    return words


def _kv_cache_memory(plan: LayoutPlan, config: PlanConfig) -> str:
    """Of each stage with all its ranks: what the requests can use, as far as the plan has room for it."""
    block_size = EngineConfig.block_size
    num_tokens = plan.decode.num_requests * -(-config.context_tokens // block_size) * block_size
    sizes = [
        min(stage.kv_room_bytes, num_tokens * stage.kv_bytes_per_token) * where.num_devices
        for stage, where in zip(plan.capacity.stages, plan.placement.stages, strict=True)
    ]
    texts = [f"{math.ceil(size / 2**20)}MiB" for size in sizes]
    return texts[0] if len(set(texts)) == 1 else ",".join(texts)


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    """A plan as YAML.

    Args:
        enable_expert_parallel: the ranks of a stage have whole experts each.
        layer_counts: of each stage.
        tpot_ms: of decoding alone; `ttft_ms` of a prompt alone.
        tokens_per_s: output of all replicas, prompts' share taken off.
        kv_requests: of the planned length that fit at once, all replicas together.
    """

    model: str
    cluster: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    enable_expert_parallel: bool
    layer_counts: tuple[int, ...]
    microbatches_in_flight: int
    prefill_chunk_tokens: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    tpot_ms: float
    ttft_ms: float
    tokens_per_s: float
    kv_requests: int
    nodes: list[NodeCommand]


def plan_file(plan: LayoutPlan, model: str, cluster: Cluster, config: PlanConfig) -> bytes:
    """The plan as YAML, with the command of every node."""
    layout = plan.layout
    return msgspec.yaml.encode(
        PlanFile(
            model=model,
            cluster=str(cluster),
            tensor_parallel_size=layout.tensor_parallel_size,
            pipeline_parallel_size=layout.pipeline_parallel_size,
            data_parallel_size=layout.data_parallel_size,
            enable_expert_parallel=layout.deals_experts,
            layer_counts=plan.placement.layer_counts,
            microbatches_in_flight=plan.decode.num_microbatches,
            prefill_chunk_tokens=plan.prompt.chunk_tokens,
            concurrency=config.concurrency,
            prompt_tokens=config.prompt_tokens,
            output_tokens=config.output_tokens,
            tpot_ms=round(plan.tpot_s * 1e3, 3),
            ttft_ms=round(plan.prompt.ttft_s * 1e3, 3),
            tokens_per_s=round(plan.tokens_per_s, 1),
            kv_requests=plan.can_run,
            nodes=serve_commands(plan, model, cluster, config),
        )
    )
