"""Whether a pipeline that lost a stage is started again. One idea: as long as it serves in between.

A stage that is killed, a machine that is switched off, a cable that is pulled: the next start may go well. A pipeline
that breaks again and again before it has served for a while would for ever.
"""

from __future__ import annotations

from stageline.errors import StagelineError

_MOST_IN_A_ROW = 5
_GOOD_SERVICE_S = 60.0

_NUM_AT_ONCE = 2
_FIRST_PAUSE_S = 1.0
"""From the third time in a row on it is waited before the next start, each time twice as long: 7 s in all."""


class Revival:
    """Args:
    is_wanted: false ends everything at the first loss.
    """

    def __init__(self, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._num_in_a_row = 0
        self._has_served = False
        self._ready_s: float | None = None

    def began_to_serve(self, now_s: float) -> None:
        self._has_served = True
        self._ready_s = now_s

    @property
    def is_exhausted(self) -> bool:
        """It was tried often enough, in vain."""
        return self._is_wanted and self._num_in_a_row > _MOST_IN_A_ROW

    @property
    def pause_s(self) -> float:
        """How long to wait before the start that was allowed; whoever watches a first start waits for nothing."""
        num_paused = self._num_in_a_row - _NUM_AT_ONCE if self._has_served else 0
        return _FIRST_PAUSE_S * 2.0 ** (num_paused - 1) if num_paused > 0 else 0.0

    def allows(self, loss: StagelineError, is_remote: bool, now_s: float) -> bool:
        """To be asked once for each loss.

        Args:
            is_remote: the stage was another machine's.
        """
        served_s = 0.0 if self._ready_s is None else now_s - self._ready_s
        self._ready_s = None
        self._num_in_a_row = 1 if served_s >= _GOOD_SERVICE_S else self._num_in_a_row + 1
        if not self._is_wanted or self._num_in_a_row > _MOST_IN_A_ROW:
            return False
        # What does not even come up here the first time will not the second time.
        return self._has_served or is_remote
