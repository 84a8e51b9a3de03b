"""Where the time of each stage went: computing, waiting for input, blocked on output, or idle.

The one idea: within a window every instant of a stage belongs to exactly one of these four, so they sum to the window.
Where spans of a stage overlap, computing wins over sending, and sending over waiting. Waiting and idling are each split
once more by what the rest of the pipeline did meanwhile: that is the reason of the bubble.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stageline.timeline.intervals import Interval, difference, intersection, length_s, union
from stageline.timeline.span import Span, SpanKind


@dataclass(frozen=True)
class StageReport:
    """One stage's share of a window; the four times sum to `window_s`.

    Args:
        busy_s: in forward or sample.
        waiting_for_input_s: in receive_wait: nothing had arrived from the stage before, or from the engine.
        blocked_on_output_s: in send, while not computing.
        idle_s: the rest: the stage knew of no microbatch, or did what no span covers.
        num_microbatches, num_tokens: whose forward ended in the window.
        starved_s: of `waiting_for_input_s`, while a stage before still had to compute the input, or the last one to
            sample the first one's tokens; the rest was the hop.
        underfilled_s: of `idle_s`, while microbatches were in flight elsewhere: more of them would have filled it. In
            the rest nothing was in flight at all.
    """

    stage_index: int
    window_s: float
    busy_s: float
    waiting_for_input_s: float
    blocked_on_output_s: float
    idle_s: float
    num_microbatches: int
    num_tokens: int
    starved_s: float = 0.0
    underfilled_s: float = 0.0

    @property
    def in_transit_s(self) -> float:
        """Waiting for an input that the stage before had computed."""
        return self.waiting_for_input_s - self.starved_s

    @property
    def unused_s(self) -> float:
        """Idle while nothing was in flight."""
        return self.idle_s - self.underfilled_s

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
    spans = list(spans)
    for span in spans:
        if 0 <= span.stage_index < num_stages:
            by_stage[span.stage_index].append(span)
    if start_s is None:
        start_s = _first_complete_start_s(by_stage)
    if end_s is None:
        end_s = max((span.end_s for stage in by_stage for span in stage if _is_compute(span)), default=start_s)
    window = (start_s, max(start_s, end_s))
    computed_s = [{span.microbatch: span.end_s for span in stage if span.kind == "forward"} for stage in by_stage]
    awaited_s = [_tokens_known_s(by_stage), *computed_s]
    in_flight = _in_flight(spans, num_stages)
    stages = tuple(
        _account(index, stage, window, awaited_s[index], in_flight)
        for index, stage in enumerate(by_stage)
    )
    return PipelineReport(start_s=window[0], end_s=window[1], stages=stages)


def _is_compute(span: Span) -> bool:
    return span.kind in ("forward", "sample")


def _first_complete_start_s(by_stage: Sequence[Sequence[Span]]) -> float:
    seen = [{span.microbatch for span in stage if span.kind == "forward"} for stage in by_stage]
    complete = set.intersection(*seen)
    return min((s.start_s for s in by_stage[0] if s.kind == "forward" and s.microbatch in complete), default=0.0)


def _tokens_known_s(by_stage: Sequence[Sequence[Span]]) -> dict[int, float]:
    """For each microbatch that the first stage waited to begin: when the last stage had sampled what it waited for."""
    if len(by_stage) < 2:
        return {}
    sampled_s = sorted(span.end_s for span in by_stage[-1] if span.kind == "sample")
    waits = [span for span in by_stage[0] if span.kind == "receive_wait"]
    places = {span.microbatch: bisect_right(sampled_s, span.end_s) for span in waits}
    return {microbatch: sampled_s[place - 1] for microbatch, place in places.items() if place > 0}


def _in_flight(spans: Iterable[Span], num_stages: int) -> list[Interval]:
    """When at least one microbatch was between its schedule and the end of the last stage's work."""
    starts_s: dict[int, float] = {}
    ends_s: dict[int, float] = {}
    for span in spans:
        if span.kind == "schedule" or _is_compute(span):
            starts_s[span.microbatch] = min(span.start_s, starts_s.get(span.microbatch, span.start_s))
            ends_s[span.microbatch] = max(span.end_s, ends_s.get(span.microbatch, span.end_s))
    return union((start_s, ends_s[microbatch]) for microbatch, start_s in starts_s.items())


def _account(
    stage_index: int,
    spans: Sequence[Span],
    window: Interval,
    computed_before_s: dict[int, float],
    in_flight: Sequence[Interval],
) -> StageReport:
    """Args: computed_before_s: when there was a microbatch's input to be sent here. in_flight: see `_in_flight`."""
    compute = union(_clip(spans, ("forward", "sample"), window))
    compute_or_send = union([*compute, *_clip(spans, ("send",), window)])
    waits = [span for span in spans if span.kind == "receive_wait"]
    covered = union([*compute_or_send, *_clip(waits, ("receive_wait",), window)])
    waiting = difference(covered, compute_or_send)
    starving = union(
        (max(span.start_s, window[0]), min(span.end_s, computed_before_s[span.microbatch], window[1]))
        for span in waits
        if span.microbatch in computed_before_s
    )
    idle = difference([window] if window[0] < window[1] else [], covered)
    finished = [span for span in spans if span.kind == "forward" and window[0] < span.end_s <= window[1]]
    window_s = window[1] - window[0]
    return StageReport(
        stage_index=stage_index,
        window_s=window_s,
        busy_s=length_s(compute),
        waiting_for_input_s=length_s(covered) - length_s(compute_or_send),
        blocked_on_output_s=length_s(compute_or_send) - length_s(compute),
        idle_s=window_s - length_s(covered),
        num_microbatches=len(finished),
        num_tokens=sum(span.num_tokens for span in finished),
        starved_s=length_s(intersection(waiting, starving)),
        underfilled_s=length_s(intersection(idle, in_flight)),
    )


def _clip(spans: Iterable[Span], kinds: tuple[SpanKind, ...], window: Interval) -> list[Interval]:
    clipped = [(max(s.start_s, window[0]), min(s.end_s, window[1])) for s in spans if s.kind in kinds]
    return [(start, end) for start, end in clipped if start < end]
