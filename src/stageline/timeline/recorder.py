"""A fixed-size ring of spans: recording costs one list store, and a run of any length needs bounded memory."""

from __future__ import annotations

from stageline.timeline.span import Span

DEFAULT_CAPACITY = 1 << 17


class Recorder:
    """Keeps the newest spans of one stage or of the engine. One thread records; any thread may look.

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
        """Add a span that ended just now, overwriting the oldest when the ring is full; O(1)."""
        self._num_recorded += 1
        if len(self._ring) < self._capacity:
            self._ring.append(span)
            return
        self._ring[self._oldest] = span
        self._oldest = (self._oldest + 1) % self._capacity

    def spans(self, since_s: float | None = None, most: int | None = None) -> list[Span]:
        """The spans still kept, in the order of recording; time is spent only on those that are returned.

        Args:
            since_s: only those that ended after it.
            most: only the newest so many.
        """
        # Walked back from the newest, which cannot be overwritten meanwhile unless the ring is shorter than the answer.
        ring, newest = self._ring, self._oldest - 1
        num_kept = len(ring)
        found: list[Span] = []
        for back in range(num_kept if most is None else min(most, num_kept)):
            span = ring[(newest - back) % num_kept]
            if since_s is not None and span.end_s <= since_s:
                break
            found.append(span)
        found.reverse()
        return found
