"""A plan as text: the ranked layouts, the best one's stages, advice, and what to type."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from stageline.config.plan_config import PlanConfig
from stageline.cost.capacity import best_layer_move
from stageline.cost.hardware import shipped_hardware
from stageline.planner.advice import Advice
from stageline.planner.cluster import Cluster
from stageline.planner.commands import NodeCommand
from stageline.planner.known_models import KnownModel, find_model, model_names
from stageline.planner.layouts import LayoutPlan
from stageline.planner.search import SearchResult

_GB = 1e9


def format_layouts(result: SearchResult, most: int, has_prices: bool) -> str:
    """The ranked layouts as a table with the reason each lost, then those that cannot be."""
    rows = []
    for number, ranked in enumerate(result.ranked[:most]):
        plan = ranked.plan
        capacity = plan.capacity
        rows.append(
            [
                str(number + 1),
                str(plan.layout),
                str(plan.layout.num_devices),
                _counts(plan.placement.layer_counts),
                f"{max(stage.weight_bytes for stage in capacity.stages) / _GB:.1f}",
                f"{plan.can_run:,}",
                f"{capacity.num_tokens * plan.layout.data_parallel_size:,}",
                f"{plan.decode.num_microbatches} x {plan.decode.rows}",
                f"{plan.tpot_s * 1e3:.2f}",
                f"{plan.tokens_per_s:,.0f}",
                f"{plan.prompt.ttft_s * 1e3:,.0f}",
                *([_price(plan)] if has_prices else []),
                "; ".join(filter(None, (ranked.reason or "the best", ranked.why_not_other))),
            ]
        )
    names = ["", "layout", "devices", "layers per stage", "GB/device", "KV requests", "KV tokens", "in flight"]
    names += ["TPOT ms", "tokens/s", "TTFT ms"]
    table = _table([*names, *(["price/Mtok"] if has_prices else []), "why not"], rows)
    if (left := len(result.ranked) - most) > 0:
        table += f"\n{left} more lost; --top shows more"
    for refused in result.impossible[:most]:
        table += f"\n  {refused.layout}: {refused.reason}"
    if (left := len(result.impossible) - most) > 0:
        table += f"\n  {left} more that cannot be"
    return table


def _price(plan: LayoutPlan) -> str:
    price = plan.price_per_million_tokens
    return f"{price:.2f}" if isfinite(price) else "-"


def _counts(counts: Sequence[int]) -> str:
    """Such as "80", "41,39" or "5x16"."""
    if len(set(counts)) == 1 and len(counts) > 2:
        return f"{counts[0]} each"
    text = ",".join(map(str, counts))
    return text if len(text) <= 24 else f"{min(counts)} to {max(counts)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them; the last two kinds of text are left-aligned, numbers right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    left = {1, 3, len(header) - 1}
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_stages(plan: LayoutPlan, cluster: Cluster, config: PlanConfig) -> str:
    """The stages of the best layout: where they are, what they hold, which one limits, what one layer moved changes."""
    capacity, ring = plan.capacity, plan.decode.ring
    rows = []
    for cut, unit, stage, time_s in zip(
        plan.placement.cut, plan.replicas[0], capacity.stages, ring.stages_s, strict=True
    ):
        node = cluster.nodes[unit.nodes[0]]
        addresses = "+".join(cluster.nodes[index].address for index in unit.nodes)
        rows.append(
            [
                f"s{cut.stage_index}",
                f"{unit.where.num_devices} x {node.device_name} of {addresses}",
                str(len(cut.layers)),
                f"{stage.weight_bytes / _GB:.1f}",
                f"{stage.kv_room_bytes / _GB:.1f}",
                f"{stage.num_tokens:,}",
                f"{stage.num_requests:,}",
                f"{time_s * 1e3:.2f}",
            ]
        )
    names = ["stage", "devices", "layers", "weights GB", "room for KV GB", "KV tokens", "KV requests", "decode ms"]
    lines = [_stages_table(names, rows), _what_limits(plan, config)]
    lines.append(
        f"in flight: {plan.decode.num_microbatches} x {plan.decode.rows} requests; a ring takes "
        f"{ring.ring_s * 1e3:.2f} ms, the slowest stage is s{ring.slowest_stage}"
    )
    if plan.num_waiting:
        lines.append(f"{plan.num_waiting} of the {config.concurrency} requests wait for room in the KV cache")
    return "\n".join(lines)


def _stages_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in [names, *rows]) for column in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [names, *rows]
    )


def _what_limits(plan: LayoutPlan, config: PlanConfig) -> str:
    capacity = plan.capacity
    text = (
        f"s{capacity.limiting_stage} limits the KV cache: {capacity.num_requests:,} requests of "
        f"{capacity.context_tokens:,} tokens"
    )
    move = best_layer_move(
        plan.placement, config.context_tokens, config.memory_fraction, config.max_num_batched_tokens
    )
    if move is None:
        return text
    counts = ",".join(map(str, move.layer_counts))
    return f"{text}; with one layer of it on s{move.to_stage} ({counts}) {move.num_requests:,}"


def format_advice(advice: Sequence[Advice]) -> str:
    return "\n".join(f"- {item.rule}: {item.text}" for item in advice)


def format_commands(commands: Sequence[NodeCommand]) -> str:
    """What to type, machine by machine."""
    return "\n".join(
        f"# {command.address}, layers {command.layers[0]} to {command.layers[1] - 1}"
        f"{f', replica {command.replica}' if commands[-1].replica else ''}\n{command.command}"
        for command in commands
    )


def format_model(model: KnownModel, cluster: Cluster, config: PlanConfig) -> str:
    """What is planned, in two lines."""
    spec = model.spec
    return (
        f"{model.name}: {spec.num_layers} layers, hidden {spec.hidden_size:,}, weights {model.weights}\n"
        f"on {cluster}; {config.concurrency} requests of {config.prompt_tokens:,} + {config.output_tokens:,} tokens"
    )


def format_known() -> str:
    """Names that a plan may use: models, devices and links, with the sources of the latter two's numbers."""
    table = shipped_hardware()
    lines = ["models:", *(f"  {name:18} {find_model(name).name}" for name in model_names()), "", "devices:"]
    for name, device in table.devices.items():
        flops = max(device.flops_per_s, key=lambda key: (key == "bf16", key == "fp16"))
        lines.append(
            f"  {name:18} {device.memory_bytes / _GB:6.0f} GB  {device.memory_bytes_per_s / _GB:7.1f} GB/s  "
            f"{device.flops_per_s[flops] / 1e12:7.1f} TFLOPS {flops}  {device.source}"
        )
    lines += ["", "links:"]
    for name, link in table.links.items():
        lines.append(
            f"  {name:18} {link.bytes_per_s / _GB:8.3f} GB/s  {link.latency_s * 1e6:6.0f} µs  {link.source}; latency: "
            f"{link.latency_source}"
        )
    return "\n".join(lines)
