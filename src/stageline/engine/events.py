"""What happened that an operator should hear of: preemptions, aborts, refusals, a stage that became slower or was lost.

One idea: a short ring in the engine's process, told with the statistics, so every viewer sees the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from stageline.timeline.stage_counters import StageCounters

EventKind = Literal["preemption", "abort", "refusal", "slow_stage", "lost", "imbalance", "rebalance"]

MOST_EVENTS = 50

_SLOWER = 1.5
_LEAST_BUSY_S = 1.0
_NUM_LOOKS = 2


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
    """Notices a stage that became slower than it was, from the counters that pass by: whoever asks for them looks.

    What a stage computes beside what the others do does not depend on how much there is to do; it grows when a
    neighbour takes the stage's cores away.
    """

    def __init__(self) -> None:
        self._seen_s: list[float] = []
        self._usual: list[float] = []
        self._num_slow: list[int] = []

    def slower(self, counters: Sequence[StageCounters]) -> Iterator[tuple[int, str]]:
        """Stages that were slower than usual for some looks in a row now, and a sentence on each."""
        now_s = [stage.busy_s for stage in counters]
        before_s = self._seen_s or [0.0] * len(now_s)
        since_s = [now - before for now, before in zip(now_s, before_s, strict=True)]
        if sum(since_s) < _LEAST_BUSY_S * len(now_s) or len(now_s) < 2:
            return
        self._seen_s = now_s
        ratios = [busy_s / max(sum(since_s) - busy_s, 1e-9) for busy_s in since_s]
        if not self._usual:
            self._usual, self._num_slow = ratios, [0] * len(ratios)
            return
        for stage_index, (ratio, usual) in enumerate(zip(ratios, self._usual, strict=True)):
            is_slow = ratio > usual * _SLOWER
            self._num_slow[stage_index] = self._num_slow[stage_index] + 1 if is_slow else 0
            if self._num_slow[stage_index] == _NUM_LOOKS:
                times = ratio / usual if usual else float("inf")
                yield stage_index, f"s{stage_index} became slower: {times:.1f} times as long as usual beside the others"
        # Slowly: what lasts becomes usual, and what is extreme does not.
        believed = [min(ratio, usual * _SLOWER) for ratio, usual in zip(ratios, self._usual, strict=True)]
        self._usual = [0.8 * usual + 0.2 * ratio for ratio, usual in zip(believed, self._usual, strict=True)]
