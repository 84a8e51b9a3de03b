"""One layout judged: where everything is, whether it fits, and how fast it would be.

One idea: a layout is judged by its slowest replica, with the requests spread evenly over the replicas; requests that
its memory does not hold wait outside, and are not counted as running.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

from stageline.config.plan_config import PlanConfig
from stageline.cost.capacity import Capacity, capacity
from stageline.cost.hardware import Link
from stageline.cost.model_costs import ModelCosts
from stageline.cost.placement import DecodePace, Placement, PromptPace, best_decode_pace, best_prompt_pace
from stageline.cost.roofline import StageDevices, item_parts
from stageline.cost.stage_time import MicrobatchShape
from stageline.planner.cluster import Cluster
from stageline.planner.unit_partition import UnitKind, UnitPartition, best_unit_partition
from stageline.planner.units import Unit, link_between, take_units

WIDEST_PER_STAGE = 4
"""Microbatches in flight per stage that are considered, as in the engine."""


_ENOUGH, _MARGIN = 1.1, 4


@dataclass(frozen=True)
class Layout:
    """How many devices share a stage, how many stages a pipeline has, how many pipelines there are.

    Args:
        deals_experts: the devices of a stage have whole experts each, rather than a part of every one.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int = 1
    deals_experts: bool = False

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def __str__(self) -> str:
        dealt = "+EP" if self.deals_experts else ""
        name = f"TP{self.tensor_parallel_size}{dealt} x PP{self.pipeline_parallel_size}"
        return name + (f" x DP{self.data_parallel_size}" if self.data_parallel_size > 1 else "")


@dataclass(frozen=True)
class Impossible:
    """A layout that cannot be, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True)
class LayoutPlan:
    """A layout that can be.

    Args:
        replicas: [replicas][stages] where each stage is.
        placement: of the slowest replica.
        capacity: of one replica.
        num_running, num_waiting: requests of the planned load that its memory holds, all replicas together, and does
            not.
        decode, prompt: of one replica.
        prompt_tokens, output_tokens: of the planned load.
    """

    layout: Layout
    replicas: tuple[tuple[Unit, ...], ...]
    placement: Placement
    capacity: Capacity
    num_running: int
    num_waiting: int
    decode: DecodePace
    prompt: PromptPace
    output_tokens: int
    price_per_hour: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all replicas together, with the time that prompts take from the slowest stage.

        While n requests make o tokens each, as many prompts come in; what the slowest stage is idle for, they get for
        nothing.
        """
        return self.num_running * self.output_tokens / self._period_s

    @property
    def tpot_s(self) -> float:
        """Of decoding alone."""
        return self.decode.tpot_s

    def at_concurrency(self, num_requests: int, config: PlanConfig) -> LayoutPlan | None:
        """The same with another number of requests; None if its memory does not hold them."""
        running = -(-num_requests // self.layout.data_parallel_size)
        if running > self.capacity.num_requests:
            return None
        widest = WIDEST_PER_STAGE * self.layout.pipeline_parallel_size
        decode = best_decode_pace(self.placement, running, config.mean_context_tokens, widest)
        return replace(self, decode=decode, num_running=num_requests, num_waiting=0)

    @property
    def prompt_share_s(self) -> float:
        """By how much prompts lengthen a cycle."""
        return self._period_s / self.output_tokens - self.decode.tpot_s

    @cached_property
    def _period_s(self) -> float:
        decode = self.decode
        decoding_s = self.output_tokens * decode.tpot_s
        idle_s = self.output_tokens * (decode.tpot_s - decode.num_microbatches * decode.ring.slowest_s)
        return decoding_s + max(0.0, decode.num_requests * self.prompt.slowest_stage_s - idle_s)

    @cached_property
    def batched_tokens(self) -> int:
        """The budget of a microbatch: more new tokens would make it longer and prompts hardly faster.

        Four times the smallest power of two at which the slowest stage takes at most a tenth longer per token than at
        the best: kernels reach their rate later than a roofline says.
        """
        sizes = [1 << power for power in range(6, 15)]
        per_token_s = {size: max(self.placement.stage_times_s(_one_prompt(size))) / size for size in sizes}
        best_s = min(per_token_s.values())
        return _MARGIN * min(size for size in sizes if per_token_s[size] <= _ENOUGH * best_s)

    @property
    def price_per_million_tokens(self) -> float:
        """Infinite where the price of a device is not known: such a layout is not the cheapest."""
        if any(not unit.where.device.price_per_hour for replica in self.replicas for unit in replica):
            return inf
        return self.price_per_hour / 3600 / self.tokens_per_s * 1e6

    @property
    def can_run(self) -> int:
        """Requests of the planned length that all replicas hold together."""
        return self.capacity.num_requests * self.layout.data_parallel_size


def _one_prompt(num_tokens: int) -> MicrobatchShape:
    return MicrobatchShape.of_rows([0], [num_tokens])


def judge(
    model: ModelCosts, cluster: Cluster, units: Sequence[Unit], layout: Layout, config: PlanConfig
) -> LayoutPlan | Impossible:
    """A layout with the best partition that there is for it.

    Args:
        model: with its experts dealt if the layout deals them.
        units: all of the layout's tensor parallel size.
    """
    num_requests = -(-config.concurrency // layout.data_parallel_size)
    found = _largest_that_fits(model, units, layout, config, num_requests)
    if isinstance(found, str):
        return Impossible(layout, found)
    kinds = list(dict.fromkeys(unit.kind for unit in units))
    replicas = take_units(units, [kinds[kind] for kind in found.kinds], layout.data_parallel_size)
    # Replicas with the same links are alike.
    unlike = {tuple(id(link) for link in _links(cluster, replica)): replica for replica in replicas}
    placements = [_placement(model, cluster, replica, found.layer_counts) for replica in unlike.values()]
    shape = MicrobatchShape(1, 0, 1, config.mean_context_tokens)
    slowest = max(placements, key=lambda placement: placement.ring(shape).ring_s)
    holds = capacity(slowest, config.context_tokens, config.memory_fraction, config.max_num_batched_tokens)
    running = min(num_requests, holds.num_requests)
    decode = best_decode_pace(
        slowest, running, config.mean_context_tokens, WIDEST_PER_STAGE * layout.pipeline_parallel_size
    )
    return LayoutPlan(
        layout=layout,
        replicas=replicas,
        placement=slowest,
        capacity=holds,
        num_running=min(config.concurrency, running * layout.data_parallel_size),
        num_waiting=max(0, config.concurrency - running * layout.data_parallel_size),
        decode=decode,
        prompt=best_prompt_pace(slowest, config.prompt_tokens, config.max_num_batched_tokens),
        output_tokens=config.output_tokens,
        price_per_hour=sum(
            unit.where.device.price_per_hour * unit.where.num_devices for replica in replicas for unit in replica
        ),
    )


def _links(cluster: Cluster, replica: Sequence[Unit]) -> tuple[Link, ...]:
    """[stages - 1] what hops go over."""
    return tuple(link_between(cluster, one, other) for one, other in pairwise(replica))


def _placement(
    model: ModelCosts, cluster: Cluster, replica: Sequence[Unit], layer_counts: tuple[int, ...]
) -> Placement:
    way_back = link_between(cluster, replica[-1], replica[0]).latency_s if len(replica) > 1 else 0.0
    stages = tuple(unit.where for unit in replica)
    return Placement(
        model=model,
        layer_counts=layer_counts,
        stages=stages,
        links=_links(cluster, replica),
        return_s=way_back,
        sampling_s=stages[-1].device.sampling_s,
    )


def _largest_that_fits(
    model: ModelCosts, units: Sequence[Unit], layout: Layout, config: PlanConfig, num_requests: int
) -> UnitPartition | str:
    """The best partition with room for all requests, or for as many as there can be, or why there is none for one."""

    def best(num_kept: int) -> UnitPartition | None:
        kinds = unit_kinds(model, units, layout, config, num_requests, num_kept)
        return best_unit_partition(kinds, layout.pipeline_parallel_size)

    if (found := best(num_requests)) is not None:
        return found
    if (found := best(1)) is None:
        return _does_not_fit(model, units, layout, config)
    low, high = 1, num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if (more := best(middle)) is None:
            high = middle
        else:
            low, found = middle, more
    return found


def unit_kinds(
    model: ModelCosts, units: Sequence[Unit], layout: Layout, config: PlanConfig, num_requests: int, num_kept: int
) -> list[UnitKind]:
    """Units by kind with what each item takes there. Of each kind, a replica's share.

    Args:
        num_requests: of a replica, spread over one microbatch per stage.
        num_kept: requests whose KV cache there must be room for.
    """
    rows = -(-num_requests // layout.pipeline_parallel_size)
    shape = MicrobatchShape(rows, 0, rows, rows * config.mean_context_tokens)
    counts = Counter(unit.kind for unit in units)
    first_of = {unit.kind: unit.where for unit in reversed(units)}
    kv_tokens = {layer: layer.kv_tokens(config.context_tokens) * num_kept for layer in set(model.layers)}
    kinds = []
    for name in dict.fromkeys(unit.kind for unit in units):
        where = first_of[name]
        shards = where.num_devices
        layer_bytes = {
            layer: layer.weight_bytes(shards) + layer.kv_bytes(shards) * kv_tokens[layer] for layer in kv_tokens
        }
        layer_s = {layer: item_parts(layer, model.hidden_bytes, where, shape).total_s for layer in kv_tokens}
        kinds.append(
            UnitKind(
                count=counts[name] // layout.data_parallel_size,
                layers_s=tuple(layer_s[layer] for layer in model.layers),
                embedding_s=item_parts(model.embedding, model.hidden_bytes, where, shape).total_s,
                head_s=item_parts(model.head, model.hidden_bytes, where, shape).total_s,
                layer_bytes=tuple(layer_bytes[layer] for layer in model.layers),
                embedding_bytes=model.embedding.weight_bytes(shards),
                head_bytes=model.head.weight_bytes(shards),
                shared_bytes=model.shared_bytes(shards),
                room_bytes=where.device.room_bytes(config.memory_fraction, _activation_bytes(model, shards, config)),
            )
        )
    return kinds


def _activation_bytes(model: ModelCosts, num_devices: int, config: PlanConfig) -> float:
    """Of the largest microbatch, on each of the devices of a stage."""
    return max(layer.activation_bytes(num_devices) for layer in set(model.layers)) * config.max_num_batched_tokens


def _does_not_fit(model: ModelCosts, units: Sequence[Unit], layout: Layout, config: PlanConfig) -> str:
    def room(where: StageDevices) -> float:
        activations = _activation_bytes(model, where.num_devices, config)
        return where.num_devices * where.device.room_bytes(config.memory_fraction, activations)

    pipeline = layout.pipeline_parallel_size
    counts = Counter(unit.kind for unit in units)
    if sum(count // layout.data_parallel_size for count in counts.values()) < pipeline:
        return (
            f"replicas are alike, and the {len(units)} units of {len(counts)} kinds do not share out into "
            f"{layout.data_parallel_size} of {pipeline} stages; use fewer replicas"
        )
    rooms = {kind: room(where) for kind, where in {unit.kind: unit.where for unit in units}.items()}
    free = sum(sorted((rooms[unit.kind] for unit in units), reverse=True)[:pipeline])
    request = model.kv_bytes_per_request(config.context_tokens)
    stages = f"{pipeline} stage{'s' * (pipeline > 1)} with {free / 1e9:,.1f} GB free"
    needed = (
        f"does not fit: weights of {model.weight_bytes / 1e9:,.1f} GB and a request of {config.context_tokens:,} "
        f"tokens with {request / 1e9:,.2f} GB of KV cache"
    )
    if model.weight_bytes + request > free:
        return f"{needed} need more than {stages}"
    largest = max(model.layers, key=lambda layer: layer.weight_bytes())
    layer, embedding, head = (
        f"{item.weight_bytes() / 1e9:,.2f} GB" for item in (largest, model.embedding, model.head)
    )
    return (
        f"{needed} are less than {stages}, but no cut fits: a layer of up to {layer} is in one stage, the embedding of "
        f"{embedding} in the first, the head of {head} in the last; and devices that share a stage keep some of it each"
    )
