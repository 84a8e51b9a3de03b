"""A microbatch's way: its parts sum to the whole, on pictures drawn by hand and on any spans at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.timeline.intervals import difference, intersection, length_s, union
from stageline.timeline.journeys import critical_path, journeys, mean_split, split_latency
from stageline.timeline.span import Span, SpanKind
from stageline.timeline.view import format_critical_path, format_split


def _span(stage: int, microbatch: int, kind: SpanKind, start_s: float, end_s: float) -> Span:
    return Span(stage, microbatch, kind, start_s, end_s, 1, 1)


# s0 |m0 m0|m1 m1|
# s1 |     |. m0 m0 m0|. m1 sa|    one column is a second from 10 on; m0 is scheduled at 9, m1 at 10.
DRAWN = [
    _span(-1, 0, "schedule", 8.5, 9.0),
    _span(-1, 1, "schedule", 9.5, 10.0),
    _span(0, 0, "forward", 10.0, 12.0),
    _span(0, 1, "forward", 12.0, 14.0),
    _span(1, 0, "forward", 13.0, 16.0),
    _span(1, 1, "forward", 17.0, 18.0),
    _span(1, 1, "sample", 18.0, 19.0),
]


def test_every_part_of_a_drawn_way_is_exact() -> None:
    first, second = journeys(DRAWN, 2)
    split = mean_split([second], 2)
    assert split is not None
    assert (second.start_s, second.end_s, split.total_s) == (10.0, 19.0, 9.0)
    # It waits for s0 until 12, is computed until 14, waits for s1 until 16, and its input comes at 17.
    assert split.queues_s == (2.0, 2.0)
    assert split.hops_s == (0.0, 1.0)
    assert split.stages_s == (2.0, 1.0)
    assert (split.sampling_s, split.engine_s) == (1.0, 0.0)
    of_first = mean_split([first], 2)
    assert of_first is not None
    assert (of_first.hops_s, of_first.queues_s, of_first.stages_s) == ((1.0, 1.0), (0.0, 0.0), (2.0, 3.0))


def test_a_first_token_is_split_over_the_chunks_of_its_prompt_and_the_engine() -> None:
    chunks = journeys(DRAWN, 2)
    split = split_latency(chunks, 7.0, 20.0, 2)
    # Before the first schedule two seconds, on the way back one; from m1's schedule on, m1 counts.
    assert (split.total_s, split.engine_s) == (13.0, 3.0)
    assert split.hops_s == (1.0, 1.0)
    assert split.queues_s == (2.0, 2.0)
    assert split.stages_s == (2.0, 1.0)
    assert split.sampling_s == 1.0


def test_the_critical_path_of_a_drawn_run_is_exact() -> None:
    path = critical_path(journeys(DRAWN, 2), 2)
    # m1 on s1 waited for m0 there, which waited for m0 on s0: 2 + 1 + 3 + 1 + 2 seconds.
    assert path.stages_s == (2.0, 5.0)
    assert path.between_s == 2.0
    assert format_critical_path(path) == "9.00 s: s1 56%, s0 22%, between stages 22%"


def test_a_decode_waits_for_the_token_before_on_the_critical_path() -> None:
    spans = []
    for number in range(3):
        start_s = 10.0 * number
        spans += [
            _span(-1, number, "schedule", start_s, start_s + 1),
            _span(0, number, "forward", start_s + 1, start_s + 4),
            _span(1, number, "forward", start_s + 5, start_s + 8),
            _span(1, number, "sample", start_s + 8, start_s + 9),
        ]
    path = critical_path(journeys(spans, 2), 2)
    assert path.stages_s == (9.0, 12.0)
    # A hop each, and from each result to the next microbatch's start two seconds.
    assert path.between_s == 3 * 1.0 + 2 * 2.0


def test_microbatches_that_a_stage_forgot_are_left_out() -> None:
    assert [journey.microbatch for journey in journeys([*DRAWN, _span(0, 7, "forward", 30, 31)], 2)] == [0, 1]
    assert journeys([], 2) == []
    assert mean_split([], 2) is None
    assert critical_path([], 2).total_s == 0.0


_TIMES = st.lists(st.floats(0.001, 5.0), min_size=3, max_size=3)


@st.composite
def _runs(draw):
    """Microbatches through three stages, each computing one at a time and in order."""
    free_s, spans = [0.0] * 3, []
    for number in range(draw(st.integers(1, 6))):
        at_s = draw(st.floats(0, 10))
        spans.append(_span(-1, number, "schedule", at_s, at_s + 0.1))
        at_s += 0.1
        for stage, (hop_s, taken_s) in enumerate(zip(draw(_TIMES), draw(_TIMES), strict=True)):
            start_s = max(at_s + hop_s, free_s[stage])
            at_s = free_s[stage] = start_s + taken_s
            spans.append(_span(stage, number, "forward", start_s, at_s))
    return spans


@given(_runs(), st.floats(0, 20), st.floats(0, 40))
def test_the_parts_of_any_time_sum_to_it(spans, start_s, length):
    found = journeys(spans, 3)
    split = split_latency(found, start_s, start_s + length, 3)
    parts = split.engine_s + sum(split.hops_s) + sum(split.queues_s) + sum(split.stages_s) + split.sampling_s
    assert parts == pytest.approx(length, abs=1e-9)
    assert split.engine_s >= -1e-9
    for journey in found:
        own = mean_split([journey], 3)
        assert own is not None and own.total_s == pytest.approx(journey.end_s - journey.start_s, abs=1e-9)


@given(_runs())
def test_the_critical_path_covers_the_run_from_its_cause_to_its_end(spans):
    found = journeys(spans, 3)
    path = critical_path(found, 3)
    assert path.total_s <= max(journey.end_s for journey in found) + 1e-9
    assert path.stages_s[2] > 0


_SETS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@given(_SETS, _SETS)
def test_intervals_are_sets_of_instants(a, b):
    first, second = union(a), union(b)

    def instants(intervals):
        return {step for start, end in intervals for step in range(start, end)}

    assert instants(intersection(first, second)) == instants(first) & instants(second)
    assert instants(difference(first, second)) == instants(first) - instants(second)
    assert length_s(first) == len(instants(first))


def test_a_split_reads_as_one_line() -> None:
    split = mean_split(journeys(DRAWN, 2), 2)
    assert split is not None
    assert format_split(split) == "8000.0 ms: s0 2000.0, s1 2000.0, sampling 500.0, hops 1500.0, queues 2000.0"
