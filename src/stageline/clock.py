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
