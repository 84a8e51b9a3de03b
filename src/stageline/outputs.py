"""What a user gets back for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class RequestTimings:
    """When things happened to a request, in seconds on the engine's clock; None while they have not.

    Args:
        token_times_s: when the engine had each output token. The text of a token may come later, if it is held back.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    token_times_s: Sequence[float] = ()

    @property
    def inter_token_s(self) -> list[float]:
        """Times between one output token and the next (ITL); one fewer than there are tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    def tpot_s(self, num_output_tokens: int) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        if self.finished_s is None or self.first_token_s is None or num_output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (num_output_tokens - 1)


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        finish_reason: stop (end-of-sequence, stop string or stop token), length, abort; None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence or length.
        logprobs: per generated token, the asked-for tokens by id; None if not asked for.
        timings: this completion's own.
        new_text: what `text` gained since the request's previous output.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    timings: RequestTimings
    new_text: str = ""


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions.

    Args:
        prompt_logprobs: per prompt token; the first is None. None if not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    is_finished: bool = False

    def after(self, missed: RequestOutput) -> RequestOutput:
        """This output for one who did not see the one before it: what was new then is still new."""
        outputs = [
            replace(now, new_text=before.new_text + now.new_text)
            for before, now in zip(missed.outputs, self.outputs, strict=True)
        ]
        return replace(self, outputs=outputs)
