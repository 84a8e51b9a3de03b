"""A timeline as text: one row per stage, as wide as the terminal.

One idea: two pictures. The whole time shows how busy each stage was in every column; the close-up of its end is wide
enough to name microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stageline.timeline.span import Span

_SHADES = " ░▒▓█"
_NARROWEST_BOX = 6.0
"""Columns that a usual microbatch has in the close-up."""

LEGEND = "│ m17   │ computing microbatch 17   ▒ sampling   · waiting for input   ' handing over its output"


def format_gantt(spans: Iterable[Span], num_stages: int, width: int, start_s: float, end_s: float) -> str:
    """Both pictures, with a scale and the legend; no newline at the end.

    Args:
        width: columns, at least 40 are used.
        start_s, end_s: what is shown, on the spans' clock; must not be empty.
    """
    label = max(3, len(f"s{num_stages - 1}") + 1)
    columns = max(40, width) - label
    by_stage: list[list[Span]] = [[] for _ in range(num_stages)]
    for span in spans:
        if 0 <= span.stage_index < num_stages:
            by_stage[span.stage_index].append(span)
    close_s = _close_up_s(by_stage, columns, end_s - start_s)
    lines = [f"{three_digits(end_s - start_s)} s, shade by share of time computing"]
    lines += [_row(stage, label, _shaded(its, columns, start_s, end_s)) for stage, its in enumerate(by_stage)]
    lines += ["", f"the last {three_digits(close_s * 1000)} ms"]
    lines += [
        _row(stage, label, _boxes(its, columns, end_s - close_s, end_s)) for stage, its in enumerate(by_stage)
    ]
    return "\n".join([*lines, "", LEGEND])


def three_digits(value: float) -> str:
    """With three digits, or all before the point if these are more."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _row(stage_index: int, label: int, cells: str) -> str:
    return f"{f's{stage_index}':<{label}}{cells}".rstrip()


def _close_up_s(by_stage: Sequence[Sequence[Span]], columns: int, most_s: float) -> float:
    times_s = sorted(span.duration_s for its in by_stage for span in its if span.kind == "forward")
    if not times_s or times_s[len(times_s) // 2] <= 0:
        return most_s
    return min(most_s, times_s[len(times_s) // 2] * columns / _NARROWEST_BOX)


def _shaded(spans: Sequence[Span], columns: int, start_s: float, end_s: float) -> str:
    column_s = (end_s - start_s) / columns
    busy_s = [0.0] * columns
    for span in spans:
        if span.kind not in ("forward", "sample"):
            continue
        first, last = (_column(time_s, columns, start_s, column_s) for time_s in (span.start_s, span.end_s))
        for column in range(max(0, first), min(columns - 1, last) + 1):
            begins_s = start_s + column * column_s
            busy_s[column] += max(0.0, min(span.end_s, begins_s + column_s) - max(span.start_s, begins_s))
    # Rounded up: anything at all is shown.
    return "".join(_SHADES[min(4, math.ceil(4 * time_s / column_s - 1e-6))] for time_s in busy_s)


def _boxes(spans: Sequence[Span], columns: int, start_s: float, end_s: float) -> str:
    column_s = (end_s - start_s) / columns
    cells = [" "] * columns
    order = {"receive_wait": 0, "send": 1, "forward": 2, "sample": 3}
    for span in sorted((span for span in spans if span.kind in order), key=lambda span: order[span.kind]):
        first, last = (_column(time_s, columns, start_s, column_s) for time_s in (span.start_s, span.end_s))
        place = range(max(0, first), min(columns, max(last, first + (span.kind == "forward"))))
        text = {"receive_wait": "·", "send": "'", "sample": "▒"}.get(span.kind, "") * len(place)
        if span.kind == "forward":
            text = f"│{f'm{span.microbatch}'[: max(0, len(place) - 1)]:^{max(0, len(place) - 1)}}"
        for column, character in zip(place, text, strict=False):
            cells[column] = character
    return "".join(cells)


def _column(time_s: float, columns: int, start_s: float, column_s: float) -> int:
    return max(-1, min(columns, int((time_s - start_s) // column_s)))
