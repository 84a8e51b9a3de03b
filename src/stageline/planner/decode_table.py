"""A table of layouts on H100 nodes, from stated assumptions: the planner's model with everything but the table's
assumptions left out, so that anybody can check it by hand.

One idea: the table is a preset, not a program. It describes a device, two links and a model whose weights are spread
evenly, and asks the general model for the pace of each layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from stageline.cost.hardware import Device, Link
from stageline.cost.model_costs import ItemShape, ModelCosts
from stageline.cost.placement import DecodePace, Placement, decode_pace
from stageline.cost.roofline import StageDevices
from stageline.errors import ConfigError
from stageline.pipeline.partition import default_layer_counts

DEVICES_PER_NODE = 8
CONTEXT_TOKENS = 4096
LAYOUTS = ((8, 1), (4, 2), (2, 4), (16, 1), (8, 2))
CONCURRENCIES = (1, 64)

_NUM_LAYERS, _HIDDEN_SIZE, _WEIGHT_BYTES, _KV_BYTES_PER_TOKEN, _KV_SHARDS = 80, 8192, 141.2e9, 320 * 1024, 8
_LAYER = ItemShape(
    num_dense=_WEIGHT_BYTES / _NUM_LAYERS / 2,
    kv_bytes_per_token=_KV_BYTES_PER_TOKEN / _NUM_LAYERS,
    max_kv_shards=_KV_SHARDS,
    num_all_reduces=2,
)
_MODEL = ModelCosts(
    # The ends are part of the layers' weights here.
    embedding=ItemShape(),
    layers=(_LAYER,) * _NUM_LAYERS,
    head=ItemShape(),
    shares_head=False,
    hidden_bytes=_HIDDEN_SIZE * 2.0,
    num_heads=64,
    num_kv_heads=_KV_SHARDS,
)
_ASSUMED = "an assumption of the table"
_DEVICE = Device(
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    flops_per_s={"bf16": float("inf")},
    memory_efficiency=1.0,
    microbatch_overhead_s=0.0,
    source=_ASSUMED,
)
_link = partial(Link, source=_ASSUMED, latency_source=_ASSUMED)
_IN_NODE = _link(bytes_per_s=450e9, latency_s=10e-6, all_reduce_latency_s=10e-6)
_BETWEEN_NODES = _link(bytes_per_s=50e9, latency_s=30e-6, all_reduce_latency_s=30e-6)


@dataclass(frozen=True)
class Preset:
    """Which assumptions a table makes.

    Args:
        tensors_per_hop: 2 where hidden states and residual cross a boundary one by one, 1 where they are summed first.
    """

    name: str
    summary: str
    tensors_per_hop: int


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("two-tensor-hop", "hidden states and residual cross a boundary, as in peers", 2),
        Preset("one-tensor-hop", "their sum crosses, as in this engine", 1),
    )
}


@dataclass(frozen=True)
class TableRow:
    """One layout at one concurrency."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_requests: int
    pace: DecodePace

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def preset(name: str) -> Preset:
    """Raises: ConfigError naming those there are."""
    if name not in PRESETS:
        raise ConfigError(f"--table {name!r} is not known; known are {', '.join(PRESETS)}")
    return PRESETS[name]


def table_rows(preset: Preset) -> list[TableRow]:
    """All layouts with one request, then with many."""
    return [
        TableRow(tp, pp, num_requests, decode_pace(_placement(tp, pp, preset), num_requests, CONTEXT_TOKENS, pp))
        for num_requests in CONCURRENCIES
        for tp, pp in LAYOUTS
    ]


def _placement(tensor_parallel_size: int, pipeline_parallel_size: int, preset: Preset) -> Placement:
    """All-reduces are on the network when a stage is larger than a node, hops when the pipeline is."""
    is_stage_in_node = tensor_parallel_size <= DEVICES_PER_NODE
    is_pipeline_in_node = tensor_parallel_size * pipeline_parallel_size <= DEVICES_PER_NODE
    stage = StageDevices(_DEVICE, tensor_parallel_size, _IN_NODE if is_stage_in_node else _BETWEEN_NODES)
    return Placement(
        model=_MODEL,
        layer_counts=default_layer_counts(_NUM_LAYERS, pipeline_parallel_size),
        stages=(stage,) * pipeline_parallel_size,
        links=(_IN_NODE if is_pipeline_in_node else _BETWEEN_NODES,) * (pipeline_parallel_size - 1),
        tensors_per_hop=preset.tensors_per_hop,
    )


def format_table(rows: Iterable[TableRow]) -> str:
    """The rows as text; headers are as in published tables of this kind."""
    lines = ["TPxPP  GPUs  Conc  TPOT ms  Token/s  Token/s/GPU"]
    for row in rows:
        name = f"{row.tensor_parallel_size}x{row.pipeline_parallel_size}"
        tokens_per_s = row.pace.tokens_per_s
        lines.append(
            f"{name:>5}  {row.num_devices:4}  {row.num_requests:4}  {row.pace.tpot_s * 1e3:7.2f}  {tokens_per_s:7.0f}  "
            f"{tokens_per_s / row.num_devices:11.0f}"
        )
    return "\n".join(lines)
