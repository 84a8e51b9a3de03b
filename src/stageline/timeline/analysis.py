"""Where the time of each stage went: computing, waiting for input, blocked on output, or idle.

The one idea: within a window every instant of a stage belongs to exactly one of these four, so they sum to the window.
Where spans of a stage overlap, computing wins over sending, and sending over waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stageline.timeline.span import Span, SpanKind

Interval = tuple[float, float]


@dataclass(frozen=True)
class StageReport:
    """One stage's share of a window; the four times sum to `window_s`.

    Args:
        busy_s: in forward or sample.
        waiting_for_input_s: in receive_wait: nothing had arrived from the stage before, or from the engine.
        blocked_on_output_s: in send, while not computing.
        idle_s: the rest: the stage knew of no microbatch, or did what no span covers.
        num_microbatches, num_tokens: whose forward ended in the window.
    """

    stage_index: int
    window_s: float
    busy_s: float
    waiting_for_input_s: float
    blocked_on_output_s: float
    idle_s: float
    num_microbatches: int
    num_tokens: int

    @property
    def busy_fraction(self) -> float:
        return self._fraction(self.busy_s)

    @property
    def waiting_for_input_fraction(self) -> float:
        return self._fraction(self.waiting_for_input_s)

    @property
    def blocked_on_output_fraction(self) -> float:
        return self._fraction(self.blocked_on_output_s)

    @property
    def idle_fraction(self) -> float:
        return self._fraction(self.idle_s)

    @property
    def bubble_fraction(self) -> float:
        """1 - busy fraction; 0 in an empty window, where no work was missed."""
        return 1.0 - self.busy_fraction if self.window_s > 0 else 0.0

    def _fraction(self, time_s: float) -> float:
        return time_s / self.window_s if self.window_s > 0 else 0.0


@dataclass(frozen=True)
class PipelineReport:
    """All stages over the same window `[start_s, end_s]` of the run's clock."""

    start_s: float
    end_s: float
    stages: tuple[StageReport, ...]

    @property
    def window_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def num_microbatches(self) -> int:
        """Microbatches that left the last stage in the window."""
        return self.stages[-1].num_microbatches

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the last stage in the window, prompt and generated alike."""
        return self.stages[-1].num_tokens

    @property
    def slowest_stage(self) -> int:
        """Index of the stage that was busy longest: it sets the pace. The first of several."""
        return max(self.stages, key=lambda stage: stage.busy_s).stage_index

    @property
    def bubble_fraction(self) -> float:
        """Mean of the stages' bubble fractions: the share of all stage time that computed nothing."""
        return sum(stage.bubble_fraction for stage in self.stages) / len(self.stages)


def analyse(
    spans: Iterable[Span], num_stages: int, start_s: float | None = None, end_s: float | None = None
) -> PipelineReport:
    """Account for every stage's time in a window.

    The window is meant to be one in which the pipeline always had work, so what a stage did not compute in it is a
    bubble, filling and draining included. By default it begins when the first microbatch that every stage recorded
    entered stage 0's forward pass (older ones are half forgotten by the recorders), and ends with the last forward or
    sample of any stage. A caller whose spans hold pauses without requests gives both ends.

    Args:
        spans: of any kind and order; those of the engine are left out.
        num_stages: at least 1.
        start_s, end_s: on the spans' clock; spans across an end count with the part inside.
    Returns: a report with one entry per stage, also for a stage without spans; all zero if there is no window.
    """
    if num_stages < 1:
        raise ValueError(f"a pipeline of {num_stages} stages; it must have at least 1")
    by_stage: list[list[Span]] = [[] for _ in range(num_stages)]
    for span in spans:
        if 0 <= span.stage_index < num_stages:
            by_stage[span.stage_index].append(span)
    if start_s is None:
        start_s = _first_complete_start_s(by_stage)
    if end_s is None:
        end_s = max((span.end_s for stage in by_stage for span in stage if _is_compute(span)), default=start_s)
    window = (start_s, max(start_s, end_s))
    stages = tuple(_account(stage_index, stage, window) for stage_index, stage in enumerate(by_stage))
    return PipelineReport(start_s=window[0], end_s=window[1], stages=stages)


def _is_compute(span: Span) -> bool:
    return span.kind in ("forward", "sample")


def _first_complete_start_s(by_stage: Sequence[Sequence[Span]]) -> float:
    seen = [{span.microbatch for span in stage if span.kind == "forward"} for stage in by_stage]
    complete = set.intersection(*seen)
    return min((s.start_s for s in by_stage[0] if s.kind == "forward" and s.microbatch in complete), default=0.0)


def _account(stage_index: int, spans: Sequence[Span], window: Interval) -> StageReport:
    compute = _union(_clip(spans, ("forward", "sample"), window))
    compute_or_send = _union([*compute, *_clip(spans, ("send",), window)])
    covered = _union([*compute_or_send, *_clip(spans, ("receive_wait",), window)])
    finished = [span for span in spans if span.kind == "forward" and window[0] < span.end_s <= window[1]]
    window_s = window[1] - window[0]
    return StageReport(
        stage_index=stage_index,
        window_s=window_s,
        busy_s=_length_s(compute),
        waiting_for_input_s=_length_s(covered) - _length_s(compute_or_send),
        blocked_on_output_s=_length_s(compute_or_send) - _length_s(compute),
        idle_s=window_s - _length_s(covered),
        num_microbatches=len(finished),
        num_tokens=sum(span.num_tokens for span in finished),
    )


def _clip(spans: Iterable[Span], kinds: tuple[SpanKind, ...], window: Interval) -> list[Interval]:
    clipped = [(max(s.start_s, window[0]), min(s.end_s, window[1])) for s in spans if s.kind in kinds]
    return [(start, end) for start, end in clipped if start < end]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same instants."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _length_s(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
