"""A better cut is told once, moved only if asked for, and refused while the pipeline runs if it does not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stageline.engine.balancer import Balancer
from stageline.engine.rebalance import BetterCut, RebalancePolicy
from stageline.errors import ConfigError
from stageline.pipeline.partition import stages_of
from stageline.timeline.stage_counters import StageAccount, StageCounters

LOOK_S = 1.0
BETTER = BetterCut((10, 14), (0.010, 0.010), (0.012, 0.008))


class Executor:
    """Times items while it is told to, and counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.is_timing = False

    def collect_item_times(self, goes_on: bool) -> list[Any]:
        self.num_asked += 1
        was_timing, self.is_timing = self.is_timing, goes_on
        return [SimpleNamespace(num_microbatches=20 if was_timing else 0)] * 2


class Stages:
    """Two stages that work: the second takes so many times as long as the first, and both decode."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._accounts = [StageAccount(index) for index in range(2)]
        for account in self._accounts:
            account.start(0.0)

    def work(self, times: float) -> tuple[list[StageCounters], float]:
        start_s, self.now_s = self.now_s, self.now_s + LOOK_S
        for account, busy_s in zip(self._accounts, (0.9 / times, 0.9), strict=True):
            account.enter("busy", start_s)
            account.enter("idle", start_s + busy_s)
            for _ in range(20):
                account.computed(4, 4, 4, busy_s / 20)
        return [account.snapshot(self.now_s) for account in self._accounts], self.now_s


def make(monkeypatch: pytest.MonkeyPatch, executor: Executor, moves: bool, refusal: str = "") -> Balancer:
    def elsewhere(layout: Any, partition: Any) -> Any:
        if refusal:
            raise ConfigError(refusal)
        return SimpleNamespace(partition=partition)

    rules: Any = SimpleNamespace(elsewhere=elsewhere)
    layout: Any = SimpleNamespace(partition=stages_of((12, 12)), layer_counts=(12, 12))
    clock: Any = SimpleNamespace(now_s=lambda: 0.0)
    policy = RebalancePolicy(gain_fraction=0.1, patience_s=4 * LOOK_S)
    balancer = Balancer(executor, rules, layout, policy, moves, clock)  # type: ignore[arg-type]
    monkeypatch.setattr(balancer, "_better_cut", lambda measured: BETTER)
    return balancer


@pytest.mark.parametrize("moves", [False, True])
def test_it_is_told_once_after_a_while_and_moved_only_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    executor, stages = Executor(), Stages()
    balancer = make(monkeypatch, executor, moves)
    told = [[notice.text for notice in balancer.look(*stages.work(2.0))] for _ in range(12)]
    said = [number for number, notices in enumerate(told) if notices]
    # The first look turns timing on, the second finds the gain, four more make it last.
    assert said == [5]
    [text] = told[5]
    assert "s0 12.0 ms, s1 8.0 ms; cut 10,14 instead of 12,12" in text and "1.20 times as fast" in text
    assert ("--rebalance" in text) is not moves
    assert balancer.wants_to_move is moves
    assert not executor.is_timing


def test_a_cut_that_does_not_fit_is_told_with_the_reason_and_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, stages = Executor(), Stages()
    balancer = make(monkeypatch, executor, moves=True, refusal="its KV cache would hold 10 tokens")
    told = [notice for _ in range(12) for notice in balancer.look(*stages.work(2.0))]
    [notice] = told
    assert notice.text.endswith("but that does not fit: its KV cache would hold 10 tokens")
    assert not balancer.wants_to_move


def test_level_stages_are_never_timed_and_timing_ends_with_the_unevenness(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, stages = Executor(), Stages()
    balancer = make(monkeypatch, executor, moves=True)
    for _ in range(5):
        assert balancer.look(*stages.work(1.01)) == []
    assert executor.num_asked == 0
    balancer.look(*stages.work(2.0))
    assert executor.is_timing
    balancer.look(*stages.work(1.0))
    assert not executor.is_timing


def test_whoever_times_the_items_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, stages = Executor(), Stages()
    balancer = make(monkeypatch, executor, moves=True)
    balancer.leave_alone()
    assert not any(balancer.look(*stages.work(2.0)) for _ in range(12))
    assert executor.num_asked == 0
