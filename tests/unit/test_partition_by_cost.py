"""The partition by cost is the best there is: as good as trying every cut, for both objectives, within every memory."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ConfigError
from stageline.pipeline.partition import default_layer_counts
from stageline.pipeline.partition_by_cost import (
    OBJECTIVES,
    ItemBytes,
    ItemCosts,
    StageRoom,
    partition_by_cost,
    stage_times_s,
)


def _all_counts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), num_stages - 1)
    ends = [(0, *cut, num_layers) for cut in cuts]
    return [tuple(b - a for a, b in pairwise(cut)) for cut in ends]


def _times(costs: ItemCosts, rooms: list[StageRoom], counts: tuple[int, ...]) -> list[int]:
    """Nanoseconds, every item rounded on its own."""
    times, first = [], 0
    for stage, (count, room) in enumerate(zip(counts, rooms, strict=True)):
        items = list(costs.layers_s[first : first + count])
        items += [costs.embedding_s] * (stage == 0) + [costs.head_s] * (stage == len(rooms) - 1)
        times.append(sum(round(item / room.speed * 1e9) for item in items))
        first += count
    return times


def _fits(sizes: ItemBytes, rooms: list[StageRoom], counts: tuple[int, ...]) -> bool:
    first = 0
    for stage, (count, room) in enumerate(zip(counts, rooms, strict=True)):
        held = sum(sizes.layers[first : first + count])
        held += sizes.embedding * (stage == 0) + sizes.head * (stage == len(rooms) - 1)
        if room.memory_bytes is not None and held > room.memory_bytes:
            return False
        first += count
    return True


def _rank(costs: ItemCosts, rooms: list[StageRoom], counts: tuple[int, ...], objective: str) -> tuple[int, ...]:
    times = _times(costs, rooms, counts)
    wanted = (max(times),) if objective == "throughput" else (sum(times), max(times))
    defaults = default_layer_counts(sum(counts), len(counts))
    away = sum(abs(a - b) for a, b in zip(accumulate(counts), accumulate(defaults), strict=True))
    return (*wanted, sum(time * time for time in times), away)


@st.composite
def _instances(draw):
    num_stages = draw(st.integers(1, 5))
    num_layers = draw(st.integers(num_stages, 9))
    # Few different values: ties and dominated ends are what goes wrong.
    time_s = st.sampled_from([0.0, 0.001, 0.002, 0.0035, 0.02])
    costs = ItemCosts(draw(time_s), tuple(draw(time_s) for _ in range(num_layers)), draw(time_s))
    num_bytes = st.integers(0, 6)
    sizes = ItemBytes(draw(num_bytes), tuple(draw(num_bytes) for _ in range(num_layers)), draw(num_bytes))
    memory = st.one_of(st.none(), st.integers(0, 30))
    speed = st.sampled_from([0.5, 1.0, 1.0, 3.0])
    rooms = [StageRoom(draw(speed), draw(memory)) for _ in range(num_stages)]
    return costs, rooms, sizes


@settings(max_examples=400, deadline=None)
@given(_instances(), st.sampled_from(OBJECTIVES))
def test_it_is_as_good_as_trying_every_cut(instance, objective):
    costs, rooms, sizes = instance
    possible = [
        counts for counts in _all_counts(len(costs.layers_s), len(rooms)) if _fits(sizes, rooms, counts)
    ]
    if not possible:
        with pytest.raises(ConfigError, match="no partition fits"):
            partition_by_cost(costs, rooms, sizes, objective)
        return
    found = partition_by_cost(costs, rooms, sizes, objective)
    assert found in possible
    best = min(_rank(costs, rooms, counts, objective) for counts in possible)
    assert _rank(costs, rooms, found, objective) == best


@given(st.integers(1, 12), st.integers(0, 40))
def test_layers_that_cost_the_same_are_cut_as_evenly_as_by_the_default_rule(num_stages, extra):
    costs = ItemCosts(0.0, (0.0013,) * (num_stages + extra), 0.0)
    counts = partition_by_cost(costs, [StageRoom()] * num_stages)
    assert counts == default_layer_counts(num_stages + extra, num_stages)


def test_a_heavy_head_takes_layers_from_the_last_stage():
    costs = ItemCosts(0.0, (0.001,) * 24, 0.0091)
    assert partition_by_cost(costs, [StageRoom()] * 2) == (17, 7)
    assert partition_by_cost(costs, [StageRoom()] * 4) == (7, 8, 8, 1)


def test_a_stage_of_twice_the_speed_gets_twice_the_layers():
    costs = ItemCosts(0.0, (0.001,) * 30, 0.0)
    assert partition_by_cost(costs, [StageRoom(2.0), StageRoom()]) == (20, 10)
    assert stage_times_s(costs, [StageRoom(2.0), StageRoom()], (20, 10)) == pytest.approx((0.010, 0.010))


def test_latency_puts_as_much_as_fits_on_the_fastest_stage():
    costs = ItemCosts(0.0, (0.001,) * 10, 0.001)
    sizes = ItemBytes(0, (10,) * 10, 0)
    rooms = [StageRoom(), StageRoom(4.0, 60), StageRoom()]
    assert partition_by_cost(costs, rooms, sizes, "latency") == (2, 6, 2)


def test_memory_moves_layers_even_where_time_would_not():
    costs = ItemCosts(0.0, (0.001,) * 8, 0.0)
    sizes = ItemBytes(50, (10,) * 8, 0)
    assert partition_by_cost(costs, [StageRoom(1.0, 70), StageRoom(1.0, 70)], sizes) == (2, 6)


def test_what_cannot_fit_is_refused_with_both_numbers_and_the_way_out():
    sizes = ItemBytes(50, (10,) * 8, 5)
    with pytest.raises(ConfigError) as caught:
        partition_by_cost(ItemCosts(0.0, (0.001,) * 8, 0.0), [StageRoom(1.0, 70), StageRoom(1.0, 50)], sizes)
    for part in ["8 layers", "135 bytes", "room for 6 layers", "s0 2 in 70 bytes", "s1 4 in 50 bytes", "more stages"]:
        assert part in str(caught.value)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"3 stages for 2 layers"):
        partition_by_cost(ItemCosts(0.0, (0.001,) * 2, 0.0), [StageRoom()] * 3)


def test_the_deepest_pipeline_of_a_large_model_is_cut_as_well_as_its_lower_bound_allows():
    costs = ItemCosts(0.0, tuple(0.001 + 1e-6 * layer for layer in range(126)), 0.0)
    rooms = [StageRoom()] * 64
    counts = partition_by_cost(costs, rooms)
    assert sum(counts) == 126 and min(counts) >= 1
    # 126 layers on 64 stages: some stage has two, and the cheapest pairs are at the front.
    slowest = max(stage_times_s(costs, rooms, counts))
    assert slowest == pytest.approx(costs.layers_s[122] + costs.layers_s[123])
