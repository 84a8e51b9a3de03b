"""What a result says about one request, until it becomes an update for whoever asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from stageline.outputs import FinishReason
from stageline.request import RequestFailure, RequestUpdate
from stageline.sampling import TokenLogprobs
from stageline.scheduler.scheduled_request import ScheduledRequest


@dataclass
class News:
    """Filled row by row of a result."""

    request: ScheduledRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    is_last_token_text: bool = False
    failure: RequestFailure | None = None

    def update(self, now_s: float) -> RequestUpdate:
        """As it is sent to whoever asked. Args: now_s: when the result came."""
        request = self.request
        return RequestUpdate(
            request_id=request.asked.request_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            time_s=now_s,
            first_scheduled_s=request.first_scheduled_s,
            first_token_s=request.first_token_s,
            finished_s=now_s if self.finish_reason is not None else None,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            is_last_token_text=self.is_last_token_text,
            failure=self.failure,
        )
