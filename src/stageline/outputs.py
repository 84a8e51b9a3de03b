"""What a user gets back for a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class OutputKind(Enum):
    """What the outputs of a request hold.

    CUMULATIVE: everything so far, each time.
    DELTA: only what is new since the output before, so that following a long answer costs no more than reading it.
    FINAL_ONLY: everything, once, when all completions are finished.
    """

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


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
        token_times_s: when the engine had each of the output's tokens. Text may come later than its token, if it is
            held back.
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

    In an output of the kind DELTA, `text`, `token_ids`, `logprobs` and `timings.token_times_s` are the new ones only.

    Args:
        finish_reason: stop (end-of-sequence, stop string or stop token), length, abort; None while it goes on. Never
            error: a request that fails has no output, its reader gets the error.
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
        prompt_logprobs: per prompt token; the first is None. None if not asked for. In a delta, the new ones only.
        outputs: in the order of their index; in a delta, only the completions that there is news of.
        is_delta: it holds only what is new since the output before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    is_finished: bool = False
    is_delta: bool = False

    def after(self, missed: RequestOutput) -> RequestOutput:
        """This output for one who did not see the one before it: what was new then is still new."""
        by_index = {completion.index: completion for completion in missed.outputs}
        for now in self.outputs:
            before = by_index.get(now.index)
            by_index[now.index] = now if before is None else _joined(before, now, self.is_delta)
        prompt_logprobs = self.prompt_logprobs
        if self.is_delta and prompt_logprobs is not None and missed.prompt_logprobs is not None:
            prompt_logprobs = missed.prompt_logprobs + prompt_logprobs
        outputs = [by_index[index] for index in sorted(by_index)]
        return replace(self, outputs=outputs, prompt_logprobs=prompt_logprobs)


def _joined(before: CompletionOutput, now: CompletionOutput, is_delta: bool) -> CompletionOutput:
    new_text = before.new_text + now.new_text
    if not is_delta:
        return replace(now, new_text=new_text)
    token_times_s = (*before.timings.token_times_s, *now.timings.token_times_s)
    return replace(
        now,
        text=new_text,
        new_text=new_text,
        token_ids=before.token_ids + now.token_ids,
        logprobs=None if before.logprobs is None or now.logprobs is None else before.logprobs + now.logprobs,
        timings=replace(now.timings, token_times_s=token_times_s),
    )
