"""When a pipeline that lost a stage is started again: as long as it serves in between, and where that is wanted."""

from __future__ import annotations

from stageline.engine.revival import Revival
from stageline.errors import WorkerLost

LOSS = WorkerLost(1, "its process was killed")
LONG_S = 100.0


def test_nothing_is_revived_unless_asked_for() -> None:
    revival = Revival(is_wanted=False)
    revival.began_to_serve(0.0)
    assert not revival.allows(LOSS, is_remote=True, now_s=LONG_S)


def test_what_never_came_up_here_is_not_tried_again_but_another_machine_may_come_back() -> None:
    assert not Revival(is_wanted=True).allows(LOSS, is_remote=False, now_s=1.0)
    assert Revival(is_wanted=True).allows(LOSS, is_remote=True, now_s=1.0)


def test_a_pipeline_that_serves_in_between_is_revived_for_ever() -> None:
    revival, now_s = Revival(is_wanted=True), 0.0
    for _ in range(100):
        revival.began_to_serve(now_s)
        now_s += LONG_S
        assert revival.allows(LOSS, is_remote=False, now_s=now_s)


def test_the_first_starts_follow_at_once_and_those_after_them_ever_later() -> None:
    revival, pauses_s = Revival(is_wanted=True), []
    revival.began_to_serve(0.0)
    while revival.allows(LOSS, is_remote=False, now_s=1.0):
        revival.began_to_serve(1.0)
        pauses_s.append(revival.pause_s)
    assert pauses_s[0] == 0.0 and pauses_s == sorted(pauses_s) and pauses_s[-1] >= 1.0 and sum(pauses_s) < 10.0
    revival.began_to_serve(0.0)
    assert revival.allows(LOSS, is_remote=False, now_s=LONG_S) and revival.pause_s == 0.0


def test_one_that_breaks_again_and_again_is_given_up() -> None:
    revival, num_allowed = Revival(is_wanted=True), 0
    revival.began_to_serve(0.0)
    while revival.allows(LOSS, is_remote=False, now_s=float(num_allowed)):
        revival.began_to_serve(float(num_allowed))
        num_allowed += 1
        assert not revival.is_exhausted
    assert 1 <= num_allowed <= 10 and revival.is_exhausted
