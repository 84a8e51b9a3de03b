"""The recorder keeps the newest spans, in order, whatever was recorded before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.timeline.recorder import Recorder
from stageline.timeline.span import Span


def _span(number: int) -> Span:
    return Span(0, number, "forward", float(number), number + 0.5, 1, 1)


@given(capacity=st.integers(1, 9), num_spans=st.integers(0, 40))
def test_the_newest_spans_are_kept_in_order(capacity: int, num_spans: int) -> None:
    recorder = Recorder(capacity)
    spans = [_span(number) for number in range(num_spans)]
    for span in spans:
        recorder.record(span)
    assert recorder.spans() == spans[-capacity:]
    assert recorder.num_recorded == num_spans
    assert recorder.num_overwritten == max(0, num_spans - capacity)


def test_since_leaves_out_spans_that_ended_before() -> None:
    recorder = Recorder(8)
    for number in range(4):
        recorder.record(_span(number))
    assert [span.microbatch for span in recorder.spans(since_s=1.5)] == [2, 3]
    assert [span.microbatch for span in recorder.spans(since_s=1.4)] == [1, 2, 3]


def test_a_recorder_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity 0"):
        Recorder(0)


@given(capacity=st.integers(1, 9), num_spans=st.integers(0, 20), most=st.integers(0, 12))
def test_the_newest_so_many_are_told(capacity: int, num_spans: int, most: int) -> None:
    recorder = Recorder(capacity)
    for number in range(num_spans):
        recorder.record(_span(number))
    kept = recorder.spans()
    assert recorder.spans(most=most) == (kept[-most:] if most else [])
    assert recorder.spans(since_s=3.0, most=most) == ([s for s in kept if s.end_s > 3.0][-most:] if most else [])
