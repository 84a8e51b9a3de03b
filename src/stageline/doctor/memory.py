"""Whether every stage's layers fit where the stage would run, and which layers to move if they do not.

One idea: stages that share a memory (a machine's, or one GPU's) count as one, for moving layers between them changes
nothing; the cut over these memories is the exact one of `--pp-layer-partition auto`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from stageline.engine.startup_table import format_bytes
from stageline.errors import ConfigError
from stageline.pipeline.partition import default_layer_counts
from stageline.pipeline.partition_by_cost import ItemBytes, ItemCosts, StageRoom, partition_by_cost


@dataclass(frozen=True)
class Memory:
    """What some consecutive stages share.

    Args:
        name: for people, such as `node 1`.
        stages: of the pipeline, half-open.
        free_bytes: None if nobody could be asked.
    """

    name: str
    stages: range
    free_bytes: int | None


def memories_of(names: Sequence[str], free_bytes: Sequence[int | None]) -> tuple[Memory, ...]:
    """Args: names, free_bytes: [stages] the memory that each stage would use; equal names are one memory."""
    found, first = [], 0
    for name, group in groupby(range(len(names)), key=lambda stage: names[stage]):
        size = len(list(group))
        found.append(Memory(name, range(first, first + size), free_bytes[first]))
        first += size
    return tuple(found)


def needed_bytes(memory: Memory, counts: Sequence[int], sizes: ItemBytes) -> int:
    """What the layers and ends of its stages take."""
    ends = [0, *accumulate(counts)]
    layers = sum(sizes.layers[ends[memory.stages.start] : ends[memory.stages.stop]])
    is_first, is_last = memory.stages.start == 0, memory.stages.stop == len(counts)
    return layers + sizes.embedding * is_first + sizes.head * is_last


def check_memories(memories: Sequence[Memory], counts: Sequence[int], sizes: ItemBytes) -> None:
    """Raises: ConfigError for the first memory that is too small, with the stage and the layers to move."""
    for memory in memories:
        needed = needed_bytes(memory, counts, sizes)
        if memory.free_bytes is None or needed <= memory.free_bytes:
            continue
        ends = [0, *accumulate(counts)]
        who = ", ".join(f"s{stage} (layers {ends[stage]} to {ends[stage + 1] - 1})" for stage in memory.stages)
        raise ConfigError(
            f"out of memory on {memory.name}: {who} and the least KV cache take {format_bytes(needed)}, and "
            f"{format_bytes(memory.free_bytes)} are free; {_way_out(memories, counts, sizes)}"
        )


def _way_out(memories: Sequence[Memory], counts: Sequence[int], sizes: ItemBytes) -> str:
    try:
        other = fitting_counts(memories, sizes)
    except ConfigError:
        needed = sizes.embedding + sum(sizes.layers) + sizes.head
        there = sum(memory.free_bytes or 0 for memory in memories)
        return (
            f"no cut fits, for all of it takes {format_bytes(needed)} and {format_bytes(there)} are free on all "
            "machines that were looked at: use more of them, a smaller --dtype, --quantization int8, or free memory"
        )
    moves = []
    for stage, (before, after) in enumerate(zip(accumulate(counts[:-1]), accumulate(other[:-1]), strict=True)):
        if after < before:
            moves.append(f"{_layers(range(after, before))} from s{stage} to s{stage + 1}")
        elif before < after:
            moves.append(f"{_layers(range(before, after))} from s{stage + 1} to s{stage}")
    return f"move {', '.join(moves)}: --pp-layer-partition {','.join(map(str, other))}"


def _layers(layers: range) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"


def fitting_counts(memories: Sequence[Memory], sizes: ItemBytes) -> tuple[int, ...]:
    """Layers per stage that fit everywhere, the memories with the most stages taking the most of them.

    Raises: ConfigError if there are none.
    """
    rooms = [StageRoom(float(len(memory.stages)), memory.free_bytes) for memory in memories]
    shares = partition_by_cost(ItemCosts(0.0, (1.0,) * len(sizes.layers), 0.0), rooms, sizes)
    found: list[int] = []
    for memory, share in zip(memories, shares, strict=True):
        found += default_layer_counts(share, len(memory.stages))
    return tuple(found)
