"""Counts of values by size: how a running total can still tell a percentile. A fixed size, however long the run."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """How many values fell where.

    Args:
        bounds: upper bounds, inclusive and ascending.
        counts: values per bucket, one more than there are bounds: the last counts what is above all of them.
        total: the sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 if there is no value."""
        return self.total / self.num_values if self.num_values else 0.0


class HistogramCounter:
    """Counts values into buckets; `snapshot` is what was counted so far.

    Args:
        bounds: upper bounds, inclusive, ascending.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)
