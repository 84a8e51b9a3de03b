"""A stage's totals: every second is in one state, every microbatch in one kind, and a snapshot is of one moment."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.timeline.histogram import HistogramCounter
from stageline.timeline.stage_counters import StageAccount, StageCounters, kind_of_microbatch

STATES = ["busy", "starved", "blocked", "preparing", "idle"]


def bubbles_and_busy_s(counters: StageCounters) -> float:
    return sum(getattr(counters, f"{state}_s") for state in STATES)


@given(
    st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 1000))), st.integers(0, 1000), st.integers(0, 10**6)
)
def test_busy_and_bubbles_sum_to_the_time_that_passed(steps, last_wait, start) -> None:
    account = StageAccount(1)
    account.enter("starved", 3.0)  # while it loads; not accounted for
    now, expected = start, dict.fromkeys(STATES, 0)
    account.start(float(now))
    state = "starved"
    for next_state, duration in steps:
        expected[state] += duration
        now += duration
        account.enter(next_state, float(now))
        state = next_state
    expected[state] += last_wait
    counters = account.snapshot(float(now + last_wait))
    assert {name: getattr(counters, f"{name}_s") for name in STATES} == expected
    assert bubbles_and_busy_s(counters) == counters.elapsed_s == sum(expected.values())


def test_totals_never_go_back_when_the_reader_looked_at_its_clock_too_early() -> None:
    account = StageAccount(0)
    account.start(0.0)
    account.enter("busy", 1.0)
    before = account.snapshot(2.0)
    account.enter("idle", 3.0)
    account.enter("busy", 4.0)
    late = account.snapshot(3.5)
    assert (before.busy_s, late.busy_s, late.idle_s) == (1.0, 2.0, 2.0)
    assert bubbles_and_busy_s(late) == late.elapsed_s == 4.0


def test_before_a_stage_is_ready_no_time_passes() -> None:
    account = StageAccount(0)
    account.enter("busy", 10.0)
    counters = account.snapshot(99.0)
    assert counters.elapsed_s == 0.0 and bubbles_and_busy_s(counters) == 0.0


def test_microbatches_count_once_and_by_kind() -> None:
    account = StageAccount(0)
    account.computed(num_rows=4, num_decode_rows=4, num_tokens=4, elapsed_s=0.003)
    account.computed(num_rows=1, num_decode_rows=0, num_tokens=100, elapsed_s=0.2)
    account.computed(num_rows=3, num_decode_rows=2, num_tokens=50, elapsed_s=0.1)
    account.computed(num_rows=2, num_decode_rows=2, num_tokens=2, elapsed_s=100.0)
    counters = account.snapshot(0.0)
    assert [counters.prefill.time_s.num_values, counters.decode.time_s.num_values] == [1, 2]
    assert counters.mixed.num_tokens == 50 and counters.decode.num_rows == 6
    assert counters.decode.time_s.counts[-1] == 1, "what is above all bounds is counted, too"
    assert counters.num_microbatches == 4 and counters.num_tokens == 156
    assert kind_of_microbatch(1, 1) == "decode"


@pytest.mark.parametrize("latency_s", [None, -0.1, math.nan, math.inf, 1e9])
def test_a_latency_that_clocks_could_not_tell_is_not_counted_but_its_bytes_are(latency_s) -> None:
    account = StageAccount(1)
    account.received(1000, latency_s)
    account.received(24, 0.002)
    received = account.snapshot(0.0).received
    assert (received.num_messages, received.num_bytes) == (2, 1024)
    assert (received.latency_s.num_values, received.latency_s.total) == (1, 0.002)


def test_counters_survive_the_wire() -> None:
    account = StageAccount(2)
    account.start(0.0)
    account.sent(7)
    counters = account.snapshot(1.5, resident_bytes=4096)
    frame = msgspec.msgpack.encode(counters)
    assert msgspec.msgpack.decode(frame, type=StageCounters) == counters


@given(st.lists(st.floats(-1, 20)), st.lists(st.integers(1, 15), min_size=1, unique=True))
def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it(values, bounds) -> None:
    bounds = tuple(float(bound) for bound in sorted(bounds))
    counter = HistogramCounter(bounds)
    for value in values:
        counter.observe(value)
    histogram = counter.snapshot()
    assert histogram.num_values == len(values)
    for index, bound in enumerate(bounds):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in values)
    assert histogram.total == pytest.approx(sum(values))
