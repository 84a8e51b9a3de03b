"""Events: a short memory where a flood of one kind hides nothing else; a stage that stays slow is noticed once."""

from __future__ import annotations

import msgspec

from stageline.engine.events import EventLog, StageShares
from stageline.timeline.stage_counters import StageAccount, StageCounters


def test_the_newest_are_kept_newest_first() -> None:
    log = EventLog(most=3)
    for number in range(5):
        log.add(float(number), "preemption" if number % 2 else "abort", f"event {number}")
    assert [event.text for event in log.newest_first()] == ["event 4", "event 3", "event 2"]


def test_equal_kinds_in_a_row_are_one_event_that_counts() -> None:
    log = EventLog(most=3)
    log.add(0.0, "preemption", "first")
    for number in range(100):
        log.add(1.0 + number, "abort", f"abort {number}")
    newest, oldest = log.newest_first()
    assert (newest.text, newest.num_times, newest.time_s) == ("abort 99", 100, 100.0)
    assert (oldest.text, oldest.num_times) == ("first", 1)


def test_slow_stages_are_told_apart() -> None:
    log = EventLog()
    log.add(0.0, "slow_stage", "s0", 0)
    log.add(1.0, "slow_stage", "s1", 1)
    assert [event.num_times for event in log.newest_first()] == [1, 1]


def counters(*busy_s: float) -> list[StageCounters]:
    fresh = [StageAccount(index).snapshot(0.0) for index in range(len(busy_s))]
    return [msgspec.structs.replace(one, busy_s=busy) for one, busy in zip(fresh, busy_s, strict=True)]


def looks(*speeds: tuple[float, ...]) -> list[list[int]]:
    """The stages told at each look; between two looks every stage was busy for so many seconds."""
    shares, busy_s, told = StageShares(), [0.0] * len(speeds[0]), []
    for speed in speeds:
        busy_s = [busy + more for busy, more in zip(busy_s, speed, strict=True)]
        told.append([stage for stage, _ in shares.slower(counters(*busy_s))])
    return told


def test_a_stage_that_stays_slow_is_told_once() -> None:
    assert looks((2, 2), (2, 2), (2, 4), (2, 4), (2, 4)) == [[], [], [], [1], []]


def test_one_slow_moment_is_no_news() -> None:
    assert looks((2, 2), (2, 4), (2, 2), (2, 4), (2, 2)) == [[]] * 5


def test_more_work_for_all_is_no_slow_stage() -> None:
    assert looks((2, 3), (20, 30), (20, 30), (2, 3)) == [[]] * 4


def test_looks_at_little_work_are_put_together() -> None:
    assert looks((2, 2), (0.1, 0.9), (0.1, 0.9), (2, 4), (0, 0)) == [[], [], [], [1], []]


def test_one_stage_has_nobody_to_be_compared_with() -> None:
    assert looks((2,), (20,), (20,), (20,)) == [[]] * 4
