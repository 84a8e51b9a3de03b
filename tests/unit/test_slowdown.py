"""Injected faults: what is asked is understood, or refused with the way out; a stretched time is as long as asked."""

from __future__ import annotations

import pytest

from stageline.config.environment import Variable, inject_slowdown
from stageline.errors import ConfigError
from stageline.pipeline.slowdown import AS_FAST_AS_IT_IS, Slowdown, StageSlowdown, parse_slowdown
from stageline.worker.stretch import Stretch


def test_stages_and_links_are_slowed_as_asked():
    variable = inject_slowdown({"STAGELINE_INJECT_SLOWDOWN": "s1:1.5, link0:2ms,link1:250us"})
    slowdown = parse_slowdown(variable, 3)
    stages = (AS_FAST_AS_IT_IS, StageSlowdown(1.5), AS_FAST_AS_IT_IS)
    assert slowdown == Slowdown(stages, (pytest.approx(2e-3), pytest.approx(2.5e-4)))
    assert [slowdown.input_delay_s(stage) for stage in range(3)] == [0.0, pytest.approx(2e-3), pytest.approx(2.5e-4)]


@pytest.mark.parametrize("environ", [{}, {"STAGELINE_INJECT_SLOWDOWN": ""}])
def test_nothing_is_slowed_unasked(environ):
    assert parse_slowdown(inject_slowdown(environ), 2) == Slowdown((AS_FAST_AS_IT_IS,) * 2, (0.0,))


def test_a_slowdown_may_begin_with_a_later_microbatch():
    slowdown = parse_slowdown(Variable("STAGELINE_INJECT_SLOWDOWN", "s1:3@m50"), 2)
    assert slowdown.stages == (AS_FAST_AS_IT_IS, StageSlowdown(3.0, 50))
    clock = CountingClock()
    stretch = Stretch(slowdown.stages[1], clock)
    for microbatch, longer in ((49, False), (50, True)):
        stretch.at(microbatch)
        stretch.begin()
        clock.time_s += 4e-5
        before_s = clock.time_s
        stretch.end()
        assert (clock.time_s - before_s > 5e-5) is longer


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("s2:1.5", "s0 to s1"),
        ("s1:0.5", "at least 1"),
        ("link1:2ms", "1 links"),
        ("link0:2", "such as link0:2ms"),
        ("s1:2@50", "such as s1:1.5"),
        ("s1=2", "such as s1:1.5"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name_and_the_way_out(value, told):
    with pytest.raises(ConfigError, match=told) as caught:
        parse_slowdown(Variable("STAGELINE_INJECT_SLOWDOWN", value), 2)
    assert str(caught.value).startswith(f"STAGELINE_INJECT_SLOWDOWN: '{value}'")


class CountingClock:
    """Each look at it takes a microsecond."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        self.time_s += 1e-6
        return self.time_s


def test_a_stretched_time_is_as_many_times_as_long_and_what_comes_between_is_not_stretched():
    clock = CountingClock()
    stretch = Stretch(StageSlowdown(3.0), clock)
    stretch.begin()
    clock.time_s += 4e-5
    before_s = clock.time_s
    stretch.end()
    assert clock.time_s - before_s == pytest.approx(8e-5, abs=1e-5)
    clock.time_s += 1e-5
    stretch.end()
    assert clock.time_s - before_s == pytest.approx(8e-5 + 3e-5, abs=2e-5)
