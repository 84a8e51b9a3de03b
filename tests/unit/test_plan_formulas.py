"""Formulas of the cost model against brute force, and at their limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stageline.cost.communication import all_reduce_s, gather_s, hop_bytes, hop_s
from stageline.cost.hardware import Device, Link, MatmulRate, shipped_hardware
from stageline.cost.model_costs import ItemShape
from stageline.cost.ring import Ring, bubble_fraction, makespan_s, pipeline_beats_sharding
from stageline.cost.roofline import StageDevices, attention_s, item_parts, matrices_s
from stageline.cost.speculation import accepted_tokens, pipelined_tpot, synchronous_tpot
from stageline.cost.stage_time import MicrobatchShape
from stageline.errors import ConfigError

times = st.integers(1, 50).map(float)
LINK = Link(bytes_per_s=100.0, latency_s=1.0, source="made up", latency_source="made up")
DEVICE = Device(
    memory_bytes=1e9,
    memory_bytes_per_s=1000.0,
    flops_per_s={"bf16": 64000.0},
    memory_efficiency=1.0,
    compute_efficiency=1.0,
    microbatch_overhead_s=0.0,
    source="made up",
)
ALONE = StageDevices(DEVICE, 1, LINK)


# ---- makespans, rings ----


@given(st.lists(times, min_size=1, max_size=8), st.integers(1, 6))
def test_equal_stages_take_all_chunks_once_and_the_longest_again_for_each_further_stage(
    chunks: list[float], num_stages: int
) -> None:
    assert makespan_s([[chunk] * num_stages for chunk in chunks]) == sum(chunks) + (num_stages - 1) * max(chunks)


@given(st.lists(times, min_size=1, max_size=6), st.integers(1, 8))
def test_uneven_stages_take_all_stages_once_and_the_slowest_again_for_each_further_chunk(
    stages: list[float], num_chunks: int
) -> None:
    assert makespan_s([stages] * num_chunks) == sum(stages) + (num_chunks - 1) * max(stages)


def test_hops_delay_a_burst_once_not_for_every_chunk() -> None:
    stages, hops = [[2.0, 2.0]] * 5, [[7.0]] * 5
    assert makespan_s(stages, hops) == makespan_s(stages) + 7.0


@given(st.integers(1, 20), st.integers(1, 20))
def test_the_bubble_of_a_burst_is_what_stages_idle_in_its_makespan(num_microbatches: int, num_stages: int) -> None:
    span = makespan_s([[1.0] * num_stages] * num_microbatches)
    assert bubble_fraction(num_microbatches, num_stages) == pytest.approx(1 - num_microbatches / span)


@given(st.lists(times, min_size=1, max_size=5), st.integers(1, 12))
def test_steady_decoding_takes_what_a_simulated_ring_takes(stages: list[float], num_microbatches: int) -> None:
    """A microbatch may enter the first stage again once it has left the last."""
    free, ready = [0.0] * len(stages), [0.0] * num_microbatches
    finished: list[list[float]] = [[] for _ in range(num_microbatches)]
    for _ in range(40):
        for index in range(num_microbatches):
            for stage, time_s in enumerate(stages):
                free[stage] = max(free[stage], ready[index]) + time_s
                ready[index] = free[stage]
            finished[index].append(ready[index])
    simulated_s = (finished[0][-1] - finished[0][19]) / 20
    assert Ring(tuple(stages)).cycle_s(num_microbatches) == pytest.approx(simulated_s)


def test_filling_a_pipeline_takes_the_ring_over_the_slowest_stage() -> None:
    assert Ring((2.0, 2.0, 2.0)).filling_microbatches == 3
    assert Ring((2.0, 2.0, 2.0), hops_s=(0.5, 0.5)).filling_microbatches == 4
    assert Ring((1.0, 4.0)).filling_microbatches == 2
    ring = Ring((2.0, 2.0, 2.0), hops_s=(1.0, 1.0))
    assert ring.idle_fraction(2) == pytest.approx(1 - 2 / 4)
    assert ring.idle_fraction(4) == 0.0


def test_a_wire_slower_than_every_stage_sets_the_pace() -> None:
    ring = Ring((1.0, 1.0), hops_s=(3.0,), wires_s=(3.0,))
    assert ring.cycle_s(4) == 12.0


def test_a_pipeline_beats_shards_when_all_reduces_cost_more_than_the_weights_that_sharding_saves() -> None:
    """70 billion parameters in fp8 on H100: 80 layers, 21 ms to read them on one device, and 8 devices."""
    weights_s = 70.6e9 / 3.35e12
    boundary_s = weights_s * (1 - 1 / 8) / 160
    assert boundary_s == pytest.approx(115e-6, rel=0.01)
    assert not pipeline_beats_sharding(80, boundary_s * 0.999, weights_s, 8)
    assert pipeline_beats_sharding(80, boundary_s * 1.001, weights_s, 8)


# ---- speculation ----


def test_guessing_right_always_yields_one_token_per_guess_and_one_more() -> None:
    assert accepted_tokens(1.0, 4) == 5
    assert accepted_tokens(0.0, 4) == 1
    assert accepted_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)


def test_pipelined_guesses_of_four_beat_a_long_chain_which_beats_those_of_one() -> None:
    chain = synchronous_tpot(8, 0.8, 8, 0.05)
    assert pipelined_tpot(8, 0.8, 4) < chain < pipelined_tpot(8, 0.8, 1)


def test_no_guess_and_no_probability_are_refused() -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        accepted_tokens(1.1, 2)
    with pytest.raises(ConfigError, match="at least 1"):
        pipelined_tpot(4, 0.5, 0)


# ---- communication ----


def test_an_all_reduce_is_its_fixed_time_and_two_ways_around_the_ring_of_devices() -> None:
    fixed = Link(bytes_per_s=100.0, latency_s=1.0, all_reduce_latency_s=3.0, source="", latency_source="")
    assert all_reduce_s(fixed, 4, 400.0) == 3.0 + 2 * 3 / 4 * 400 / 100
    assert all_reduce_s(LINK, 4, 0.0) == 2 * 2 * 1.0  # a tree of messages, up and down
    assert all_reduce_s(LINK, 1, 400.0) == gather_s(LINK, 1, 400.0) == 0.0


def test_eight_chunks_of_2048_tokens_move_168_megabytes_in_one_tensor_and_twice_that_in_two() -> None:
    hidden_bytes = 5120 * 2
    assert hop_bytes(8 * 2048, hidden_bytes) == pytest.approx(168e6, rel=2e-3)
    assert hop_bytes(8 * 2048, hidden_bytes, num_tensors=2) == pytest.approx(336e6, rel=2e-3)


@pytest.mark.parametrize(
    ("tokens", "link", "milliseconds"),
    [(64, "ethernet-1g", 8.5), (64, "ethernet-10g", 0.9), (2048, "ethernet-1g", 268.5), (2048, "ethernet-10g", 26.9)],
)
def test_hops_of_hidden_8192_take_what_their_bytes_take(tokens: int, link: str, milliseconds: float) -> None:
    time_s = hop_s(shipped_hardware().link(link), hop_bytes(tokens, 8192 * 2))
    assert time_s * 1e3 == pytest.approx(milliseconds, abs=0.1)


# ---- roofline ----


def test_few_rows_take_the_reading_of_weights_and_many_the_computing() -> None:
    item = ItemShape(num_dense=500.0)  # 1,000 bytes, 1 s; 1,000 flops a row, 1/64 s
    assert matrices_s(item, ALONE, 1) == matrices_s(item, ALONE, 64) == pytest.approx(1.0)
    assert matrices_s(item, ALONE, 65) == pytest.approx(65 / 64)
    assert matrices_s(item, StageDevices(DEVICE, 4, LINK), 1) == pytest.approx(0.25)


def test_what_several_devices_keep_the_same_of_they_all_compute() -> None:
    rows = 6400
    item = ItemShape(num_dense=700.0, num_kv=100.0, num_copied=200.0, kv_bytes_per_token=1.0, max_kv_shards=2)
    own = 400 / 4 + 100 / 2 + 200
    assert matrices_s(item, StageDevices(DEVICE, 4, LINK), rows) == pytest.approx(2 * rows * own / 64000)
    measured = replace(DEVICE, matmul_rates=(MatmulRate(1, 64000.0),))
    assert matrices_s(item, StageDevices(measured, 4, LINK), rows) == pytest.approx(2 * rows * own / 64000)


def test_measured_rates_replace_the_roofline_and_are_interpolated_between() -> None:
    rates = (MatmulRate(1, 100.0), MatmulRate(4, 300.0))
    where = StageDevices(replace(DEVICE, matmul_rates=rates), 1, LINK)
    item = ItemShape(num_dense=50.0)
    assert matrices_s(item, where, 1) == pytest.approx(1.0)
    assert matrices_s(item, where, 2) == pytest.approx(2 * 100 / 200)
    assert matrices_s(item, where, 8) == pytest.approx(8 * 100 / 300)


def test_decodes_read_their_cache_as_far_as_the_window_goes() -> None:
    shape = MicrobatchShape(2, 0, 2, 2 * 300)
    assert attention_s(ItemShape(kv_bytes_per_token=10.0), ALONE, shape) == pytest.approx(600 * 10 / 1000)
    assert attention_s(ItemShape(kv_bytes_per_token=10.0, window=100), ALONE, shape) == pytest.approx(200 * 10 / 1000)


def test_attention_of_prompts_is_the_same_in_one_piece_and_in_chunks() -> None:
    item = ItemShape(kv_bytes_per_token=1.0, flops_per_pair=8.0)
    whole = attention_s(item, ALONE, MicrobatchShape.of_rows([0], [256]))
    chunks = sum(attention_s(item, ALONE, MicrobatchShape.of_rows([start], [64])) for start in range(0, 256, 64))
    assert whole == pytest.approx(chunks)


def test_a_head_multiplies_only_rows_that_need_a_token() -> None:
    head = ItemShape(num_dense=500.0, output_size=7)
    assert item_parts(head, 1.0, ALONE, MicrobatchShape.of_rows([0], [1000])).matrices_s == pytest.approx(1.0)
    decodes = MicrobatchShape(128, 0, 128, 128)
    assert item_parts(head, 1.0, ALONE, decodes).matrices_s == pytest.approx(2.0)


def test_a_format_that_a_device_lacks_is_computed_in_the_next_wider_one() -> None:
    assert DEVICE.reached_flops_per_s("fp8") == 64000.0
    assert shipped_hardware().device("v100-32gb-sxm").reached_flops_per_s("bf16") == 125e12 * 0.6


# ---- hardware ----


def test_every_number_of_the_shipped_table_has_a_source() -> None:
    table = shipped_hardware()
    assert len(table.devices) >= 30 and len(table.links) >= 15
    for name, device in table.devices.items():
        assert len(device.source) > 8, name
    for name, link in table.links.items():
        assert len(link.source) > 8 and len(link.latency_source) > 6, name


def test_an_unknown_device_is_refused_with_what_comes_close() -> None:
    with pytest.raises(ConfigError, match="did you mean h100-sxm"):
        shipped_hardware().device("h100")
    with pytest.raises(ConfigError, match="ethernet-10g"):
        shipped_hardware().link("10g")
