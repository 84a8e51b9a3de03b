"""What a request's time to its first token, and between its tokens, was spent on.

One idea: the engine remembers which microbatches carried a request, and the stages' spans say where those were when. A
request is traced by its first microbatches and its newest, so a trace never grows with the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import takewhile

import msgspec

from stageline.timeline.journeys import Journey, LatencySplit, split_latency

_NUM_FIRST, _NUM_RECENT = 32, 32


class RequestTrace(msgspec.Struct, frozen=True, array_like=True):
    """Args:
    scheduled_s: of its first microbatch; None while it waits.
    first_token_s: None while there is none.
    first, recent: numbers of its first microbatches, and of the newest of those after them.
    """

    request_id: str
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    first: list[int]
    recent: list[int]


class Carriers:
    """The microbatches that carried one request, as far as a trace tells of them."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.recent: deque[int] = deque(maxlen=_NUM_RECENT)

    def add(self, number: int) -> None:
        """A microbatch was launched with a row of it."""
        (self.first if len(self.first) < _NUM_FIRST else self.recent).append(number)


def split_ttft(trace: RequestTrace, found: Mapping[int, Journey], num_stages: int) -> LatencySplit | None:
    """From arrival to first token; None if there is none, or not all of its microbatches are found.

    Args:
        found: journeys by microbatch.
    """
    if trace.first_token_s is None or not trace.first or any(n not in found for n in trace.first[:1]):
        return None
    end_s = trace.first_token_s
    its = list(takewhile(lambda one: one.end_s <= end_s, (found[n] for n in trace.first if n in found)))
    is_cut_off = len(its) == _NUM_FIRST
    return None if is_cut_off or not its else split_latency(its, trace.arrival_s, end_s, num_stages)


def split_itl(trace: RequestTrace, found: Mapping[int, Journey], num_stages: int) -> LatencySplit | None:
    """The mean time between two of its newest tokens; None if fewer than two are found."""
    if trace.first_token_s is None:
        return None
    first_token_s = trace.first_token_s
    newest = trace.recent or trace.first
    known = list(takewhile(lambda one: one is not None, (found.get(number) for number in reversed(newest))))
    its = [one for one in reversed(known) if one is not None]
    # The first token's microbatch is the last one that ended before it was told.
    after = [one for one in its if one.end_s > first_token_s]
    before = [one for one in its if one.end_s <= first_token_s][-1:]
    if len(before) + len(after) < 2:
        return None
    start, *rest = before + after
    split = split_latency(rest, start.end_s, rest[-1].end_s, num_stages)
    return mean_of([split], len(rest))


def mean_of(splits: Sequence[LatencySplit], num_parts: int | None = None) -> LatencySplit | None:
    """Args: num_parts: what the sum is divided by; their number if None. None of none."""
    if not splits:
        return None
    parts = num_parts or len(splits)

    def mean(values: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(sum(stage) / parts for stage in zip(*values, strict=True))

    return LatencySplit(
        total_s=sum(split.total_s for split in splits) / parts,
        engine_s=sum(split.engine_s for split in splits) / parts,
        hops_s=mean([split.hops_s for split in splits]),
        queues_s=mean([split.queues_s for split in splits]),
        stages_s=mean([split.stages_s for split in splits]),
        sampling_s=sum(split.sampling_s for split in splits) / parts,
    )
