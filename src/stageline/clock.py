"""Time as a parameter: the engine reads a clock it was given, so a simulated run can hand it a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since an arbitrary start; never goes backwards."""
        ...


class MonotonicClock:
    """The operating system's monotonic clock. On Linux every process of one host reads the same one."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A simulation's clock: it stands still until somebody says what time it is."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Does nothing if it is that time already, or later."""
        self._now_s = max(self._now_s, time_s)
