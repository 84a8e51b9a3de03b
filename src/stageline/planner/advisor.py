"""The rules of planner/advice.py applied to a model, a cluster and the layouts that were judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stageline.config.plan_config import PlanConfig
from stageline.cost.communication import all_reduce_s, hop_bytes, hop_s
from stageline.cost.hardware import Link, shipped_hardware
from stageline.cost.model_costs import ModelCosts
from stageline.cost.placement import Placement, best_decode_pace, prompt_pace
from stageline.cost.stage_time import MicrobatchShape
from stageline.errors import ConfigError
from stageline.planner.advice import (
    Advice,
    ExpertShares,
    LinkLoad,
    advise_chunk,
    advise_concurrency,
    advise_experts,
    advise_fit,
    advise_heads,
    advise_kv_heads,
    advise_link_in_node,
    advise_network,
    advise_pipeline_or_sharding,
    advise_replicas,
)
from stageline.planner.cluster import Cluster, Node
from stageline.planner.layouts import WIDEST_PER_STAGE, LayoutPlan
from stageline.planner.search import RankedLayout, SearchResult, search
from stageline.planner.units import can_share

JUDGED_NETWORKS = ("ethernet-1g", "ethernet-2.5g", "ethernet-10g")
_MOST_ROWS = 1 << 16


def advise(model: ModelCosts, cluster: Cluster, config: PlanConfig, result: SearchResult) -> list[Advice]:
    """All that the rules have to say."""
    found = [
        *_of_hardware(model, cluster, config),
        _nodes_on_their_own(model, cluster, config, result),
        *_of_layouts(config, result),
    ]
    return [advice for advice in found if advice is not None]


def _of_hardware(model: ModelCosts, cluster: Cluster, config: PlanConfig) -> Iterator[Advice | None]:
    needed = model.weight_bytes + config.concurrency * model.kv_bytes_per_request(config.context_tokens)
    rooms = [node.num_devices * node.device.room_bytes(config.memory_fraction) for node in cluster.nodes]
    room, node = max(zip(rooms, cluster.nodes, strict=True), key=lambda pair: pair[0])
    num_that_hold = sum(room >= needed for room in rooms)
    yield advise_fit(needed, room, node.num_devices, num_that_hold, len(cluster.nodes), node.link.is_fast)
    ways = (model, model.dealt()) if model.has_experts else (model,)
    able = [size for size in range(1, model.num_heads + 1) if any(can_share(way, size) for way in ways)]
    sizes = {other.num_devices for other in cluster.nodes}
    if cluster.devices_per_node is not None:
        sizes.add(cluster.num_devices)
    for size in sorted(sizes):
        yield advise_heads(model.num_heads, size, able)
    if cluster.devices_per_node is not None:
        yield advise_kv_heads(model.num_kv_heads, cluster.num_devices)
        yield _pipeline_or_sharding(model, cluster, node)
    if node.num_devices > 1:
        yield _link_in_node(model, node)


def _link_in_node(model: ModelCosts, node: Node) -> Advice | None:
    size = model.hidden_bytes
    reduces_s = 2 * len(model.layers) * all_reduce_s(node.link, node.num_devices, size)
    hops_s = (node.num_devices - 1) * hop_s(node.link, size)
    return advise_link_in_node(node.link_name, node.link, node.num_devices, reduces_s, hops_s)


def _pipeline_or_sharding(model: ModelCosts, cluster: Cluster, node: Node) -> Advice | None:
    if cluster.num_devices < 2:
        return None
    num_devices, link = node.num_devices, node.link
    if num_devices < 2:
        num_devices, link = len(cluster.nodes), cluster.network
    weights_s = sum(layer.read_bytes(1) for layer in model.layers) / node.device.reached_bytes_per_s
    reduce_s = all_reduce_s(link, num_devices, model.hidden_bytes)
    return advise_pipeline_or_sharding(len(model.layers), reduce_s, weights_s, num_devices)


def _of_layouts(config: PlanConfig, result: SearchResult) -> Iterator[Advice | None]:
    best = result.best
    yield advise_concurrency(best.decode.ring, best.decode.num_requests)
    yield _experts(result.ranked[0])
    pipelines = [ranked.plan for ranked in result.ranked if ranked.plan.layout.pipeline_parallel_size > 1]
    if pipelines:
        yield _replicas(pipelines[0], result)
        yield _chunk(pipelines[0], config)
        for name in JUDGED_NETWORKS:
            load = network_load(pipelines[0], shipped_hardware().link(name), config)
            yield advise_network(name, load)


def _experts(best: RankedLayout) -> Advice | None:
    plan, other = best.plan, best.other
    if other is None:
        return None
    layout = plan.layout
    layer = next(layer for layer in plan.placement.model.layers if layer.num_experts)
    in_parts, dealt = replace(layer, is_dealt=False), replace(layer, is_dealt=True)
    rows, size = plan.decode.rows, layout.tensor_parallel_size
    shares = ExpertShares(
        num_rows=rows,
        num_devices=size,
        num_experts=layer.num_experts,
        num_hit=layer.num_experts_read(rows),
        worth_in_parts=in_parts.experts_worth(rows, size),
        worth_dealt=dealt.experts_worth(rows, size) if layer.num_experts % size == 0 else 0.0,
        expert_size=layer.expert_size,
        are_parts_blocks=in_parts.keeps_blocks(size),
    )
    name = str(replace(layout, deals_experts=False))
    rate = other.tokens_per_s if isinstance(other, LayoutPlan) else None
    why_not = best.why_not_other.partition(": ")[2]
    return advise_experts(name, layout.deals_experts, plan.tokens_per_s, rate, why_not, shares)


def _replicas(pipeline: LayoutPlan, result: SearchResult) -> Advice | None:
    layout = pipeline.layout
    others = [
        ranked.plan
        for ranked in result.ranked
        if ranked.plan.layout.num_devices == layout.num_devices
        and ranked.plan.layout.data_parallel_size > layout.data_parallel_size
        and not ranked.plan.num_waiting
    ]
    if not others:
        return None
    best = max(others, key=lambda plan: plan.tokens_per_s)
    return advise_replicas(
        str(layout), pipeline.tokens_per_s, str(best.layout), best.tokens_per_s, best.layout.data_parallel_size
    )


def _nodes_on_their_own(
    model: ModelCosts, cluster: Cluster, config: PlanConfig, result: SearchResult
) -> Advice | None:
    """Whether nodes that differ do better apart, with equal shares of the requests; replicas of a layout are alike."""
    best = result.best
    if cluster.devices_per_node is not None:
        return None
    share = replace(
        config,
        concurrency=-(-config.concurrency // len(cluster.nodes)),
        tensor_parallel_size=None,
        pipeline_parallel_size=None,
        data_parallel_size=None,
    )
    rates = []
    for node in cluster.nodes:
        alone = Cluster((replace(node, index=0),), cluster.network_name, cluster.network)
        try:
            plan = search(model, alone, share).best
        except ConfigError:
            continue
        if not plan.num_waiting:
            rates.append(plan.tokens_per_s)
    if len(rates) < len(cluster.nodes):
        return None
    return advise_replicas(
        str(best.layout), best.tokens_per_s, f"each of the {len(rates)} nodes on its own", sum(rates), len(rates)
    )


def _chunk(plan: LayoutPlan, config: PlanConfig) -> Advice | None:
    whole = min(config.prompt_tokens, config.max_num_batched_tokens)
    whole_s = prompt_pace(plan.placement, config.prompt_tokens, whole).ttft_s
    return advise_chunk(config.prompt_tokens, plan.prompt.chunk_tokens, plan.prompt.ttft_s, whole_s)


def network_load(plan: LayoutPlan, link: Link, config: PlanConfig) -> LinkLoad:
    """What a pipeline would lose if all its hops went over this link."""
    placement = replace(plan.placement, links=(link,) * len(plan.placement.links), return_s=link.latency_s)
    free = replace(placement, links=(_FREE,) * len(placement.links), return_s=0.0)
    load = plan.decode.num_requests, config.mean_context_tokens, WIDEST_PER_STAGE * placement.num_stages
    decode = best_decode_pace(placement, *load)
    chunk = plan.prompt.chunk_tokens
    prompt = placement.ring(MicrobatchShape.of_rows([max(0, config.prompt_tokens - chunk)], [chunk]))
    return LinkLoad(
        decode_ring=decode.ring,
        decode_cycle_s=decode.tpot_s,
        free_cycle_s=best_decode_pace(free, *load).tpot_s,
        prompt_hop_s=max(prompt.wires_s),
        prompt_stage_s=max(prompt.stages_s),
        prompt_chunk_tokens=chunk,
        saturating_rows=saturating_rows(placement, config.mean_context_tokens),
    )


_FREE = Link(bytes_per_s=float("inf"), latency_s=0.0, source="no hop at all", latency_source="no hop at all")


def saturating_rows(placement: Placement, context_tokens: int) -> int | None:
    """The fewest requests in a microbatch of decodes whose hop occupies a wire longer than the slowest stage takes.

    None if there is no such number: both grow with the rows, and the stage may grow faster.
    """

    def is_full(rows: int) -> bool:
        times_s = placement.stage_times_s(MicrobatchShape(rows, 0, rows, rows * context_tokens))
        num_bytes = hop_bytes(rows, placement.model.hidden_bytes, placement.tensors_per_hop)
        return any(num_bytes / link.bytes_per_s > max(times_s) for link in placement.links)

    low, high = 0, 1
    while not is_full(high):
        low, high = high, 2 * high
        if high > _MOST_ROWS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_full(middle) else (middle, high)
    return high
