"""Which units run which layers when units differ: the best choice of units, their order, and the cut.

A unit is the devices of one stage. One idea: try a time T. A set of units, in the best order, reaches furthest into the
model if every unit takes as many layers as it can within T and its memory; the furthest reach of a set is the best
over which unit comes last. Units of one kind are interchangeable, so a set is a count per kind. The smallest T at which
some set of the wanted size reaches the end is one of the sums of consecutive layers' times.

That is exact where fewer stages would be slower. Where they would not, more stages force layers on units that are
better left out, and the cut for exactly so many is good, not always the best.

Source: the chains-to-chains partition problem on heterogeneous processors, dynamic programming over subsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, permutations

import numpy as np
import numpy.typing as npt

from stageline.pipeline.partition import default_layer_counts

MOST_STATES = 1 << 16
"""Counts per kind that are tried: 16 units that all differ; more units when several are alike."""

_Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UnitKind:
    """Units that are alike.

    Args:
        count: how many there are.
        layers_s: [layers] time of each for the planned microbatch; `embedding_s` and `head_s` at the ends.
        layer_bytes: [layers] weights and the planned KV cache, per device; `embedding_bytes` and `head_bytes` at the
            ends; `shared_bytes` is saved by a unit that has both.
        room_bytes: for all of these, per device.
    """

    count: int
    layers_s: tuple[float, ...]
    embedding_s: float
    head_s: float
    layer_bytes: tuple[float, ...]
    embedding_bytes: float
    head_bytes: float
    shared_bytes: float
    room_bytes: float


@dataclass(frozen=True)
class UnitPartition:
    """Args:
    kinds: [stages] which kind each stage's unit is of.
    layer_counts: [stages]
    slowest_s: the slowest stage's time, items only.
    """

    kinds: tuple[int, ...]
    layer_counts: tuple[int, ...]
    slowest_s: float


def best_unit_partition(kinds: Sequence[UnitKind], num_stages: int) -> UnitPartition | None:
    """The partition over `num_stages` of the units whose slowest stage is fastest; None if none fits the memory.

    With more than MOST_STATES sets, units keep the order of their kinds, and only the cut is chosen.
    """
    num_layers = len(kinds[0].layers_s)
    if num_stages > num_layers or num_stages > sum(kind.count for kind in kinds):
        return None
    search = _Search(kinds, num_stages)
    times = search.candidates()
    # Whether fewer stages are enough only gets better with more time, so this search is exact.
    found = _first(times, search.fewest_stages_at)
    if found is None or len(found[1]) < num_stages:
        found = _first(times, search.order_at)
    if found is None:
        return None
    slowest, order = found
    order, counts = search.tidied(order, slowest)
    return UnitPartition(order, counts, float(slowest) * 1e-9)


def _first(times: _Times, order_at: Callable[[int], tuple[int, ...] | None]) -> tuple[int, tuple[int, ...]] | None:
    """The least time that has an order, by bisection, with that order; None if the largest has none."""
    found = order_at(int(times[-1]))
    if found is None:
        return None
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        order = order_at(int(times[middle]))
        if order is None:
            low = middle + 1
        else:
            high, found = middle, order
    return int(times[low]), found


class _Kind:
    """One kind in whole nanoseconds, with sums of all layers before each."""

    def __init__(self, kind: UnitKind) -> None:
        self.times: _Times = np.concatenate(([0], np.cumsum(np.rint(np.array(kind.layers_s) * 1e9).astype(np.int64))))
        self.bytes = np.concatenate(([0.0], np.cumsum(kind.layer_bytes)))
        self.embedding_time, self.head_time = round(kind.embedding_s * 1e9), round(kind.head_s * 1e9)
        self.kind = kind

    def stage_times(self, is_last: bool) -> _Times:
        """[first][end] of a stage with these layers; the diagonal and below are not stages."""
        times = self.times[None, :] - self.times[:, None]
        times[0, :] += self.embedding_time
        if is_last:
            times = times + self.head_time
        return times

    def fits(self, is_last: bool) -> npt.NDArray[np.bool_]:
        """[first][end] whether a stage with these layers has the memory."""
        kind = self.kind
        needed = self.bytes[None, :] - self.bytes[:, None]
        needed[0, :] += kind.embedding_bytes
        if is_last:
            needed = needed + kind.head_bytes
            needed[0, :] -= kind.shared_bytes
        return needed <= kind.room_bytes


class _Search:
    def __init__(self, kinds: Sequence[UnitKind], num_stages: int) -> None:
        self._kinds = [_Kind(kind) for kind in kinds]
        self._num_layers, self._num_stages = len(kinds[0].layers_s), num_stages
        self._counts = [kind.count for kind in kinds]
        indices = np.arange(self._num_layers + 1)
        is_stage = indices[None, :] > indices[:, None]
        self._middle = [np.where(is_stage & k.fits(False), k.stage_times(False), _NEVER) for k in self._kinds]
        self._last = [np.where(is_stage & k.fits(True), k.stage_times(True), _NEVER) for k in self._kinds]
        num_states = 1
        for count in self._counts:
            num_states *= count + 1
        self._is_free = num_states <= MOST_STATES
        if self._is_free:
            self._strides = [1, *accumulate((count + 1 for count in self._counts[:-1]), lambda a, b: a * b)]
            states = np.arange(num_states)
            self._digits = [
                states // stride % (count + 1) for stride, count in zip(self._strides, self._counts, strict=True)
            ]
            self._levels = sum(self._digits)

    def candidates(self) -> _Times:
        """All times that a stage can take, ascending."""
        tables = [self._middle, self._last] if self._num_stages > 1 else [self._last]
        times = np.unique(np.concatenate([table.ravel() for kind in tables for table in kind]))
        possible = times[times < _NEVER]
        return possible if len(possible) else times[:1] * 0

    def order_at(self, time: int) -> tuple[int, ...] | None:
        """The kinds of the stages, in order, of a partition within this time; None if none is found."""
        return self._free_order(time, self._num_stages) if self._is_free else self._fixed_order(time)

    def fewest_stages_at(self, time: int) -> tuple[int, ...] | None:
        """The same with as few stages as are enough, at most those that are wanted."""
        return self._free_order(time, 1) if self._is_free else self._fixed_order(time)

    def _furthest(self, time: int, num_to_come: int) -> list[npt.NDArray[np.int64]]:
        """Per kind [layers + 1]: where a stage that begins at a layer ends at most; 0 if it cannot take one.

        Args:
            num_to_come: stages after it, each of which is left a layer.
        """
        most = self._num_layers - num_to_come
        ends = np.arange(self._num_layers + 1)
        allowed = np.where(ends <= most, ends, 0)[None, :]
        return [np.where(times <= time, allowed, 0).max(axis=1) for times in self._middle]

    def _ends(self, time: int) -> list[npt.NDArray[np.bool_]]:
        """Per kind [layers + 1]: whether a last stage can begin at a layer."""
        return [times[:, self._num_layers] <= time for times in self._last]

    def _free_order(self, time: int, fewest: int) -> tuple[int, ...] | None:
        """Of the numbers of stages from `fewest` on, the first that works."""
        reach = np.full(len(self._levels), -1, dtype=np.int64)
        before = np.full(len(self._levels), -1, dtype=np.int64)
        reach[0] = 0
        ends = self._ends(time)
        for level in range(self._num_stages):
            states = np.flatnonzero((self._levels == level) & (reach >= 0))
            if level + 1 >= fewest:
                for kind, can_end in enumerate(ends):
                    usable = states[(self._digits[kind][states] < self._counts[kind]) & can_end[reach[states]]]
                    if len(usable):
                        return self._way_to(int(usable[0]), before, kind)
            furthest = self._furthest(time, max(1, fewest - 1 - level))
            for kind, (digits, stride) in enumerate(zip(self._digits, self._strides, strict=True)):
                usable = states[digits[states] < self._counts[kind]]
                end = furthest[kind][reach[usable]]
                targets = usable + stride
                better = (end > reach[targets]) & (end > 0)
                reach[targets[better]], before[targets[better]] = end[better], kind
        return None

    def _way_to(self, state: int, before: npt.NDArray[np.int64], last: int) -> tuple[int, ...]:
        order = [last]
        while state:
            order.append(int(before[state]))
            state -= self._strides[order[-1]]
        return tuple(reversed(order))

    def _fixed_order(self, time: int) -> tuple[int, ...] | None:
        order = [kind for kind, count in enumerate(self._counts) for _ in range(count)][: self._num_stages]
        position = 0
        for stage, kind in enumerate(order[:-1]):
            position = int(self._furthest(time, len(order) - 1 - stage)[kind][position])
            if not position:
                return None
        return tuple(order) if self._ends(time)[order[-1]][position] else None

    def tidied(self, order: tuple[int, ...], slowest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same units with those of one kind one behind the other, if no stage is slower then; and their cut.

        Units of one kind are often in one node: hops between them are short, and its stages follow one another.
        """
        kinds = sorted(set(order))
        grouped = permutations(kinds) if self._is_free and len(kinds) <= _MOST_GROUPED else ()
        orders = [tuple(kind for kind in kinds for _ in range(order.count(kind))) for kinds in grouped]
        cuts = [(cut, tidy) for tidy in orders if (cut := self._most_even_cut(tidy, slowest)) is not None]
        if not cuts:
            cut = self._most_even_cut(order, slowest)
            assert cut is not None, "this order was found with this time"
            return order, cut[1]
        (_, counts), tidy = min(cuts)
        return tidy, counts

    def _most_even_cut(self, order: Sequence[int], slowest: int) -> tuple[float, tuple[int, ...]] | None:
        """With the units in order and no stage slower: the most even cut, of equal ones that closest to the default,
        and how uneven it is; None if there is none."""
        num_layers = self._num_layers
        default_ends = list(accumulate(default_layer_counts(num_layers, self._num_stages)))
        cost = np.full(num_layers + 1, np.inf)
        cost[0] = 0.0
        choices = []
        for stage, kind in enumerate(order):
            times = (self._last if stage == len(order) - 1 else self._middle)[kind]
            share = np.where(times <= slowest, (times / max(slowest, 1)) ** 2, np.inf)
            away = np.abs(np.arange(num_layers + 1) - default_ends[stage]) * _TIE
            total = cost[:, None] + share + away[None, :]
            choices.append(total.argmin(axis=0))
            cost = total.min(axis=0)
        if not np.isfinite(cost[num_layers]):
            return None
        ends = [num_layers]
        for choice in reversed(choices):
            ends.append(int(choice[ends[-1]]))
        ends.reverse()
        return float(cost[num_layers]), tuple(end - first for first, end in pairwise(ends))


_NEVER = np.iinfo(np.int64).max // 4
_TIE = 1e-9
_MOST_GROUPED = 4
