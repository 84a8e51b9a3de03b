"""What each item of a model costs: put together from what stages measured, or estimated from shapes alone.

One idea: layers whose tensors are alike cost alike. So a few layers speak for all of their kind, and two stages that
timed layers of one kind have told how much faster the one is than the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.stage_tensors import stage_tensor_names, stage_weight_bytes
from stageline.errors import InternalError
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes
from stageline.pipeline.partition_by_cost import ItemBytes, ItemCosts, StageRoom

EXPERTS = ".experts."
"""In the names of tensors that belong to one of several experts."""

# A CPU core's, roughly; only their ratio to one another decides anything.
_FLOPS_PER_S = 150e9
_BYTES_PER_S = 15e9

_SAME_SPEED_FRACTION = 0.05
"""Stages whose times differ by less are taken for equally fast: it may be noise, and equal is the likely truth."""


@dataclass(frozen=True)
class MeasuredCosts:
    """The items' costs on a stage of speed 1, and each stage's speed."""

    items: ItemCosts
    speeds: tuple[float, ...]


def layer_kinds(checkpoint: Checkpoint) -> tuple[int, ...]:
    """[layers] numbers that are equal where layers have the same tensors (names, shapes, encodings) and window."""
    kinds: dict[object, int] = {}
    numbers = []
    for layer in range(checkpoint.spec.num_layers):
        prefix = f"model.layers.{layer}."
        names = stage_tensor_names(checkpoint, range(layer, layer + 1), is_first=False, is_last=False)
        entries = [checkpoint.tensors[name] for name in names]
        signature = tuple(sorted((e.name.removeprefix(prefix), e.shape, e.encoding) for e in entries))
        numbers.append(kinds.setdefault((checkpoint.spec.window_of(layer), signature), len(kinds)))
    return tuple(numbers)


def layers_to_time(kinds: Sequence[int], num_layers_per_kind: int) -> list[int]:
    """The first few layers of every kind, ascending."""
    seen: Counter[int] = Counter()
    chosen = []
    for layer, kind in enumerate(kinds):
        if seen[kind] < num_layers_per_kind:
            chosen.append(layer)
        seen[kind] += 1
    return chosen


def costs_from_measured(measured: Sequence[StageItemTimes], kinds: Sequence[int]) -> MeasuredCosts:
    """Every item's cost, from times that cover every kind of layer, the embedding and the head.

    Args:
        measured: one per stage, in order. The first stage's speed is 1.
        kinds: [layers] as `layer_kinds` gives them.
    """
    own_s: dict[int, list[float]] = {}
    kind_s: dict[int, float] = {}
    speeds = []
    for stage in measured:
        speed = _speed(stage, kinds, kind_s)
        speeds.append(speed)
        by_kind: dict[int, list[float]] = {}
        for layer, time_s in zip(stage.layers, stage.layers_s, strict=True):
            own_s.setdefault(layer, []).append(time_s * speed)
            by_kind.setdefault(kinds[layer], []).append(time_s * speed)
        for kind, times_s in by_kind.items():
            kind_s.setdefault(kind, median(times_s))
    if missing := set(kinds) - set(kind_s):
        raise InternalError(f"no layer of the kinds {sorted(missing)} was timed")
    all_of_kind_s: dict[int, list[float]] = {}
    for layer, times_s in own_s.items():
        all_of_kind_s.setdefault(kinds[layer], []).extend(times_s)
    layers_s = [median(own_s.get(layer) or all_of_kind_s[kind]) for layer, kind in enumerate(kinds)]
    embedding_s = [m.embedding_s * s for m, s in zip(measured, speeds, strict=True) if m.embedding_s is not None]
    head_s = [m.head_s * s for m, s in zip(measured, speeds, strict=True) if m.head_s is not None]
    if not embedding_s or not head_s:
        raise InternalError("the embedding or the LM head was not timed")
    return MeasuredCosts(ItemCosts(median(embedding_s), tuple(layers_s), median(head_s)), tuple(speeds))


def _speed(stage: StageItemTimes, kinds: Sequence[int], kind_s: dict[int, float]) -> float:
    """How fast a stage is, from layers of kinds that an earlier stage timed too; 1 if there are none.

    A median: one layer that was disturbed must not make a stage slow.
    """
    ratios = [
        kind_s[kinds[layer]] / time_s
        for layer, time_s in zip(stage.layers, stage.layers_s, strict=True)
        if kinds[layer] in kind_s and time_s > 0
    ]
    speed = median(ratios) if ratios else 1.0
    return 1.0 if abs(speed - 1.0) <= _SAME_SPEED_FRACTION else speed


def item_bytes(
    checkpoint: Checkpoint,
    itemsize: int,
    keeps_quantized: bool,
    kv_bytes_per_layer: int | Sequence[int],
    num_ranks: int = 1,
) -> ItemBytes:
    """What each item takes in a stage's memory.

    Args:
        itemsize: bytes of a number in the compute dtype.
        kv_bytes_per_layer: KV cache that the plan needs for every layer, or for each.
        num_ranks: that share each layer; the result is what all of them have, copies included.
    """
    num_layers = checkpoint.spec.num_layers
    kv_bytes = [kv_bytes_per_layer] * num_layers if isinstance(kv_bytes_per_layer, int) else kv_bytes_per_layer

    def weights(layers: range, is_first: bool = False, is_last: bool = False) -> int:
        of_a_rank = stage_weight_bytes(checkpoint, layers, is_first, is_last, itemsize, keeps_quantized, num_ranks)
        return num_ranks * of_a_rank

    return ItemBytes(
        embedding=weights(range(0), is_first=True),
        layers=tuple(weights(range(layer, layer + 1)) + kv_bytes[layer] for layer in range(num_layers)),
        head=weights(range(0), is_last=True),
    )


def analytic_costs(
    checkpoint: Checkpoint, planned: PlannedMicrobatch, sizes: ItemBytes, kv_bytes_per_token: int
) -> ItemCosts:
    """An estimate from shapes: matrix products or reading the weights, whichever is slower, and reading the KV cache
    as far as a layer sees it.

    Of a mixture of experts, a token is multiplied by the experts it chose only, and weights are read of those that some
    token chose, as if all were chosen alike.

    Args:
        sizes: weights alone, without KV cache.
        kv_bytes_per_token: of one layer.
    """
    spec = checkpoint.spec
    moe = spec.moe
    chosen = 1.0 if moe is None else moe.num_experts_per_token / moe.num_experts

    def weights_s(layers: range, is_last: bool, num_bytes: int) -> float:
        names = stage_tensor_names(checkpoint, layers, is_first=False, is_last=is_last)
        num_weights = sum(checkpoint.tensors[name].num_elements for name in names)
        num_of_experts = sum(checkpoint.tensors[name].num_elements for name in names if EXPERTS in name)
        num_others = num_weights - num_of_experts
        num_multiplied = num_others + num_of_experts * chosen
        num_read = num_others + num_of_experts * (1 - (1 - chosen) ** planned.num_rows)
        read_s = num_bytes * num_read / max(1, num_weights) / _BYTES_PER_S
        return max(2.0 * planned.num_rows * num_multiplied / _FLOPS_PER_S, read_s)

    def attention_s(layer: int) -> float:
        window = spec.window_of(layer)
        seen = planned.context_tokens if window is None else min(window, planned.context_tokens)
        return planned.num_rows * seen * kv_bytes_per_token / _BYTES_PER_S

    return ItemCosts(
        embedding_s=planned.num_rows * spec.hidden_size * 4 / _BYTES_PER_S,
        layers_s=tuple(
            weights_s(range(layer, layer + 1), False, num_bytes) + attention_s(layer)
            for layer, num_bytes in enumerate(sizes.layers)
        ),
        head_s=weights_s(range(0), True, sizes.head),
    )


def rooms_of(measured: Sequence[StageItemTimes], speeds: Sequence[float]) -> tuple[StageRoom, ...]:
    """Each stage's speed and memory. Stages that share a memory pool share all of it, however the layers are cut."""
    num_in_pool = Counter(stage.memory_pool for stage in measured)
    return tuple(
        StageRoom(speed, stage.free_bytes if num_in_pool[stage.memory_pool] == 1 < len(measured) else None)
        for stage, speed in zip(measured, speeds, strict=True)
    )
