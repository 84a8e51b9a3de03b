"""Looks again and again whether the engine's process is well, for those that wait for it.

One idea: silence is no event. Nothing wakes this process when another one stands still, so something here has to look;
and it looks twice, for after this process itself stood still, what was sent to it meanwhile has yet to arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stageline.errors import EngineSilent

_LOOKS_PER_TIMEOUT = 4
_LONGEST_INTERVAL_S = 1.0


class HealthWatch:
    """Works until `stop`.

    Args:
        timeout_s: how long the engine may be silent.
        trouble: tells what is wrong, if anything.
        on_look: called with each look.
        on_trouble: called with what two looks, one after the other, have found.
    """

    def __init__(
        self,
        timeout_s: float,
        trouble: Callable[[], EngineSilent | None],
        on_look: Callable[[], None],
        on_trouble: Callable[[EngineSilent], None],
    ) -> None:
        self._interval_s = min(timeout_s / _LOOKS_PER_TIMEOUT, _LONGEST_INTERVAL_S)
        self._trouble = trouble
        self._on_look = on_look
        self._on_trouble = on_trouble
        self._had_trouble = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._interval_s, self._look)

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        trouble = self._trouble()
        if trouble is not None and self._had_trouble:
            self._on_trouble(trouble)
        self._had_trouble = trouble is not None
        self._on_look()

    def stop(self) -> None:
        """May be called twice."""
        self._timer.cancel()
