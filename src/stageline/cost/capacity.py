"""How many tokens and requests a pipeline's KV caches hold, which stage limits, and what moving a layer would change.

One idea: every stage keeps the KV of its own layers for all requests, so the stage with the least room per request
decides for all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stageline.cost.model_costs import ItemShape
from stageline.cost.placement import Placement
from stageline.pipeline.partition import StageLayers

DEFAULT_MEMORY_FRACTION = 0.9
_ROUNDING = 1e-6
"""Of sums in another order: what exactly fits by one must fit by the other."""


@dataclass(frozen=True)
class StageCapacity:
    """One stage, per device.

    Args:
        room_bytes: for weights and KV cache.
        kv_bytes_per_token, kv_bytes_per_request: of its layers; a window bounds a request's.
    """

    weight_bytes: float
    room_bytes: float
    kv_bytes_per_token: float
    kv_bytes_per_request: float

    @property
    def kv_room_bytes(self) -> float:
        return max(0.0, self.room_bytes - self.weight_bytes)

    @property
    def fits(self) -> bool:
        return self.weight_bytes <= self.room_bytes

    @property
    def num_requests(self) -> int:
        return math.floor(self.kv_room_bytes / self.kv_bytes_per_request + _ROUNDING)

    @property
    def num_tokens(self) -> int:
        return math.floor(self.kv_room_bytes / self.kv_bytes_per_token)


@dataclass(frozen=True)
class Capacity:
    """All stages at one context length.

    Args:
        stages: [stages]
    """

    stages: tuple[StageCapacity, ...]
    context_tokens: int

    @property
    def limiting_stage(self) -> int:
        rooms = [stage.kv_room_bytes / stage.kv_bytes_per_request for stage in self.stages]
        return rooms.index(min(rooms))

    @property
    def num_requests(self) -> int:
        """Of `context_tokens` each that fit at once; 0 if the weights alone do not."""
        return min(stage.num_requests for stage in self.stages) if all(stage.fits for stage in self.stages) else 0

    @property
    def num_tokens(self) -> int:
        return min(stage.num_tokens for stage in self.stages)


@dataclass(frozen=True)
class LayerMove:
    """One layer moved to a neighbouring stage.

    Args:
        from_stage, to_stage: next to one another.
        layer_counts: after it.
        num_requests: that fit then.
    """

    from_stage: int
    to_stage: int
    layer_counts: tuple[int, ...]
    num_requests: int


def stage_weight_bytes(placement: Placement, cut: StageLayers, num_devices: int) -> float:
    """Per device of a stage."""
    return items_weight_bytes(placement.items[cut.stage_index], num_devices) - (
        placement.model.shared_bytes(num_devices) if cut.is_first and cut.is_last else 0.0
    )


def items_weight_bytes(items: tuple[tuple[ItemShape, int], ...], num_devices: int) -> float:
    return sum(count * item.weight_bytes(num_devices) for item, count in items)


def capacity(
    placement: Placement,
    context_tokens: int,
    memory_fraction: float = DEFAULT_MEMORY_FRACTION,
    batched_tokens: int = 0,
) -> Capacity:
    """What every stage holds.

    Args:
        memory_fraction: of a device's memory that may be used at all.
        batched_tokens: of the largest microbatch, whose activations need memory too.
    """
    stages = []
    for cut, where, items in zip(placement.cut, placement.stages, placement.items, strict=True):
        shards = where.num_devices
        largest = max(item.activation_bytes(shards) for item, _ in items)
        kept = [(item, count * item.kv_bytes(shards)) for item, count in items]
        stages.append(
            StageCapacity(
                weight_bytes=stage_weight_bytes(placement, cut, shards),
                room_bytes=where.device.room_bytes(memory_fraction, batched_tokens * largest),
                kv_bytes_per_token=sum(num_bytes for _, num_bytes in kept),
                kv_bytes_per_request=sum(num_bytes * item.kv_tokens(context_tokens) for item, num_bytes in kept),
            )
        )
    return Capacity(tuple(stages), context_tokens)


def best_layer_move(
    placement: Placement,
    context_tokens: int,
    memory_fraction: float = DEFAULT_MEMORY_FRACTION,
    batched_tokens: int = 0,
) -> LayerMove | None:
    """Which neighbour the limiting stage should give a layer to so that most requests fit; None if it can give none."""
    limiting = capacity(placement, context_tokens, memory_fraction, batched_tokens).limiting_stage
    moves = []
    for to_stage in (limiting - 1, limiting + 1):
        counts = list(placement.layer_counts)
        if not 0 <= to_stage < len(counts) or counts[limiting] < 2:
            continue
        counts[limiting] -= 1
        counts[to_stage] += 1
        other = replace(placement, layer_counts=tuple(counts))
        moved = capacity(other, context_tokens, memory_fraction, batched_tokens)
        moves.append(LayerMove(limiting, to_stage, tuple(counts), moved.num_requests))
    return max(moves, key=lambda move: move.num_requests, default=None)
