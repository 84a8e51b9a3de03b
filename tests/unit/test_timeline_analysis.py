"""Where a stage's time goes: the four shares are exact on pictures drawn by hand, and always sum to the window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.timeline.analysis import analyse
from stageline.timeline.span import Span, SpanKind
from stageline.timeline.view import format_report


def _span(stage: int, microbatch: int, kind: SpanKind, start_s: float, end_s: float, tokens: int = 1) -> Span:
    return Span(stage, microbatch, kind, start_s, end_s, tokens, 1)


# s0 |m0 m0|m1 m1|   |     |
# s1 |     |m0   |m1 |m1 sa|      one column is a second; s1 waits for m0 in the first two.
TWO_STAGES = [
    _span(-1, 0, "schedule", 9.9, 10.0),
    _span(0, 0, "forward", 10.0, 12.0, tokens=5),
    _span(0, 1, "forward", 12.0, 14.0, tokens=3),
    _span(0, 1, "send", 14.0, 14.5, tokens=3),
    _span(1, 0, "receive_wait", 10.0, 12.0, tokens=5),
    _span(1, 0, "forward", 12.0, 14.0, tokens=5),
    _span(1, 1, "forward", 14.0, 15.0, tokens=3),
    _span(1, 1, "sample", 15.0, 16.0, tokens=3),
]


def test_the_shares_of_a_drawn_pipeline_are_exact() -> None:
    report = analyse(TWO_STAGES, num_stages=2)
    assert (report.start_s, report.end_s) == (10.0, 16.0)
    first, last = report.stages
    assert (first.busy_s, first.waiting_for_input_s, first.blocked_on_output_s, first.idle_s) == (4.0, 0.0, 0.5, 1.5)
    assert (last.busy_s, last.waiting_for_input_s, last.blocked_on_output_s, last.idle_s) == (4.0, 2.0, 0.0, 0.0)
    # s1 waits while s0 computes its input; after its last send s0 idles while m1 is still on s1.
    assert (last.starved_s, last.in_transit_s) == (2.0, 0.0)
    assert (first.underfilled_s, first.unused_s) == (1.5, 0.0)
    assert first.bubble_fraction == pytest.approx(1 / 3)
    assert report.bubble_fraction == pytest.approx(1 / 3)
    assert (report.num_microbatches, report.num_tokens) == (2, 8)


def test_the_slowest_stage_is_the_busiest() -> None:
    spans = [_span(0, 0, "forward", 0, 1), _span(1, 0, "forward", 1, 4), _span(2, 0, "forward", 4, 5)]
    assert analyse(spans, 3).slowest_stage == 1


def test_waiting_for_a_computed_input_is_the_hop_and_idling_without_work_is_no_want_of_it() -> None:
    spans = [
        _span(-1, 0, "schedule", 0.0, 0.0),
        _span(0, 0, "forward", 0.0, 2.0),
        _span(1, 0, "receive_wait", 0.0, 3.0),
        _span(1, 0, "forward", 3.0, 4.0),
        _span(-1, 1, "schedule", 9.0, 9.0),
        _span(0, 1, "forward", 9.0, 10.0),
    ]
    first, last = analyse(spans, 2, 0.0, 10.0).stages
    assert (last.starved_s, last.in_transit_s) == (2.0, 1.0)
    assert (last.underfilled_s, last.unused_s) == (1.0, 5.0)
    assert (first.underfilled_s, first.unused_s) == (2.0, 5.0)


def test_a_given_window_cuts_spans_at_its_ends() -> None:
    report = analyse(TWO_STAGES, 2, start_s=11.0, end_s=13.0)
    first, last = report.stages
    assert (first.busy_s, last.busy_s, last.waiting_for_input_s) == (2.0, 1.0, 1.0)
    assert (first.num_microbatches, last.num_microbatches) == (1, 0)


def test_microbatches_that_a_recorder_half_forgot_do_not_open_the_window() -> None:
    forgotten = [_span(0, 7, "forward", 1.0, 2.0)]
    assert analyse([*forgotten, *TWO_STAGES], 2).start_s == 10.0


def test_waiting_while_computing_counts_as_computing() -> None:
    spans = [_span(0, 0, "forward", 0, 4), _span(0, 1, "receive_wait", 1, 5), _span(0, 1, "forward", 5, 6)]
    stage = analyse(spans, 1).stages[0]
    assert (stage.busy_s, stage.waiting_for_input_s, stage.idle_s) == (5.0, 1.0, 0.0)


def test_no_spans_make_an_empty_report() -> None:
    report = analyse([], 3)
    assert report.window_s == report.bubble_fraction == report.num_tokens == 0
    assert len(report.stages) == 3


def test_a_pipeline_without_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="0 stages"):
        analyse([], 0)


_KINDS = st.sampled_from(["receive_wait", "forward", "sample", "send", "schedule"])
_SPANS = st.builds(
    lambda stage, microbatch, kind, start, length: _span(stage, microbatch, kind, start, start + length),
    st.integers(-1, 3), st.integers(0, 5), _KINDS, st.floats(0, 50), st.floats(0, 10),
)  # fmt: skip


@given(st.lists(_SPANS, max_size=30))
def test_the_four_shares_sum_to_the_window(spans: list[Span]) -> None:
    for stage in analyse(spans, 4).stages:
        shares = (stage.busy_s, stage.waiting_for_input_s, stage.blocked_on_output_s, stage.idle_s)
        assert min(shares) >= -1e-9
        assert sum(shares) == pytest.approx(stage.window_s, abs=1e-9)
        assert -1e-9 <= stage.bubble_fraction <= 1 + 1e-9
        assert -1e-9 <= stage.starved_s <= stage.waiting_for_input_s + 1e-9
        assert -1e-9 <= stage.underfilled_s <= stage.idle_s + 1e-9


def test_the_table_has_a_row_per_stage_and_names_the_slowest() -> None:
    lines = format_report(analyse(TWO_STAGES, 2)).splitlines()
    assert len(lines) == 5
    assert lines[-2] == (
        "bubble by reason: starved 16.7%, hops 0.0%, blocked on output 4.2%, too little in flight 12.5%, no work 0.0%"
    )
    assert lines[1].split() == ["s0", "2", "8", "66.7%", "0.0%", "8.3%", "25.0%", "33.3%"]
    assert "busiest stage s0" in lines[-1]
    assert len({len(line) for line in lines[:3]}) == 1


def test_the_first_stage_starves_while_its_tokens_are_not_sampled_and_then_they_are_on_their_way() -> None:
    spans = [
        _span(0, 0, "forward", 0.0, 2.0),
        _span(1, 0, "receive_wait", 0.0, 2.0),
        _span(1, 0, "forward", 2.0, 4.0),
        _span(1, 0, "sample", 4.0, 5.0),
        _span(0, 1, "receive_wait", 2.0, 6.0),
        _span(0, 1, "forward", 6.0, 8.0),
    ]
    first, _ = analyse(spans, 2, 0.0, 8.0).stages
    assert (first.waiting_for_input_s, first.starved_s, first.in_transit_s) == (4.0, 3.0, 1.0)
