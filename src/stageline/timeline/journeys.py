"""A microbatch's way through the pipeline, and what the time of a token was spent on.

One idea: between its schedule and its result every instant of a microbatch is one of four: on its way to a stage (hop),
waiting there for the stage to be free (queue), computed by it, or sampled. So the parts sum to the whole, exactly. What
is left of a request's time lies with the engine: it was not scheduled yet, or its token was on the way back.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stageline.timeline.intervals import Interval, difference, intersection, union
from stageline.timeline.span import Span

Cause = Literal["hop", "queue", "stage", "sampling"]


@dataclass(frozen=True)
class Segment:
    """A stretch of a microbatch's way. `stage_index` is the stage it is at, or on its way to."""

    cause: Cause
    stage_index: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Journey:
    """One microbatch from its schedule to the end of the last stage's work on it.

    Args:
        computed: [stages] when each stage computed it; the last one's interval includes sampling.
        segments: in order, without gaps.
    """

    microbatch: int
    num_tokens: int
    num_rows: int
    computed: tuple[Interval, ...]
    segments: tuple[Segment, ...]

    @property
    def start_s(self) -> float:
        return self.segments[0].start_s

    @property
    def end_s(self) -> float:
        return self.computed[-1][1]

    @property
    def has_prompt_tokens(self) -> bool:
        return self.num_tokens > self.num_rows


@dataclass(frozen=True)
class LatencySplit:
    """What a time was spent on; the parts sum to `total_s`.

    Args:
        engine_s: not scheduled yet, or the result was on its way back.
        hops_s: [stages] on the way to each stage; to the first one from the engine.
        queues_s: [stages] waiting while each stage computed something else.
        stages_s: [stages] computed by each, without sampling.
    """

    total_s: float
    engine_s: float
    hops_s: tuple[float, ...]
    queues_s: tuple[float, ...]
    stages_s: tuple[float, ...]
    sampling_s: float


def journeys(spans: Iterable[Span], num_stages: int) -> list[Journey]:
    """Every microbatch that all stages recorded, in order of number. The engine's spans say when it was scheduled."""
    scheduled: dict[int, Span] = {}
    computed: dict[int, dict[int, Interval]] = {}
    sampled: dict[int, Interval] = {}
    forward: dict[int, Span] = {}
    for span in spans:
        interval = (span.start_s, span.end_s)
        if span.kind == "schedule":
            scheduled[span.microbatch] = span
        elif span.kind == "forward" and 0 <= span.stage_index < num_stages:
            computed.setdefault(span.microbatch, {})[span.stage_index] = interval
            forward[span.microbatch] = span
        elif span.kind == "sample":
            sampled[span.microbatch] = interval
    for microbatch, (_, end_s) in sampled.items():
        stages = computed.get(microbatch, {})
        if num_stages - 1 in stages:
            stages[num_stages - 1] = (stages[num_stages - 1][0], end_s)
    busy = [
        union(stages[stage] for stages in computed.values() if stage in stages) for stage in range(num_stages)
    ]
    complete = sorted(number for number, stages in computed.items() if len(stages) == num_stages)
    found = []
    for number in complete:
        by_stage = tuple(computed[number][stage] for stage in range(num_stages))
        start_s = min(scheduled[number].end_s, by_stage[0][0]) if number in scheduled else by_stage[0][0]
        segments = _segments(start_s, by_stage, sampled.get(number), busy)
        span = forward[number]
        found.append(Journey(number, span.num_tokens, span.num_rows, by_stage, tuple(segments)))
    return found


def _segments(
    start_s: float, computed: Sequence[Interval], sampled: Interval | None, busy: Sequence[Sequence[Interval]]
) -> list[Segment]:
    segments = []
    at_s = start_s
    for stage, (begins_s, ends_s) in enumerate(computed):
        gap = [(at_s, begins_s)] if at_s < begins_s else []
        queued = intersection(gap, _around(busy[stage], at_s, begins_s))
        parts = [Segment("queue", stage, start, end) for start, end in queued]
        parts += [Segment("hop", stage, start, end) for start, end in difference(gap, queued)]
        segments += sorted(parts, key=lambda segment: segment.start_s)
        computed_until_s = ends_s
        if sampled is not None and stage == len(computed) - 1:
            computed_until_s = max(begins_s, sampled[0])
        segments.append(Segment("stage", stage, begins_s, computed_until_s))
        if computed_until_s < ends_s:
            segments.append(Segment("sampling", stage, computed_until_s, ends_s))
        at_s = ends_s
    return segments


def _around(intervals: Sequence[Interval], start_s: float, end_s: float) -> Sequence[Interval]:
    """The few of many disjoint intervals that may meet [start_s, end_s]."""
    first = max(0, bisect_left(intervals, (start_s, start_s)) - 1)
    return intervals[first : bisect_left(intervals, (end_s, end_s)) + 1]


def split_latency(its_journeys: Sequence[Journey], start_s: float, end_s: float, num_stages: int) -> LatencySplit:
    """Split a request's time, such as from its arrival to its first token (TTFT) or between two tokens (ITL).

    Args:
        its_journeys: of the microbatches that carried the request, in order. Where they overlap, as the chunks of a
            prompt do, the later one counts from its schedule on.
    """
    parts: dict[tuple[Cause, int], float] = {}
    until_s = end_s
    for journey in reversed(its_journeys):
        for segment in journey.segments:
            inside_s = min(segment.end_s, until_s) - max(segment.start_s, start_s)
            if inside_s > 0:
                key = (segment.cause, segment.stage_index)
                parts[key] = parts.get(key, 0.0) + inside_s
        until_s = min(until_s, journey.start_s)
    total_s = end_s - start_s
    return _as_split(parts, total_s, total_s - sum(parts.values()), num_stages)


def mean_split(all_journeys: Sequence[Journey], num_stages: int) -> LatencySplit | None:
    """The ring of an average microbatch, from its schedule to the last stage's result; None if there is none."""
    if not all_journeys:
        return None
    parts: dict[tuple[Cause, int], float] = {}
    for journey in all_journeys:
        for segment in journey.segments:
            key = (segment.cause, segment.stage_index)
            parts[key] = parts.get(key, 0.0) + (segment.end_s - segment.start_s) / len(all_journeys)
    return _as_split(parts, sum(parts.values()), 0.0, num_stages)


def _as_split(
    parts: dict[tuple[Cause, int], float], total_s: float, engine_s: float, num_stages: int
) -> LatencySplit:
    def of(cause: Cause) -> tuple[float, ...]:
        return tuple(parts.get((cause, stage), 0.0) for stage in range(num_stages))

    return LatencySplit(total_s, engine_s, of("hop"), of("queue"), of("stage"), sum(of("sampling")))


@dataclass(frozen=True)
class CriticalPath:
    """What a run's duration was made of, along the chain of work in which each piece waited for the one before.

    Args:
        stages_s: [stages] computing on the path; what a stage has here would be saved first by making it faster.
        between_s: hops, and the engine between a result and what it made possible.
    """

    stages_s: tuple[float, ...]
    between_s: float

    @property
    def total_s(self) -> float:
        return sum(self.stages_s) + self.between_s

    def share(self, stage_index: int) -> float:
        """Of the path's time, 0 to 1."""
        return self.stages_s[stage_index] / self.total_s if self.total_s > 0 else 0.0


def critical_path(all_journeys: Sequence[Journey], num_stages: int) -> CriticalPath:
    """Walk back from the last work that ended: before a piece of work comes what it waited for last.

    That is the same stage's work before it, the stage before's work on the same microbatch or, on the first stage, the
    last result that the engine had when it scheduled the microbatch.
    """
    stages_s, between_s = [0.0] * num_stages, 0.0
    if not all_journeys:
        return CriticalPath(tuple(stages_s), between_s)
    by_end = sorted(range(len(all_journeys)), key=lambda index: all_journeys[index].end_s)
    ends_s = [all_journeys[index].end_s for index in by_end]
    index, stage = by_end[-1], num_stages - 1
    while True:
        start_s, end_s = all_journeys[index].computed[stage]
        stages_s[stage] += end_s - start_s
        causes = []
        if index > 0:
            causes.append((all_journeys[index - 1].computed[stage][1], index - 1, stage))
        if stage > 0:
            causes.append((all_journeys[index].computed[stage - 1][1], index, stage - 1))
        elif (place := bisect_left(ends_s, all_journeys[index].start_s)) > 0:
            causes.append((ends_s[place - 1], by_end[place - 1], num_stages - 1))
        # An earlier end also keeps the walk going back where clocks of two hosts disagree.
        causes = [cause for cause in causes if cause[0] < end_s]
        if not causes:
            return CriticalPath(tuple(stages_s), between_s)
        before_s, index, stage = max(causes)
        between_s += max(0.0, start_s - before_s)
