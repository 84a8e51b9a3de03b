"""What happened that an operator should hear of: preemptions, aborts, refusals, a stage that became slower.

One idea: a short ring in the engine's process, told with the statistics, so every viewer sees the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from stageline.timeline.stage_counters import StageCounters

EventKind = Literal["preemption", "abort", "refusal", "slow_stage"]

MOST_EVENTS = 50

_SLOWER_SHARE = 1.25
_LEAST_BUSY_S = 0.5


class EngineEvent(msgspec.Struct, frozen=True):
    """Args:
    number: events are counted from 0, so that a viewer knows which it has seen.
    time_s: on the engine's clock; of the last one, if several of a kind came in a row.
    num_times: how many of a kind came in a row.
    """

    number: int
    time_s: float
    kind: EventKind
    text: str
    stage_index: int | None = None
    num_times: int = 1


class EventLog:
    """Keeps the newest events. Equal kinds in a row are one event, so a flood of aborts hides nothing else."""

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self._events: deque[EngineEvent] = deque(maxlen=most)
        self._num_events = 0

    def add(self, time_s: float, kind: EventKind, text: str, stage_index: int | None = None) -> None:
        num_times = 1
        if self._events and (self._events[-1].kind, self._events[-1].stage_index) == (kind, stage_index):
            num_times += self._events.pop().num_times
        self._events.append(EngineEvent(self._num_events, time_s, kind, text, stage_index, num_times))
        self._num_events += 1

    def newest_first(self) -> list[EngineEvent]:
        return list(reversed(self._events))


class StageShares:
    """Notices a stage that became slower than it was, from the counters that pass by.

    A stage's share of all stages' computing does not depend on how much there is to do; it grows when a neighbour takes
    its cores away, or when its input got more expensive for it than for the others.
    """

    def __init__(self) -> None:
        self._seen_s: list[float] = []
        self._usual: list[float] = []

    def slower(self, counters: Sequence[StageCounters]) -> Iterator[tuple[int, str]]:
        """Stages whose share since the last look is far above their share until then, and a sentence on each."""
        now_s = [stage.busy_s for stage in counters]
        before_s = self._seen_s or [0.0] * len(now_s)
        since_s = [now - before for now, before in zip(now_s, before_s, strict=True)]
        if sum(since_s) < _LEAST_BUSY_S * len(now_s) or len(now_s) < 2:
            return
        self._seen_s = now_s
        shares = [busy_s / sum(since_s) for busy_s in since_s]
        usual, self._usual = self._usual, shares if not self._usual else self._blend(shares)
        for stage_index, (share, was) in enumerate(zip(shares, usual, strict=False)):
            if share > was * _SLOWER_SHARE:
                text = f"s{stage_index} became slower: {share:.0%} of all stages' computing, was {was:.0%}"
                yield stage_index, text

    def _blend(self, shares: Sequence[float]) -> list[float]:
        """Slowly: what lasts becomes usual."""
        return [0.8 * usual + 0.2 * share for usual, share in zip(self._usual, shares, strict=True)]
