"""What a stage did since it was ready, as running totals: where its time went, what it computed, what it moved.

One idea: a stage is always in exactly one state, so the states' times sum to the time that passed. Spans tell the same
in detail for the last minutes; these totals are for ever, cost a few additions per microbatch, and take no memory.
"""

from __future__ import annotations

import threading
from typing import Literal

import msgspec

from stageline.timeline.histogram import Histogram, HistogramCounter

StageState = Literal["busy", "starved", "blocked", "preparing", "idle"]
"""busy: in forward or sample. Bubbles, by reason: starved (a microbatch is announced, its input has not come), blocked
(its output is handed over), preparing (an announcement is read, positions and slots are computed), idle (nothing is
announced)."""

MicrobatchKind = Literal["prefill", "decode", "mixed"]
MICROBATCH_KINDS: tuple[MicrobatchKind, ...] = ("prefill", "decode", "mixed")

STEP_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
LATENCY_BOUNDS_S = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

_LONGEST_BELIEVED_LATENCY_S = 60.0


def kind_of_microbatch(num_rows: int, num_decode_rows: int) -> MicrobatchKind:
    """All rows decode, none does, or some do."""
    if num_decode_rows == num_rows:
        return "decode"
    return "mixed" if num_decode_rows else "prefill"


class StepCounters(msgspec.Struct, frozen=True, array_like=True):
    """Microbatches of one kind that a stage computed, and how long each took."""

    num_tokens: int
    num_rows: int
    time_s: Histogram


class LinkCounters(msgspec.Struct, frozen=True, array_like=True):
    """Activations that went over a link.

    Args:
        latency_s: from the sender's send to the receiver's receive, of those that the receiver waited for; the others
            lay ready, and their time is not the link's. Empty where sender and receiver share no clock.
    """

    num_messages: int
    num_bytes: int
    latency_s: Histogram


class StageCounters(msgspec.Struct, frozen=True, array_like=True, tag="stage_counters"):
    """Running totals of one stage; the five times sum to `elapsed_s`.

    Args:
        elapsed_s: since it was ready for its first microbatch; 0 before.
        prefill, decode, mixed: the microbatches by kind.
        received, sent: activations from the stage before and to the stage after; zero at the pipeline's ends.
        resident_bytes: memory of its process now; 0 if it has none of its own.
    """

    stage_index: int
    elapsed_s: float
    busy_s: float
    starved_s: float
    blocked_s: float
    preparing_s: float
    idle_s: float
    prefill: StepCounters
    decode: StepCounters
    mixed: StepCounters
    received: LinkCounters
    sent: LinkCounters
    resident_bytes: int = 0

    @property
    def num_microbatches(self) -> int:
        return sum(steps.time_s.num_values for steps in (self.prefill, self.decode, self.mixed))

    @property
    def num_tokens(self) -> int:
        return self.prefill.num_tokens + self.decode.num_tokens + self.mixed.num_tokens


class StageAccount:
    """Keeps one stage's totals. The stage's thread writes, any thread may read: a snapshot is of one moment.

    Attributes:
        input_ahead_s: by how much the clock of the stage before is ahead; the times that it tells are corrected by it.
    """

    def __init__(self, stage_index: int) -> None:
        self.input_ahead_s = 0.0
        self._stage_index = stage_index
        self._lock = threading.Lock()
        self._state: StageState = "idle"
        self._start_s: float | None = None
        self._since_s = 0.0
        self._time_s: dict[StageState, float] = dict.fromkeys(("busy", "starved", "blocked", "preparing", "idle"), 0.0)
        self._steps = {kind: _Steps() for kind in MICROBATCH_KINDS}
        self._received = _Link()
        self._sent = _Link()

    def start(self, now_s: float) -> None:
        """The stage is ready; time before this is not accounted for."""
        with self._lock:
            self._start_s = self._since_s = now_s

    def enter(self, state: StageState, now_s: float) -> None:
        """From now on the stage is in this state."""
        with self._lock:
            if self._start_s is not None:
                self._time_s[self._state] += now_s - self._since_s
            self._state, self._since_s = state, now_s

    def computed(self, num_rows: int, num_decode_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """A microbatch is done."""
        with self._lock:
            steps = self._steps[kind_of_microbatch(num_rows, num_decode_rows)]
            steps.num_rows += num_rows
            steps.num_tokens += num_tokens
            steps.time_s.observe(elapsed_s)

    def received(self, num_bytes: int, latency_s: float | None) -> None:
        """An activation came; `latency_s` is None if it lay ready; an absurd one is not counted."""
        with self._lock:
            self._received.count(num_bytes)
            if latency_s is not None and 0.0 <= latency_s <= _LONGEST_BELIEVED_LATENCY_S:
                self._received.latency_s.observe(latency_s)

    def sent(self, num_bytes: int) -> None:
        """An activation left."""
        with self._lock:
            self._sent.count(num_bytes)

    def snapshot(self, now_s: float, resident_bytes: int = 0) -> StageCounters:
        """The totals, with the time that the present state has lasted."""
        with self._lock:
            # The reader's clock was read before the lock was had: a state may have begun since, and no total goes back.
            now_s = max(now_s, self._since_s)
            time_s = dict(self._time_s)
            is_started = self._start_s is not None
            time_s[self._state] += now_s - self._since_s if is_started else 0.0
            return StageCounters(
                stage_index=self._stage_index,
                elapsed_s=now_s - self._start_s if self._start_s is not None else 0.0,
                busy_s=time_s["busy"],
                starved_s=time_s["starved"],
                blocked_s=time_s["blocked"],
                preparing_s=time_s["preparing"],
                idle_s=time_s["idle"],
                prefill=self._steps["prefill"].snapshot(),
                decode=self._steps["decode"].snapshot(),
                mixed=self._steps["mixed"].snapshot(),
                received=self._received.snapshot(),
                sent=self._sent.snapshot(),
                resident_bytes=resident_bytes,
            )


class _Steps:
    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_rows = 0
        self.time_s = HistogramCounter(STEP_BOUNDS_S)

    def snapshot(self) -> StepCounters:
        return StepCounters(self.num_tokens, self.num_rows, self.time_s.snapshot())


class _Link:
    def __init__(self) -> None:
        self.latency_s = HistogramCounter(LATENCY_BOUNDS_S)
        self._num_messages = 0
        self._num_bytes = 0

    def count(self, num_bytes: int) -> None:
        self._num_messages += 1
        self._num_bytes += num_bytes

    def snapshot(self) -> LinkCounters:
        return LinkCounters(self._num_messages, self._num_bytes, self.latency_s.snapshot())
