"""Another cut is worth a word when it would be faster for a while, and only then; in virtual time."""

from __future__ import annotations

from stageline.engine.rebalance import BetterCut, DriftWatch, RebalancePolicy
from stageline.timeline.stage_counters import StageAccount, StageCounters

POLICY = RebalancePolicy(gain_fraction=0.1, patience_s=20.0)
FASTER = BetterCut((10, 14), (0.010, 0.010), (0.012, 0.008))
HARDLY = BetterCut((11, 13), (0.0115, 0.0105), (0.012, 0.010))


class Stages:
    """Their counters, and a watch that looks at them every `look_s`."""

    def __init__(self, num_stages: int = 2) -> None:
        self.now_s = 0.0
        self.watch = DriftWatch(POLICY, 0.0)
        self._accounts = [StageAccount(index) for index in range(num_stages)]
        for account in self._accounts:
            account.start(0.0)

    def pass_time(self, *busy_fractions: float) -> bool:
        """One look later, with the stages as busy as that meanwhile: does the watch find them uneven?"""
        start_s, self.now_s = self.now_s, self.now_s + POLICY.look_s
        for account, fraction in zip(self._accounts, busy_fractions, strict=True):
            account.enter("busy", start_s)
            account.enter("idle", start_s + fraction * POLICY.look_s)
        assert self.watch.is_due(self.now_s)
        counters: list[StageCounters] = [account.snapshot(self.now_s) for account in self._accounts]
        return self.watch.is_uneven(counters, self.now_s)


def test_level_stages_and_idle_ones_are_left_in_peace() -> None:
    stages = Stages()
    assert not stages.pass_time(0.9, 0.88)
    assert not stages.pass_time(0.1, 0.02)
    assert stages.pass_time(0.9, 0.6)


def test_it_is_not_time_for_a_look_before_the_interval_has_passed() -> None:
    watch = DriftWatch(POLICY, 100.0)
    assert not watch.is_due(100.0 + POLICY.look_s - 0.1)
    assert watch.is_due(100.0 + POLICY.look_s)


def test_a_gain_has_to_last() -> None:
    stages = Stages()
    lasting = []
    for _ in range(6):
        assert stages.pass_time(0.9, 0.6)
        lasting.append(stages.watch.is_lasting(FASTER, stages.now_s))
    # Seen first after 5 s, so it has lasted for 20 s at the fifth look.
    assert lasting == [False] * 4 + [True] * 2


def test_a_gain_that_vanishes_begins_anew_whatever_made_it_vanish() -> None:
    for interruption in (HARDLY, None, "level"):
        stages = Stages()
        for _ in range(4):
            stages.pass_time(0.9, 0.6)
            assert not stages.watch.is_lasting(FASTER, stages.now_s)
        if interruption == "level":
            assert not stages.pass_time(0.9, 0.9)
        else:
            stages.pass_time(0.9, 0.6)
            assert not stages.watch.is_lasting(interruption, stages.now_s)
        stages.pass_time(0.9, 0.6)
        assert not stages.watch.is_lasting(FASTER, stages.now_s), interruption


def test_what_was_told_is_not_told_again_before_the_shares_change() -> None:
    stages = Stages()
    assert stages.pass_time(0.9, 0.6)
    stages.watch.accept()
    assert not any(stages.pass_time(0.9 + 0.01 * number, 0.6) for number in range(3))
    assert not stages.pass_time(0.45, 0.3)
    assert stages.pass_time(0.6, 0.9)


def test_each_move_takes_twice_the_patience_of_the_one_before() -> None:
    stages = Stages()
    needed = []
    for _ in range(3):
        num_looks = 0
        while True:
            num_looks += 1
            stages.pass_time(0.9, 0.6)
            if stages.watch.is_lasting(FASTER, stages.now_s):
                break
        needed.append(num_looks)
        stages.watch.moved(stages.now_s)
    assert needed == [5, 9, 17]
