"""What is written about refused connections: enough to find a wrong key, too little to fill a disk."""

from __future__ import annotations

_PERIOD_S = 60.0
_LINES_PER_PERIOD = 5


class RefusalLog:
    """At most five lines a minute, and one of each subject; what was left out is counted in the next line."""

    def __init__(self) -> None:
        self._since_s = float("-inf")
        self._num_lines = 0
        self._num_left_out = 0
        self._told: set[str] = set()

    def line(self, words: str, now_s: float, subject: str | None = None) -> str | None:
        """The line for a refusal at `now_s`, on any clock; None if there were enough.

        Args:
            subject: what is the same whenever this is tried again; None if that is `words`.
        """
        subject = words if subject is None else subject
        if now_s - self._since_s >= _PERIOD_S:
            self._since_s, self._num_lines = now_s, 0
            self._told.clear()
        if self._num_lines == _LINES_PER_PERIOD or subject in self._told:
            self._num_left_out += 1
            return None
        self._told.add(subject)
        self._num_lines += 1
        before, self._num_left_out = self._num_left_out, 0
        left_out = f" ({before} more were refused since the line before)" if before else ""
        return words + left_out
