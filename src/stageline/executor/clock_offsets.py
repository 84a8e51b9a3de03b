"""How far the stages' clocks are ahead of the engine's, where they run on other machines.

One idea: between a ping and its answer the stage told its time; the quicker the round trip, the less room is left for
when. So the quickest of the newest round trips is believed, and an offset that may as well be none is none: stages on
the engine's own machine share its clock exactly.

Source: Cristian's algorithm, with the minimum filter of NTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from stageline.timeline.span import Span

_WORTH_TELLING_S = 1e-4

_NUM_REMEMBERED = 32
"""Round trips per stage: enough for a quick one, few enough to follow clocks that drift."""


@dataclass(frozen=True)
class _RoundTrip:
    round_trip_s: float
    ahead_s: float


class ClockOffsets:
    """Of all stages of a pipeline; a stage that was not heard of yet counts as in step."""

    def __init__(self, num_stages: int) -> None:
        self._round_trips: list[deque[_RoundTrip]] = [deque(maxlen=_NUM_REMEMBERED) for _ in range(num_stages)]
        self._told_s = [0.0] * num_stages

    def heard(self, stage_index: int, asked_s: float, told_s: float, heard_s: float) -> None:
        """A ping was answered.

        Args:
            asked_s, heard_s: when it was sent and its answer read, on the engine's clock.
            told_s: when it was answered, on the stage's clock.
        """
        round_trip_s = heard_s - asked_s
        # Anything else was not this engine's ping; of NaN, too, no such thing is true.
        if round_trip_s >= 0 and abs(told_s) < float("inf"):
            self._round_trips[stage_index].append(_RoundTrip(round_trip_s, told_s - (asked_s + heard_s) / 2))

    def ahead_s(self, stage_index: int) -> float:
        """By how much its clock is ahead of the engine's; wrong by at most half of the quickest round trip."""
        if not self._round_trips[stage_index]:
            return 0.0
        best = min(self._round_trips[stage_index], key=lambda one: one.round_trip_s)
        return best.ahead_s if abs(best.ahead_s) > best.round_trip_s / 2 else 0.0

    def input_ahead_s(self, stage_index: int) -> float:
        """By how much the clock of the stage before is ahead of this stage's own; 0 for the first."""
        return self.ahead_s(stage_index - 1) - self.ahead_s(stage_index) if stage_index else 0.0

    def news_of_inputs(self) -> list[tuple[int, float]]:
        """(stage, `input_ahead_s`) where that is another one by now, to be told to the stage."""
        news = []
        for stage_index, told_s in enumerate(self._told_s):
            ahead_s = self.input_ahead_s(stage_index)
            if abs(ahead_s - told_s) > _WORTH_TELLING_S:
                self._told_s[stage_index] = ahead_s
                news.append((stage_index, ahead_s))
        return news

    def in_engine_time(self, stage_index: int, spans: Iterable[Span]) -> list[Span]:
        """A stage's spans as the engine's clock would have timed them."""
        ahead_s = self.ahead_s(stage_index)
        if ahead_s == 0.0:
            return list(spans)
        return [
            msgspec.structs.replace(span, start_s=span.start_s - ahead_s, end_s=span.end_s - ahead_s) for span in spans
        ]
