"""Where layers should live, judged by time: the slowest stage as fast as it can be, within every stage's memory.

One idea: a model is a row of items (embedding, each layer, norm with LM head and sampling), a stage a run of them.
Times are rounded to nanoseconds first: whole numbers add up exactly, so equal partitions are equal, and ties are broken
the same way on every machine.

Source: the linear partition problem; dynamic programming, O(layers² · stages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stageline.errors import ConfigError
from stageline.pipeline.partition import default_layer_counts

OBJECTIVES = ("throughput", "latency")

_Key = tuple[int, ...]


@dataclass(frozen=True)
class ItemCosts:
    """Time of each item for one microbatch of the planned shape, on a stage of speed 1.

    Args:
        embedding_s: on the first stage.
        layers_s: [layers]
        head_s: final norm, LM head and sampling, on the last stage.
    """

    embedding_s: float
    layers_s: tuple[float, ...]
    head_s: float


@dataclass(frozen=True)
class ItemBytes:
    """Memory of each item: its weights and, for a layer, the KV cache that the plan needs.

    Args:
        layers: [layers]
    """

    embedding: int
    layers: tuple[int, ...]
    head: int


@dataclass(frozen=True)
class StageRoom:
    """What a stage brings.

    Args:
        speed: 2.0 takes half the time of 1.0 for everything.
        memory_bytes: for items; None if it does not limit.
    """

    speed: float = 1.0
    memory_bytes: int | None = None


def partition_by_cost(
    costs: ItemCosts, rooms: Sequence[StageRoom], sizes: ItemBytes | None = None, objective: str = "throughput"
) -> tuple[int, ...]:
    """Cut the layers into consecutive runs, one per stage, so that the objective is as small as it can be.

    Args:
        rooms: one per stage, in order.
        sizes: None if memory does not matter.
        objective: "throughput" minimises the slowest stage's time; "latency" the sum over the stages, then the slowest.
            What hops take is the same for every cut. Of equal partitions the one with the most even stage times is
            taken, then the one closest to the default rule.
    Returns: layers per stage, each at least 1.
    Raises: ConfigError if there are more stages than layers, or no cut fits the stages' memory.
    """
    search = _Search(costs, rooms, sizes)
    if objective == "latency":
        best = search.best(lambda key, time: (key[0] + time, max(key[1], time)), (0, 0))
        slowest = best.key[1] if best else 0
    else:
        best = search.best(lambda key, time: (max(key[0], time),), (0,))
        slowest = best.key[0] if best else 0
    if best is None:
        raise ConfigError(_does_not_fit(costs, rooms, sizes))
    is_latency = objective == "latency"
    even = search.best(
        lambda key, time: (key[0] + time * is_latency, key[1] + time * time), (0, 0), slowest, prefers_default=True
    )
    assert even is not None, "the best partition itself is within its slowest stage's time"
    return even.counts


def stage_times_s(costs: ItemCosts, rooms: Sequence[StageRoom], counts: Sequence[int]) -> tuple[float, ...]:
    """What each stage of a partition takes for a microbatch."""
    ends = list(accumulate(counts))
    last = len(counts) - 1
    return tuple(
        (
            sum(costs.layers_s[end - count : end])
            + (costs.embedding_s if stage == 0 else 0.0)
            + (costs.head_s if stage == last else 0.0)
        )
        / room.speed
        for stage, (count, end, room) in enumerate(zip(counts, ends, rooms, strict=True))
    )


@dataclass(frozen=True)
class _Best:
    key: _Key
    counts: tuple[int, ...]


class _Search:
    """Dynamic programming over (stages so far, layers so far), for any key that grows stage by stage."""

    def __init__(self, costs: ItemCosts, rooms: Sequence[StageRoom], sizes: ItemBytes | None) -> None:
        self._num_layers, self._num_stages = len(costs.layers_s), len(rooms)
        self._default_ends = list(accumulate(default_layer_counts(self._num_layers, self._num_stages)))
        self._rooms = rooms
        self._time_before = [self._times_before(costs, stage) for stage in range(self._num_stages)]
        self._bytes_before = None if sizes is None else _before(sizes.layers)
        self._end_bytes = None if sizes is None else (sizes.embedding, sizes.head)

    def _times_before(self, costs: ItemCosts, stage: int) -> list[int]:
        """[layers + 1] nanoseconds of all layers before each, on this stage; the ends' items are in where they run."""
        speed = self._rooms[stage].speed
        before = _before([round(time_s / speed * 1e9) for time_s in costs.layers_s])
        if stage == 0:
            before = [0, *(time + round(costs.embedding_s / speed * 1e9) for time in before[1:])]
        if stage == self._num_stages - 1:
            before[-1] += round(costs.head_s / speed * 1e9)
        return before

    def fits(self, stage: int, first: int, end: int) -> bool:
        """Whether layers [first, end) and what else the stage holds fit its memory."""
        limit = self._rooms[stage].memory_bytes
        return limit is None or self.bytes_of(stage, first, end) <= limit

    def bytes_of(self, stage: int, first: int, end: int) -> int:
        if self._bytes_before is None or self._end_bytes is None:
            return 0
        embedding, head = self._end_bytes
        layers = self._bytes_before[end] - self._bytes_before[first]
        return layers + embedding * (stage == 0) + head * (stage == self._num_stages - 1)

    def best(
        self,
        grow: Callable[[_Key, int], _Key],
        start: _Key,
        slowest: int | None = None,
        prefers_default: bool = False,
    ) -> _Best | None:
        """The partition with the smallest key, or None if none fits.

        Args:
            grow: the key with one more stage that takes so many nanoseconds.
            slowest: stages that take longer are not allowed.
            prefers_default: of equal keys, the ends closest to the default rule's.
        """
        num_layers, num_stages = self._num_layers, self._num_stages
        reached: dict[int, _Best] = {0: _Best((*start, 0), ())}
        for stage in range(num_stages):
            stages_left = num_stages - 1 - stage
            ends = range(stage + 1, num_layers - stages_left + 1) if stages_left else [num_layers]
            extended: dict[int, _Best] = {}
            for end in ends:
                away = abs(end - self._default_ends[stage]) if prefers_default else 0
                candidates: list[tuple[_Key, int]] = []
                # Backwards: a run that is too long or too large only gets worse.
                for first in range(end - 1, -1, -1):
                    time = self._time_before[stage][end] - self._time_before[stage][first]
                    if (slowest is not None and time > slowest) or not self.fits(stage, first, end):
                        break
                    if (prefix := reached.get(first)) is not None:
                        candidates.append(((*grow(prefix.key[:-1], time), prefix.key[-1] + away), first))
                if candidates:
                    key, first = min(candidates)
                    extended[end] = _Best(key, (*reached[first].counts, end - first))
            reached = extended
        return reached.get(num_layers)

    def most_layers(self) -> list[int]:
        """The most layers each stage holds if every stage takes as many as fit, and leaves one for each to come."""
        counts, first = [], 0
        for stage in range(self._num_stages):
            end, most = first, self._num_layers - (self._num_stages - 1 - stage)
            while end < most and self.fits(stage, first, end + 1):
                end += 1
            counts.append(end - first)
            first = end
        return counts


def _before(values: Sequence[int]) -> list[int]:
    return [0, *accumulate(values)]


def _does_not_fit(costs: ItemCosts, rooms: Sequence[StageRoom], sizes: ItemBytes | None) -> str:
    assert sizes is not None, "without sizes every partition fits"
    num_layers = len(costs.layers_s)
    counts = _Search(costs, rooms, sizes).most_layers()
    needed = sizes.embedding + sum(sizes.layers) + sizes.head
    there = ", ".join(
        f"s{stage} {'as many as needed' if room.memory_bytes is None else f'{count} in {room.memory_bytes:,} bytes'}"
        for stage, (count, room) in enumerate(zip(counts, rooms, strict=True))
    )
    return (
        f"no partition fits: {num_layers} layers, embedding, LM head and KV cache take {needed:,} bytes, and the "
        f"stages have room for {sum(counts)} layers ({there}); use more stages, a smaller --dtype, fewer or shorter "
        "requests, or free memory"
    )
