"""Spans of other machines are put on the engine's clock, as exactly as the network lets it; in virtual time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.executor.clock_offsets import ClockOffsets
from stageline.timeline.span import Span


class Network:
    """Pings on a virtual clock; the stage's clock is ahead by some seconds, and may drift."""

    def __init__(self, ahead_s: float, drift: float = 0.0) -> None:
        self.offsets = ClockOffsets(2)
        self.now_s = 100.0
        self._ahead_s, self._drift = ahead_s, drift

    @property
    def ahead_s(self) -> float:
        return self._ahead_s + self._drift * self.now_s

    def ping(self, there_s: float, back_s: float) -> None:
        asked_s = self.now_s
        self.now_s += there_s
        told_s = self.now_s + self.ahead_s
        self.now_s += back_s
        self.offsets.heard(1, asked_s, told_s, self.now_s)


_WAYS = st.lists(st.tuples(st.floats(1e-5, 1.0), st.floats(1e-5, 1.0)), min_size=1, max_size=60)


@given(st.floats(-1e6, 1e6), _WAYS)
def test_an_offset_is_known_to_half_of_the_quickest_round_trip(ahead_s: float, ways: list[tuple[float, float]]) -> None:
    network = Network(ahead_s)
    for there_s, back_s in ways:
        network.ping(there_s, back_s)
    quickest_s = min(there_s + back_s for there_s, back_s in ways[-32:])
    # "None" is an answer as well, where it may be none.
    assert abs(network.offsets.ahead_s(1) - ahead_s) <= quickest_s + 1e-9
    if abs(ahead_s) > quickest_s:
        assert abs(network.offsets.ahead_s(1) - ahead_s) <= quickest_s / 2 + 1e-9


@given(_WAYS)
def test_stages_that_share_the_engine_s_clock_are_never_moved(ways: list[tuple[float, float]]) -> None:
    network = Network(0.0)
    spans = [Span(1, 7, "forward", 3.0, 4.0, 1, 1)]
    for there_s, back_s in ways:
        network.ping(there_s, back_s)
        assert network.offsets.ahead_s(1) == 0.0
        assert network.offsets.in_engine_time(1, spans) == spans


def test_a_slow_answer_changes_nothing_and_a_drift_is_followed() -> None:
    network = Network(5000.0, drift=1e-4)
    for number in range(200):
        network.ping(0.001, 0.001)
        network.ping(0.4, 0.001)
        assert abs(network.offsets.ahead_s(1) - network.ahead_s) < 0.003, number


def test_spans_lie_where_the_engine_would_have_seen_them() -> None:
    network = Network(-40.0)
    network.ping(0.001, 0.001)
    [moved] = network.offsets.in_engine_time(1, [Span(1, 7, "forward", 3.0, 4.5, 2, 1)])
    assert (moved.start_s, moved.end_s) == (pytest.approx(43.0), pytest.approx(44.5))
    assert (moved.microbatch, moved.kind, moved.num_tokens) == (7, "forward", 2)
    assert network.offsets.input_ahead_s(1) == pytest.approx(40.0)
    assert network.offsets.input_ahead_s(0) == 0.0


def test_a_stage_is_told_of_its_input_s_clock_when_there_is_news() -> None:
    network = Network(-40.0)
    assert network.offsets.news_of_inputs() == []
    network.ping(0.001, 0.001)
    assert network.offsets.news_of_inputs() == [(1, pytest.approx(40.0))]
    network.ping(0.001, 0.00101)
    assert network.offsets.news_of_inputs() == []


@pytest.mark.parametrize(
    ("asked_s", "told_s", "heard_s"),
    [(10.0, 5.0, 9.0), (1.0, math.nan, 2.0), (1.0, math.inf, 2.0), (math.nan, 1.0, 2.0), (-math.inf, 1.0, 2.0)],
)
def test_nonsense_is_not_believed(asked_s: float, told_s: float, heard_s: float) -> None:
    offsets = ClockOffsets(1)
    offsets.heard(0, asked_s, told_s, heard_s)
    assert offsets.ahead_s(0) == 0.0
    assert offsets.in_engine_time(0, [Span(0, 1, "forward", 3.0, 4.0, 1, 1)])[0].start_s == 3.0
