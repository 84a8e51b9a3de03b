"""A request as tokens: what clients (text) hand to the engine, and the news that come back."""

from __future__ import annotations

import msgspec

from stageline.errors import InternalError, RequestError, StagelineError
from stageline.outputs import FinishReason
from stageline.sampling import SamplerSpec, TokenLogprobs


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like, as a definition that `stageline.grammar` compiles.

    Args:
        field: where the user said so, for messages.
    """

    field: str
    definition: str


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to be generated. A user's request with n > 1 becomes n of these.

    Args:
        request_id: unique among live requests.
        max_tokens: most tokens to generate, already bounded by the model's length.
        eos_token_ids: end the completion with no stop reason; empty if end-of-sequence is ignored.
        stop_token_ids: end the completion, the id being the stop reason.
        arrival_s: on the engine's clock.
        priority: smaller is served first; equal ones in the order of their arrival.
        cache_salt: only requests with the same salt share cached prefixes.
        deadline_s: when it ends unfinished at the latest, on the engine's clock; None for never.
        grammar: what its tokens must spell; None for anything.
        num_completions: of the user's request, told by the first of them; 0 for the others.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampler: SamplerSpec
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    arrival_s: float
    priority: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    grammar: GrammarSpec | None = None
    num_completions: int = 1


class RequestFailure(msgspec.Struct, frozen=True):
    """Why one request failed on its way, while others go on.

    Args:
        field: of the user's request, if that is at fault; empty if Stageline is.
    """

    message: str
    field: str = ""

    def as_error(self) -> StagelineError:
        return RequestError(self.message, self.field) if self.field else InternalError(self.message)


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """News of one completion; `token_ids` are the new ones only. The last update has a finish reason.

    Args:
        logprobs: one per new token if the request asked for them, else empty.
        prompt_logprobs: of the prompt's tokens after the first, the next run of them as they become known.
        stop_reason: the stop token's id, if one ended it. The stop token is the last of `token_ids`.
        is_last_token_text: what ended it was a grammar that its last token completed, so that one is no stop token.
        failure: with the finish reason "error", and only then: what its reader shall hear.
        time_s: when the engine had these news, on its clock.
        first_scheduled_s, first_token_s, finished_s: on the engine's clock, None while they have not happened.
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    stop_reason: int | None
    time_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float | None
    num_cached_tokens: int
    num_preemptions: int
    is_last_token_text: bool = False
    failure: RequestFailure | None = None
