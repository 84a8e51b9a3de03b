"""What became of one request, as its client saw it."""

from __future__ import annotations

from itertools import pairwise

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds from the start of the run.

    Args:
        planned_s: when it should have been sent; None if as soon as there was room.
        sent_s, ended_s: when it was sent, and when its answer was complete or had failed.
        arrivals_s: when each part of the answer came that brought text or tokens.
        num_prompt_tokens, num_output_tokens, num_cached_tokens: as the server counts them (its `usage`).
        finish_reason: of its first completion.
        error: what kind of failure, such as "HTTP 429"; None for an answer.
        message: the failure in the server's words.
    """

    planned_s: float | None
    sent_s: float
    ended_s: float
    arrivals_s: list[float]
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None
    message: str = ""

    @property
    def is_answered(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token; None if none came."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two."""
        if not self.arrivals_s or self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between one part of the answer and the next; a part may hold several tokens."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def late_s(self) -> float:
        """How much later than planned it was sent."""
        return 0.0 if self.planned_s is None else max(0.0, self.sent_s - self.planned_s)
