"""Where stages can be: a cluster's devices as units of a tensor parallel size, and what makes a size impossible.

One idea: a unit lies in one node where it can; one larger than a node takes whole nodes that are alike, and then its
all-reduces are on the network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageline.cost.hardware import Link
from stageline.cost.model_costs import ModelCosts
from stageline.cost.roofline import StageDevices
from stageline.planner.cluster import Cluster, Node


@dataclass(frozen=True)
class Unit:
    """The devices of one stage.

    Args:
        nodes: they are in, by index; most often one.
        first_device: of the node, the first that it has.
        kind: equal for units that are alike.
    """

    nodes: tuple[int, ...]
    first_device: int
    where: StageDevices
    kind: tuple[str, str]


def sizes_to_try(cluster: Cluster) -> list[int]:
    """Tensor parallel sizes that leave no device of some node over, or take whole nodes."""
    sizes = {
        size for node in cluster.nodes for size in range(1, node.num_devices + 1) if node.num_devices % size == 0
    }
    if (per_node := cluster.devices_per_node) is not None:
        num_nodes = len(cluster.nodes)
        sizes |= {per_node * count for count in range(1, num_nodes + 1) if num_nodes % count == 0}
    return sorted(sizes)


def why_not_sharded(model: ModelCosts, size: int) -> str | None:
    """Why heads, MLPs or experts cannot be shared by so many devices, with the sizes that work; None if they can."""
    if _divides_heads(model, size):
        return model.why_not_shared(size)
    works = [other for other in range(1, model.num_heads + 1) if can_share(model, other)]
    lower = max((other for other in works if other < size), default=1)
    higher = min((other for other in works if other > size), default=None)
    way_out = f"{lower} or {higher} would" if higher is not None else f"{lower} would"
    kv_heads = "" if model.num_kv_heads in (1, model.num_heads) else f" and {model.num_kv_heads} KV heads"
    return f"{model.num_heads} heads{kv_heads} do not divide over {size} devices; {way_out}"


def can_share(model: ModelCosts, size: int) -> bool:
    """Whether so many devices can share a layer, its experts in parts or dealt as the model says."""
    return _divides_heads(model, size) and model.why_not_shared(size) is None


def _divides_heads(model: ModelCosts, size: int) -> bool:
    kv_heads = model.num_kv_heads
    return model.num_heads % size == 0 and (kv_heads == 1 or kv_heads % size == 0 or size % kv_heads == 0)


def units_of(cluster: Cluster, size: int) -> tuple[Unit, ...] | str:
    """All units of so many devices, or why there are none."""
    if size <= max(node.num_devices for node in cluster.nodes):
        # One object for all that are alike: what runs on it is priced once.
        where = {_kind(node): StageDevices(node.device, size, node.link) for node in cluster.nodes}
        return tuple(
            Unit((node.index,), number * size, where[_kind(node)], _kind(node))
            for node in cluster.nodes
            for number in range(node.num_devices // size)
        )
    per_node, num_nodes = cluster.devices_per_node, len(cluster.nodes)
    if per_node is None:
        most = max(node.num_devices for node in cluster.nodes)
        return f"nodes differ, and none has {size} devices; at most {most} can share a stage"
    if size % per_node or size > cluster.num_devices:
        return (
            f"{size} devices are neither within a node of {per_node} nor whole nodes of the {num_nodes}; use at most "
            f"{per_node}, or a multiple of it up to {cluster.num_devices}"
        )
    width = size // per_node
    first = cluster.nodes[0]
    whole_nodes = StageDevices(first.device, size, cluster.network)
    starts = range(0, num_nodes - width + 1, width)
    return tuple(Unit(tuple(range(start, start + width)), 0, whole_nodes, _kind(first)) for start in starts)


def _kind(node: Node) -> tuple[str, str]:
    return node.device_name, node.link_name


def link_between(cluster: Cluster, one: Unit, other: Unit) -> Link:
    """What a hop from one unit to the next goes over."""
    return cluster.nodes[one.nodes[0]].link if one.nodes == other.nodes else cluster.network


def take_units(
    units: Sequence[Unit], order: Sequence[tuple[str, str]], num_replicas: int
) -> tuple[tuple[Unit, ...], ...]:
    """Units for every stage of every replica: next to the stage before it in the same node where there is one left, or
    else in a node that holds all the stages of its kind that follow, so that as few hops as can be leave a node.

    Args:
        order: [stages] the kind of each stage's unit; there are enough of each kind.
    """
    left: dict[tuple[str, str], dict[tuple[int, ...], deque[Unit]]] = {}
    for unit in units:
        left.setdefault(unit.kind, {}).setdefault(unit.nodes, deque()).append(unit)
    replicas = []
    for _ in range(num_replicas):
        stages: list[Unit] = []
        for stage, kind in enumerate(order):
            by_nodes = left[kind]
            if stages and stages[-1].nodes in by_nodes:
                nodes = stages[-1].nodes
            else:
                nodes = _tightest({nodes: len(own) for nodes, own in by_nodes.items()}, _run_length(order[stage:]))
            stages.append(by_nodes[nodes].popleft())
            if not by_nodes[nodes]:
                del by_nodes[nodes]
        replicas.append(tuple(stages))
    return tuple(replicas)


def _run_length(order: Sequence[tuple[str, str]]) -> int:
    """How many stages of the first one's kind stand at the beginning."""
    return next((stage for stage, kind in enumerate(order) if kind != order[0]), len(order))


def _tightest(num_left: Mapping[tuple[int, ...], int], num_wanted: int) -> tuple[int, ...]:
    """Where the fewest that are enough are left, or else the most."""
    enough = {nodes: count for nodes, count in num_left.items() if count >= num_wanted}
    return min(enough, key=enough.__getitem__) if enough else max(num_left, key=num_left.__getitem__)
