"""What is written about refused connections: enough to find a wrong key, too little to fill a disk."""

from __future__ import annotations

_PERIOD_S = 60.0
_LINES_PER_PERIOD = 5


class RefusalLog:
    """At most five lines a minute; what was left out is counted in the next one."""

    def __init__(self) -> None:
        self._since_s = float("-inf")
        self._num_lines = 0
        self._num_left_out = 0

    def line(self, words: str, now_s: float) -> str | None:
        """The line for a refusal at `now_s`, on any clock; None if there were enough."""
        if now_s - self._since_s >= _PERIOD_S:
            self._since_s, self._num_lines = now_s, 0
        if self._num_lines == _LINES_PER_PERIOD:
            self._num_left_out += 1
            return None
        self._num_lines += 1
        before, self._num_left_out = self._num_left_out, 0
        left_out = f" ({before} more were refused since the line before)" if before else ""
        return words + left_out
