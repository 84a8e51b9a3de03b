"""A request's time is told by cause, from the microbatches that carried it, however long its answer is."""

from __future__ import annotations

import pytest

from stageline.timeline.journeys import Journey, LatencySplit, journeys
from stageline.timeline.request_journeys import Carriers, RequestTrace, mean_of, split_itl, split_ttft
from stageline.timeline.span import Span

TURN_S = 10.0


def turns(numbers: range) -> dict[int, Journey]:
    """Microbatch n is scheduled at 10 n: 1 s hop, 3 s on s0, 1 s hop, 3 s on s1 and 1 s of sampling."""
    spans = []
    for number in numbers:
        at_s = TURN_S * number
        spans += [
            Span(-1, number, "schedule", at_s, at_s, 1, 1),
            Span(0, number, "forward", at_s + 1, at_s + 4, 1, 1),
            Span(1, number, "forward", at_s + 5, at_s + 8, 1, 1),
            Span(1, number, "sample", at_s + 8, at_s + 9, 1, 1),
        ]
    return {journey.microbatch: journey for journey in journeys(spans, 2)}


def trace(carriers: Carriers, first_token_s: float | None, arrival_s: float = 0.0) -> RequestTrace:
    return RequestTrace("a", arrival_s, 10.0, first_token_s, list(carriers.first), list(carriers.recent))


def carried(numbers: range) -> Carriers:
    carriers = Carriers()
    for number in numbers:
        carriers.add(number)
    return carriers


def test_the_time_to_the_first_token_counts_waiting_chunks_and_the_way_back() -> None:
    # It came at 5, was scheduled at 10, two chunks, and the token of the second was known at 30.
    split = split_ttft(trace(carried(range(1, 9)), 30.0, arrival_s=5.0), turns(range(9)), 2)
    assert split == LatencySplit(25.0, 25.0 - 2 * 9, (2.0, 2.0), (0.0, 0.0), (6.0, 6.0), 2.0)


def test_the_time_between_tokens_is_a_mean_of_the_newest() -> None:
    for last in (4, 8, 100, 1000):
        split = split_itl(trace(carried(range(1, last)), 20.0), turns(range(last)), 2)
        assert split == pytest.approx(LatencySplit(TURN_S, 1.0, (1.0, 1.0), (0.0, 0.0), (3.0, 3.0), 1.0))


def test_what_the_spans_do_not_reach_back_to_is_not_made_up() -> None:
    its = trace(carried(range(1, 9)), 30.0)
    late = turns(range(5, 9))
    assert split_ttft(its, late, 2) is None
    split = split_itl(its, late, 2)
    assert split is not None and split.total_s == pytest.approx(TURN_S)
    assert split_itl(its, turns(range(8, 9)), 2) is None
    assert split_ttft(trace(carried(range(1, 9)), None), turns(range(9)), 2) is None
    assert split_ttft(trace(carried(range(1, 200)), 1000.0), turns(range(200)), 2) is None


def test_a_trace_does_not_grow_with_the_answer() -> None:
    short, long = trace(carried(range(100)), 5.0), trace(carried(range(5000)), 5.0)
    assert len(long.first) + len(long.recent) == len(short.first) + len(short.recent)
    assert long.recent[-1] == 4999


def test_there_is_no_mean_of_nothing() -> None:
    assert mean_of([]) is None
