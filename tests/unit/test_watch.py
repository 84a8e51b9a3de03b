"""A stage is lost when it has kept silent while it could have answered, and never for time in which nobody asked."""

from __future__ import annotations

import random

import pytest

from stageline.executor.watch import Watch

HEARTBEAT_S, LOAD_S = 4.0, 60.0


class WaitingEngine:
    """An engine that does nothing but wait, on a virtual clock.

    Args:
        answering: stages that answer pings at once.
    """

    def __init__(self, num_stages: int, answering: set[int], are_loaded: bool = True) -> None:
        self.now_s = 1000.0
        self.num_pings = 0
        self.answering = answering
        self.watch = Watch(HEARTBEAT_S, LOAD_S, num_stages, self.now_s)
        if are_loaded:
            for stage_index in range(num_stages):
                self.watch.loaded(stage_index)

    def wait(self, duration_s: float) -> tuple[int, str] | None:
        """Wait without a message. Returns: the stage that is lost, with the reason, as soon as there is one."""
        end_s = self.now_s + duration_s
        while self.now_s < end_s:
            self.watch.look(self.now_s)
            for stage_index in self.watch.stages_to_ask():
                self.num_pings += 1
                if stage_index in self.answering:
                    self.watch.heard_of(stage_index)
            self.now_s = min(end_s, self.now_s + max(0.001, self.watch.patience_s()))
            self.watch.look(self.now_s)
            if (lost := self.watch.silence()) is not None:
                return lost
        return None


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_silent_stage_is_lost_within_the_timeout(frozen: int) -> None:
    engine = WaitingEngine(3, {0, 1, 2})
    assert engine.wait(100 * HEARTBEAT_S) is None
    engine.answering.remove(frozen)
    frozen_since_s = engine.now_s
    lost = engine.wait(10 * HEARTBEAT_S)
    assert lost is not None and lost[0] == frozen
    assert lost[1] == "no sign of life within --heartbeat-timeout-s 4"
    assert 0.5 * HEARTBEAT_S < engine.now_s - frozen_since_s <= HEARTBEAT_S + 1e-6


def test_stages_that_answer_are_never_lost_and_asked_only_a_few_times_per_timeout() -> None:
    engine = WaitingEngine(2, {0, 1})
    assert engine.wait(100 * HEARTBEAT_S) is None
    assert engine.num_pings <= 2 * 100 * 8 + 2


def test_an_idle_engine_blames_nobody() -> None:
    """The answer to a ping from before the engine went idle may be read only later."""
    engine = WaitingEngine(2, set())
    assert engine.wait(HEARTBEAT_S / 2) is None
    engine.now_s += 1000 * HEARTBEAT_S
    engine.answering = {0, 1}
    engine.watch.look(engine.now_s)
    assert engine.watch.silence() is None
    engine.watch.heard_of(0)
    engine.watch.heard_of(1)
    assert engine.wait(10 * HEARTBEAT_S) is None


def test_a_stage_frozen_while_the_engine_was_idle_is_lost_within_a_timeout_of_the_next_call() -> None:
    engine = WaitingEngine(2, {0, 1})
    assert engine.wait(HEARTBEAT_S) is None
    engine.now_s += 1000 * HEARTBEAT_S
    engine.answering = {0}
    call_s = engine.now_s
    lost = engine.wait(10 * HEARTBEAT_S)
    assert lost is not None and lost[0] == 1
    assert engine.now_s - call_s <= HEARTBEAT_S + 1e-6


def test_silence_adds_up_over_waits_that_are_all_short() -> None:
    engine = WaitingEngine(2, {1})
    rng = random.Random(0)
    start_s, lost = engine.now_s, None
    while lost is None and engine.now_s < start_s + 10 * HEARTBEAT_S:
        lost = engine.wait(rng.uniform(0.001, 0.02))
    assert lost is not None and lost[0] == 0
    assert engine.now_s - start_s <= HEARTBEAT_S + 0.1


def test_any_message_is_a_sign_of_life() -> None:
    engine = WaitingEngine(1, set())
    for _ in range(100):
        assert engine.wait(HEARTBEAT_S / 2) is None
        engine.watch.heard_of(0)


def test_a_stage_that_does_not_come_up_has_the_loading_time() -> None:
    engine = WaitingEngine(2, {0, 1}, are_loaded=False)
    engine.watch.loaded(0)
    start_s = engine.now_s
    lost = engine.wait(10 * LOAD_S)
    assert lost is not None and lost[0] == 1
    assert "come up" in lost[1] and "--load-timeout-s 60" in lost[1]
    assert LOAD_S <= engine.now_s - start_s <= LOAD_S + HEARTBEAT_S


def test_a_stage_may_be_silent_for_longer_while_it_loads() -> None:
    engine = WaitingEngine(2, {0}, are_loaded=False)
    engine.watch.loaded(0)
    engine.watch.progressed(1)
    start_s = engine.now_s
    lost = engine.wait(10 * HEARTBEAT_S)
    assert lost == (1, "no sign of life within 4 times --heartbeat-timeout-s 4")
    assert 3 * HEARTBEAT_S < engine.now_s - start_s <= 4 * HEARTBEAT_S + 1e-6


def test_loading_may_take_any_time_as_long_as_it_goes_on() -> None:
    engine = WaitingEngine(1, {0}, are_loaded=False)
    for _ in range(20):
        engine.watch.progressed(0)
        assert engine.wait(0.9 * LOAD_S) is None
    lost = engine.wait(LOAD_S)
    assert lost is not None and "no progress loading" in lost[1]


def test_a_loaded_stage_may_be_idle_for_any_time() -> None:
    engine = WaitingEngine(1, {0}, are_loaded=False)
    engine.watch.progressed(0)
    engine.watch.loaded(0)
    assert engine.wait(10 * LOAD_S) is None


def test_only_a_stage_that_has_spoken_can_answer() -> None:
    watch = Watch(HEARTBEAT_S, LOAD_S, 2, 0.0)
    watch.progressed(1)
    assert [watch.can_answer(0), watch.can_answer(1)] == [False, True]


def test_a_clock_that_stands_still_loses_nobody() -> None:
    watch = Watch(HEARTBEAT_S, LOAD_S, 1, 5.0)
    for _ in range(1000):
        watch.look(5.0)
        watch.stages_to_ask()
    assert watch.silence() is None
