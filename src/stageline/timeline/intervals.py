"""Arithmetic of time intervals: sets of instants as disjoint intervals in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same instants."""
    covered: list[Interval] = []
    for start, end in sorted(intervals):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        elif start < end:
            covered.append((start, end))
    return covered


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The instants in both. Args: a, b: disjoint and in order, as `union` makes them."""
    common: list[Interval] = []
    index_a = index_b = 0
    while index_a < len(a) and index_b < len(b):
        start, end = max(a[index_a][0], b[index_b][0]), min(a[index_a][1], b[index_b][1])
        if start < end:
            common.append((start, end))
        if a[index_a][1] < b[index_b][1]:
            index_a += 1
        else:
            index_b += 1
    return common


def difference(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The instants of `a` that are not in `b`. Args: a, b: disjoint and in order, as `union` makes them."""
    left: list[Interval] = []
    index_b = 0
    for start, end in a:
        while index_b < len(b) and b[index_b][1] <= start:
            index_b += 1
        following = index_b
        while following < len(b) and b[following][0] < end:
            if start < b[following][0]:
                left.append((start, b[following][0]))
            start = max(start, b[following][1])
            following += 1
        if start < end:
            left.append((start, end))
    return left


def length_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
