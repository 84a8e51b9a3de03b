"""All layouts of a model on a cluster, judged and ranked, with the reason each loser lost.

One idea: a layout is tried, not excluded by a rule of thumb; the reasons come from comparing what its time is made of
with the winner's. Where devices share layers that have experts, a layout is tried with parts of experts and with whole
ones, and stands in the ranking as the better of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isinf

from stageline.config.plan_config import PlanConfig
from stageline.cost.model_costs import ModelCosts
from stageline.cost.stage_time import MicrobatchShape
from stageline.errors import ConfigError
from stageline.planner.cluster import Cluster
from stageline.planner.layouts import Impossible, Layout, LayoutPlan, judge
from stageline.planner.units import Unit, sizes_to_try, units_of, why_not_sharded

_AS_GOOD, _AS_GOOD_FRACTION = "as good", 0.01


@dataclass(frozen=True)
class RankedLayout:
    """A layout in its place.

    Args:
        reason: why it is not the first; empty for the first.
        other: the same with experts shared the other way, which is no better or cannot be; None if there is none.
        why_not_other: in words; empty if there is none.
    """

    plan: LayoutPlan
    reason: str
    other: LayoutPlan | Impossible | None = None
    why_not_other: str = ""


@dataclass(frozen=True)
class SearchResult:
    """Args:
    ranked: best first; at least one.
    impossible: layouts that cannot be.
    """

    ranked: tuple[RankedLayout, ...]
    impossible: tuple[Impossible, ...]

    @property
    def best(self) -> LayoutPlan:
        return self.ranked[0].plan


def search(model: ModelCosts, cluster: Cluster, config: PlanConfig) -> SearchResult:
    """Judge every layout that the flags leave open.

    Raises: ConfigError if none can be, with the reason of each; or if the objective cannot be judged.
    """
    if config.objective == "cost" and not any(node.device.price_per_hour for node in cluster.nodes):
        raise ConfigError("--objective cost needs a price_per_hour for the devices of the cluster file")
    possible: list[tuple[LayoutPlan, LayoutPlan | Impossible | None]] = []
    impossible: list[Impossible] = []
    for judged in _all_judged(model, cluster, config):
        if isinstance(judged.better, Impossible):
            impossible.append(judged.better)
        else:
            possible.append((judged.better, judged.other))
    if not possible:
        reasons = "".join(f"\n  {refused.layout}: {refused.reason}" for refused in impossible[:12])
        raise ConfigError(
            f"no layout works on {cluster}:{reasons}\nuse more or larger devices, --weights of fewer bits, or shorter "
            "requests"
        )
    ranked = sorted(possible, key=lambda pair: _rank(pair[0], config))
    best = ranked[0][0]
    return SearchResult(tuple(_ranked(plan, other, best, config) for plan, other in ranked), tuple(impossible))


@dataclass(frozen=True)
class _Judged:
    """A layout, and the same with experts shared the other way if there is another."""

    better: LayoutPlan | Impossible
    other: LayoutPlan | Impossible | None = None


def _ranked(
    plan: LayoutPlan, other: LayoutPlan | Impossible | None, best: LayoutPlan, config: PlanConfig
) -> RankedLayout:
    reason = "" if plan is best else why_lost(plan, best, config)
    if other is None:
        return RankedLayout(plan, reason)
    why_not = _shortfall(other, plan, config) if isinstance(other, LayoutPlan) else other.reason.partition(";")[0]
    return RankedLayout(plan, reason, other, f"{'EP' if other.layout.deals_experts else 'no EP'}: {why_not}")


def _all_judged(model: ModelCosts, cluster: Cluster, config: PlanConfig) -> Iterator[_Judged]:
    asked = config.tensor_parallel_size
    for size in [asked] if asked is not None else sizes_to_try(cluster):
        layout = Layout(size, config.pipeline_parallel_size or 1, config.data_parallel_size or 1)
        # In parts first: of equal ways the first is taken.
        ways = [_Way(way, why_not_sharded(way, size)) for way in _ways(model, size)]
        if (reason := ways[0].reason) is not None and all(way.reason for way in ways):
            yield _Judged(Impossible(layout, reason))
            continue
        units = units_of(cluster, size)
        if isinstance(units, str):
            yield _Judged(Impossible(layout, units))
            continue
        too_large: set[int] = set()
        for layout in _layouts(size, units, len(model.layers), config):
            if layout.pipeline_parallel_size in too_large:
                continue
            if layout.pipeline_parallel_size * layout.data_parallel_size > len(units):
                yield _Judged(Impossible(layout, _too_few(layout, len(units), cluster)))
            elif layout.pipeline_parallel_size > len(model.layers):
                reason = f"{layout.pipeline_parallel_size} stages for {len(model.layers)} layers; every stage needs one"
                yield _Judged(Impossible(layout, reason))
            else:
                judged = _judged_both_ways(ways, cluster, units, layout, config)
                # What does not fit once does not fit several times.
                if isinstance(judged.better, Impossible):
                    too_large.add(layout.pipeline_parallel_size)
                yield judged


@dataclass(frozen=True)
class _Way:
    """A model with its experts in parts or dealt. `reason`: why devices cannot share it so; None if they can."""

    model: ModelCosts
    reason: str | None


def _ways(model: ModelCosts, size: int) -> tuple[ModelCosts, ...]:
    return (model, model.dealt()) if model.has_experts and size > 1 else (model,)


def _judged_both_ways(
    ways: Sequence[_Way], cluster: Cluster, units: Sequence[Unit], layout: Layout, config: PlanConfig
) -> _Judged:
    """With parts of experts, and with whole ones if there are."""
    found: list[LayoutPlan | Impossible] = []
    for number, way in enumerate(ways):
        shared = replace(layout, deals_experts=number == 1)
        if way.reason is not None:
            found.append(Impossible(shared, way.reason))
        else:
            found.append(_judged_where_best(way.model, cluster, units, shared, config))
    if len(found) == 1:
        return _Judged(found[0])
    first, second = found
    if isinstance(first, Impossible) and isinstance(second, Impossible):
        return _Judged(first)
    return _Judged(second, first) if _is_better(second, first, config) else _Judged(first, second)


def _judged_where_best(
    model: ModelCosts, cluster: Cluster, units: Sequence[Unit], layout: Layout, config: PlanConfig
) -> LayoutPlan | Impossible:
    """On the units that make it quickest; if cost matters, on whichever of some choices is best."""
    found = judge(model, cluster, units, layout, config)
    for some in _cheaper_choices(units) if config.objective == "cost" else ():
        if len(some) >= layout.pipeline_parallel_size * layout.data_parallel_size:
            other = judge(model, cluster, some, layout, config)
            found = other if _is_better(other, found, config) else found
    return found


def _cheaper_choices(units: Sequence[Unit]) -> list[Sequence[Unit]]:
    """Those that have a price, and each kind alone: the quickest units of all may be dear, or have no price."""
    kinds = list(dict.fromkeys(unit.kind for unit in units))
    if len(kinds) == 1:
        return []
    alone = [[unit for unit in units if unit.kind == kind] for kind in kinds]
    return [[unit for unit in units if unit.where.device.price_per_hour], *alone]


def _is_better(plan: LayoutPlan | Impossible, other: LayoutPlan | Impossible, config: PlanConfig) -> bool:
    if isinstance(plan, Impossible) or isinstance(other, Impossible):
        return isinstance(other, Impossible)
    return _rank(plan, config) < _rank(other, config)


def _layouts(size: int, units: Sequence[Unit], num_layers: int, config: PlanConfig) -> Iterator[Layout]:
    """Every number of stages, once and with as many replicas as there can be.

    With every number of replicas if cost matters, or if units differ: as many as are alike may be fewer.
    """
    num_units = len(units)
    tries_all = config.objective == "cost" or len({unit.kind for unit in units}) > 1
    asked_pp, asked_dp = config.pipeline_parallel_size, config.data_parallel_size
    for stages in [asked_pp] if asked_pp is not None else range(1, min(num_units, num_layers) + 1):
        most = max(1, min(num_units // stages, config.concurrency))
        numbers = range(1, most + 1) if tries_all else sorted({1, most})
        for replicas in [asked_dp] if asked_dp is not None else numbers:
            yield Layout(size, stages, replicas)


def _too_few(layout: Layout, num_units: int, cluster: Cluster) -> str:
    wanted = layout.pipeline_parallel_size * layout.data_parallel_size
    size = layout.tensor_parallel_size
    return (
        f"{wanted} stages of {size} device{'s' * (size > 1)} each, but {cluster} has room for {num_units}; use at most "
        f"that many"
    )


def _rank(plan: LayoutPlan, config: PlanConfig) -> tuple[float, ...]:
    """Smaller is better. Layouts that hold all requests and are fast enough come first; of equal ones the smallest."""
    is_too_slow = plan.tokens_per_s < config.min_tokens_per_s
    value = _OBJECTIVES[config.objective](plan)
    # Rounded, so that layouts that are as good as equal are told apart by what else they take.
    return float(plan.num_waiting > 0), float(is_too_slow), float(f"{value:.4g}"), plan.layout.num_devices, plan.tpot_s


_OBJECTIVES: dict[str, Callable[[LayoutPlan], float]] = {
    "throughput": lambda plan: -plan.tokens_per_s,
    "tpot": lambda plan: plan.tpot_s,
    "cost": lambda plan: plan.price_per_million_tokens,
}


def why_lost(plan: LayoutPlan, best: LayoutPlan, config: PlanConfig) -> str:
    """One line: what the layout has less of than the best one, and where its time goes."""
    shortfall = _shortfall(plan, best, config)
    if plan.num_waiting > best.num_waiting or plan.tokens_per_s < config.min_tokens_per_s <= best.tokens_per_s:
        return shortfall
    if 4 * plan.layout.num_devices <= 3 * best.layout.num_devices:
        return f"{shortfall}: uses {plan.layout.num_devices} of the best one's {best.layout.num_devices} devices"
    where = "" if shortfall.startswith(_AS_GOOD) else _where_time_goes(plan, best)
    return f"{shortfall}: {where}" if where else shortfall


def _shortfall(plan: LayoutPlan, best: LayoutPlan, config: PlanConfig) -> str:
    """What the layout has less of than a better one."""
    if plan.num_waiting > best.num_waiting:
        limit = plan.capacity.limiting_stage
        return (
            f"holds {plan.can_run} of {config.concurrency} requests (s{limit} has "
            f"{plan.capacity.stages[limit].kv_room_bytes / 1e9:.1f} GB per device for KV)"
        )
    if plan.tokens_per_s < config.min_tokens_per_s <= best.tokens_per_s:
        return f"{plan.tokens_per_s:,.0f} tokens/s are below the wanted {config.min_tokens_per_s:,.0f}"
    return _difference(plan, best, config)


def _difference(plan: LayoutPlan, best: LayoutPlan, config: PlanConfig) -> str:
    if config.objective == "cost" and isinf(plan.price_per_million_tokens):
        return "a device of it has no price_per_hour"
    value, best_value = _OBJECTIVES[config.objective](plan), _OBJECTIVES[config.objective](best)
    ratio = value / best_value
    if abs(ratio - 1) < _AS_GOOD_FRACTION:
        if plan.layout.num_devices > best.layout.num_devices:
            return f"{_AS_GOOD}, with {plan.layout.num_devices} devices instead of {best.layout.num_devices}"
        return f"{_AS_GOOD} within 1 %"
    if config.objective == "throughput":
        return f"{1 - ratio:.0%} less throughput"
    return f"{ratio - 1:.0%} {'longer TPOT' if config.objective == 'tpot' else 'dearer per token'}"


def _where_time_goes(plan: LayoutPlan, best: LayoutPlan) -> str:
    """The part of the time per token that grew most, per running request of all replicas."""
    mine, theirs = time_parts(plan), time_parts(best)
    name = max(mine, key=lambda part: mine[part] - theirs[part])
    if mine[name] - theirs[name] <= 0:
        return ""
    return f"{name} {mine[name] * 1e3:.2f} ms a cycle, {theirs[name] * 1e3:.2f} in the best"


def time_parts(plan: LayoutPlan) -> dict[str, float]:
    """What a cycle is made of, in seconds for the planned number of requests: they sum to it, prompts' share included.

    Layouts with more replicas do the same in less time each, so cycles compare as they are.
    """
    decode, placement = plan.decode, plan.placement
    rows = decode.rows
    parts = placement.parts(MicrobatchShape(rows, 0, rows, round(rows * _context_of(plan))))
    ring = decode.ring
    return {
        "weights and matrices": sum(part.matrices_s for part in parts),
        "reading the KV cache": sum(part.attention_s for part in parts),
        "all-reduces": sum(part.communication_s for part in parts),
        "fixed costs": sum(part.overhead_s for part in parts) + ring.sampling_s,
        "hops": sum(ring.hops_s) + ring.return_s,
        "waiting for the slowest stage": decode.tpot_s - ring.ring_s,
        "prompts": plan.prompt_share_s,
    }


def _context_of(plan: LayoutPlan) -> float:
    return plan.capacity.context_tokens - plan.output_tokens + plan.output_tokens // 2
