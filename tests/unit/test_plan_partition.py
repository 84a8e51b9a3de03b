"""The partition over units that differ is the best there is: checked against trying everything."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.pipeline.partition import default_layer_counts
from stageline.planner.unit_partition import UnitKind, best_unit_partition


def _kind(
    layers_s: list[int],
    count: int = 1,
    room: float = 1e9,
    embedding_s: int = 0,
    head_s: int = 0,
    head_bytes: float = 0.0,
) -> UnitKind:
    return UnitKind(
        count=count,
        layers_s=tuple(time * 1e-6 for time in layers_s),
        embedding_s=embedding_s * 1e-6,
        head_s=head_s * 1e-6,
        layer_bytes=(1.0,) * len(layers_s),
        embedding_bytes=0.0,
        head_bytes=head_bytes,
        shared_bytes=0.0,
        room_bytes=room,
    )


def _stage_s(kind: UnitKind, first: int, end: int) -> float:
    num_layers = len(kind.layers_s)
    time_s = sum(kind.layers_s[first:end]) + (kind.embedding_s if first == 0 else 0)
    num_bytes = float(end - first)
    if end == num_layers:
        time_s, num_bytes = time_s + kind.head_s, num_bytes + kind.head_bytes
    return time_s if num_bytes <= kind.room_bytes else float("inf")


def _by_trying_everything(kinds: list[UnitKind], num_stages: int) -> float:
    num_layers = len(kinds[0].layers_s)
    units = [kind for kind in kinds for _ in range(kind.count)]
    best = float("inf")
    for order in permutations(units, num_stages):
        for cuts in combinations(range(1, num_layers), num_stages - 1):
            edges = (0, *cuts, num_layers)
            stages = zip(order, edges, edges[1:], strict=False)
            best = min(best, max(_stage_s(kind, first, end) for kind, first, end in stages))
    return best


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[UnitKind], int]:
    num_layers, num_kinds = draw(st.integers(2, 6)), draw(st.integers(1, 3))
    kinds = []
    for _ in range(num_kinds):
        speed = draw(st.integers(1, 9))
        kinds.append(
            _kind(
                [speed * draw(st.integers(1, 2)) for _ in range(num_layers)],
                count=draw(st.integers(1, 2)),
                room=draw(st.integers(1, 7)),
                embedding_s=draw(st.integers(0, 5)),
                head_s=draw(st.integers(0, 20)),
                head_bytes=draw(st.integers(0, 2)),
            )
        )
    return kinds, draw(st.integers(1, min(num_layers, sum(kind.count for kind in kinds))))


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_no_number_choice_order_or_cut_of_units_has_a_faster_slowest_stage(case: tuple[list[UnitKind], int]) -> None:
    kinds, most_stages = case
    numbers = range(1, most_stages + 1)
    best_s = min(_by_trying_everything(kinds, number) for number in numbers)
    partitions = [found for number in numbers if (found := best_unit_partition(kinds, number)) is not None]
    if best_s == float("inf"):
        assert not partitions
        return
    found = min(partitions, key=lambda partition: partition.slowest_s)
    assert found.slowest_s == pytest.approx(best_s)
    edges = [sum(found.layer_counts[:stage]) for stage in range(len(found.kinds) + 1)]
    stages = list(zip(found.kinds, edges, edges[1:], strict=False))
    assert max(_stage_s(kinds[kind], first, end) for kind, first, end in stages) == pytest.approx(best_s)
    assert all(found.kinds.count(index) <= kind.count for index, kind in enumerate(kinds))


@pytest.mark.parametrize(("num_layers", "num_stages"), [(61, 4), (126, 4), (30, 2), (80, 16), (61, 2)])
def test_equal_units_and_layers_get_the_default_rule(num_layers: int, num_stages: int) -> None:
    found = best_unit_partition([_kind([5] * num_layers, count=num_stages)], num_stages)
    assert found is not None and found.layer_counts == default_layer_counts(num_layers, num_stages)


def test_sixteen_units_that_all_differ_are_chosen_and_ordered() -> None:
    kinds = [_kind([10 + 3 * unit] * 40, room=12) for unit in range(16)]
    found = best_unit_partition(kinds, 6)
    assert found is not None
    assert set(found.kinds) == {0, 1, 2, 3, 4, 5}, "the ten slowest are left out"


def test_units_of_one_kind_follow_one_another_where_that_costs_nothing() -> None:
    found = best_unit_partition([_kind([2] * 12, count=2), _kind([4] * 12, count=2)], 4)
    assert found is not None
    assert sorted(found.kinds) in (list(found.kinds), list(reversed(found.kinds)))


def test_more_units_than_sets_can_be_tried_keep_their_order() -> None:
    kinds = [_kind([3 + unit % 2] * 40) for unit in range(18)]
    found = best_unit_partition(kinds, 18)
    assert found is not None and found.kinds == tuple(range(18))
