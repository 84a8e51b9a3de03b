"""A fixed-size ring of spans: recording costs one list store, and a run of any length needs bounded memory."""

from __future__ import annotations

from stageline.timeline.span import Span

DEFAULT_CAPACITY = 1 << 17


class Recorder:
    """Keeps the newest spans of one stage or of the engine. One owner records; it is not for several threads.

    Args:
        capacity: most spans kept, at least 1. The default holds some minutes of a busy stage in about 20 MB.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"a recorder of capacity {capacity}; it must be at least 1")
        self._capacity = capacity
        self._ring: list[Span] = []
        self._oldest = 0
        self._num_recorded = 0

    @property
    def num_recorded(self) -> int:
        """Spans recorded so far, those that were overwritten included."""
        return self._num_recorded

    @property
    def num_overwritten(self) -> int:
        return self._num_recorded - len(self._ring)

    def record(self, span: Span) -> None:
        """Add a span, overwriting the oldest when the ring is full; O(1)."""
        self._num_recorded += 1
        if len(self._ring) < self._capacity:
            self._ring.append(span)
            return
        self._ring[self._oldest] = span
        self._oldest = (self._oldest + 1) % self._capacity

    def spans(self, since_s: float | None = None) -> list[Span]:
        """The spans still kept, in the order of recording; only those that ended after `since_s` if it is given."""
        in_order = self._ring[self._oldest :] + self._ring[: self._oldest]
        if since_s is None:
            return in_order
        return [span for span in in_order if span.end_s > since_s]
