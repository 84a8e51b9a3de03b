"""One record type for what happened where and when, for real and simulated runs alike."""

from __future__ import annotations

from typing import Literal

import msgspec

SpanKind = Literal["receive_wait", "forward", "sample", "send", "schedule"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something a stage did for one microbatch. `s2 m17 forward` is stage 2 computing microbatch 17.

    Args:
        stage_index: which stage; -1 is the engine.
        microbatch: the microbatch's number.
        kind: receive_wait (no input yet), forward, sample (last stage), send, schedule (engine).
        start_s, end_s: on the run's clock.
        num_tokens: tokens in the microbatch.
        num_rows: requests in the microbatch.
    """

    stage_index: int
    microbatch: int
    kind: SpanKind
    start_s: float
    end_s: float
    num_tokens: int
    num_rows: int

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def __str__(self) -> str:
        return f"s{self.stage_index} m{self.microbatch} {self.kind}"
