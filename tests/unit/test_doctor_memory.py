"""Which stage is out of memory is told with the layers to move, and the cut that is offered fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.doctor.memory import check_memories, fitting_counts, memories_of, needed_bytes
from stageline.errors import ConfigError
from stageline.pipeline.partition_by_cost import ItemBytes

GIB = 2**30
SIZES = ItemBytes(embedding=GIB, layers=(GIB,) * 8, head=GIB)


def test_the_stage_and_the_layer_to_move_are_named_with_what_is_there() -> None:
    memories = memories_of(["this machine", "node 1"], [10 * GIB, 4 * GIB])
    where = r"out of memory on node 1: s1 \(layers 4 to 7\).*5\.0 GiB, and 4\.0 GiB"
    with pytest.raises(ConfigError, match=where) as e:
        check_memories(memories, (4, 4), SIZES)
    assert "move layer 4 from s1 to s0: --pp-layer-partition 5,3" in str(e.value)
    check_memories(memories, (5, 3), SIZES)


def test_stages_of_one_machine_share_its_memory() -> None:
    memories = memories_of(["this machine", "this machine", "node 1"], [4 * GIB, 4 * GIB, 20 * GIB])
    with pytest.raises(ConfigError, match=r"this machine: s0 \(layers 0 to 2\), s1 \(layers 3 to 5\)") as e:
        check_memories(memories, (3, 3, 2), SIZES)
    assert "--pp-layer-partition 1,2,5" in str(e.value) or "--pp-layer-partition 2,1,5" in str(e.value)


def test_where_nothing_fits_both_sums_are_told() -> None:
    memories = memories_of(["this machine", "node 1"], [4 * GIB, 4 * GIB])
    with pytest.raises(ConfigError, match=r"no cut fits, for all of it takes 10\.0 GiB and 8\.0 GiB are free"):
        check_memories(memories, (4, 4), SIZES)


def test_a_machine_that_nobody_asked_is_not_judged() -> None:
    check_memories(memories_of(["this machine", "node 1"], [5 * GIB, None]), (4, 4), SIZES)


@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=12),
    st.lists(st.tuples(st.integers(1, 2), st.integers(5, 60)), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_what_is_offered_has_all_layers_and_fits(
    layers: list[int], machines: list[tuple[int, int]], end: int
) -> None:
    names = [f"m{place}" for place, (num_stages, _) in enumerate(machines) for _ in range(num_stages)]
    free = [room for num_stages, room in machines for _ in range(num_stages)]
    memories = memories_of(names, free)
    sizes = ItemBytes(end, tuple(layers), end)
    try:
        counts = fitting_counts(memories, sizes)
    except ConfigError:
        return
    assert sum(counts) == len(layers) and min(counts) >= 1
    assert all(needed_bytes(memory, counts, sizes) <= (memory.free_bytes or 0) for memory in memories)
