"""Makes a stage slower by a factor, where it computes: so every span, every count and every measured item shows it."""

from __future__ import annotations

import time

from stageline.clock import Clock
from stageline.pipeline.slowdown import StageSlowdown

_SPIN_S = 1e-4
"""A sleep ends late by about as much; the last part of a wait is spent looking at the clock."""


class Stretch:
    """Args: slowdown: how many times as long the time between `begin` and `end` shall be, and from when on."""

    def __init__(self, slowdown: StageSlowdown, clock: Clock) -> None:
        self._slowdown = slowdown
        self._clock = clock
        self._since_s = self._more = 0.0
        self.at(0)

    def at(self, microbatch: int) -> None:
        """What is computed next is of this microbatch."""
        self._more = self._slowdown.factor - 1.0 if microbatch >= self._slowdown.from_microbatch else 0.0

    def begin(self) -> None:
        self._since_s = self._clock.now_s()

    def end(self) -> None:
        """Wait until as much time has passed as should have, and begin anew. Others may have the core meanwhile."""
        if self._more > 0:
            now_s = self._clock.now_s()
            wait_until(now_s + self._more * (now_s - self._since_s), self._clock)
            self._since_s = self._clock.now_s()


def wait_until(end_s: float, clock: Clock) -> None:
    """Until that time on the clock, precisely."""
    if (left_s := end_s - clock.now_s() - _SPIN_S) > 0:
        time.sleep(left_s)
    while clock.now_s() < end_s:
        pass
