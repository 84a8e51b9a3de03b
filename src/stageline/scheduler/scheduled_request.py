"""A request as the scheduler keeps it: no phases, only computed tokens chasing known tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from stageline.errors import InternalError
from stageline.kv.kv_cache_manager import BlockTable
from stageline.outputs import FinishReason
from stageline.pipeline.microbatch import PromptLogprobs
from stageline.request import EngineRequest
from stageline.sampling import TokenLogprobs
from stageline.timeline.request_journeys import Carriers, RequestTrace

Rank = tuple[int, ...]
"""Smaller comes first; no two requests have the same."""


@dataclass(eq=False)
class ScheduledRequest:
    """One request on its way through the scheduler.

    Args:
        asked: what the client sent.
        arrival_index: order of arrival; smaller is older.
        token_ids: prompt and generated tokens.
        request_number: what the stages call it; a new one after each preemption, so that answers to work done before
            the preemption can be told apart. 0 while the stages do not know it.
        num_computed_tokens: tokens covered by launched microbatches or by the prefix cache.
        num_reused_tokens: of those, the ones that the prefix cache had when it was last started.
        num_in_flight: microbatches in flight that hold a row of it.
        num_losses, num_tokens_at_loss: see `lost`.
        num_described_tokens: leading prompt tokens whose log-probabilities were delivered; the first never has one. A
            recomputation after a preemption describes them again.
    """

    asked: EngineRequest
    arrival_index: int
    token_ids: list[int]
    table: BlockTable = field(default_factory=BlockTable)
    request_number: int = 0
    num_computed_tokens: int = 0
    num_reused_tokens: int = 0
    num_in_flight: int = 0
    num_described_tokens: int = 1
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_losses: int = 0
    num_tokens_at_loss: int = 0
    carriers: Carriers = field(default_factory=Carriers)
    first_scheduled_s: float | None = None
    first_token_s: float | None = None

    def lost(self) -> int:
        """To be called when the stages were lost. Returns: how often in a row without a token of it in between; 0 as
        long as it has only waited."""
        if self.first_scheduled_s is not None:
            self.num_losses = self.num_losses + 1 if len(self.token_ids) == self.num_tokens_at_loss else 1
            self.num_tokens_at_loss = len(self.token_ids)
        return self.num_losses

    @property
    def rank(self) -> Rank:
        """Importance: the priority asked for, then the order of arrival. A preemption does not change it."""
        return self.asked.priority, self.arrival_index

    @property
    def rank_by_length(self) -> Rank:
        """How soon its prompt would be done, among those of its priority."""
        return self.asked.priority, self.gap, self.arrival_index

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.asked.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def gap(self) -> int:
        """Known tokens that no microbatch covers yet: 0 waits for its token, 1 is a decode, more is a prefill.

        -1 waits for two: the decode of the one in flight was announced as well.
        """
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_ending(self) -> bool:
        """Nothing is left to be scheduled: the tokens that it waits for are its last."""
        return self.gap <= 0 and self.num_output_tokens + 1 - self.gap >= self.asked.max_tokens

    @property
    def has_undescribed_tokens(self) -> bool:
        """Log-probabilities of the prompt are wanted and not all delivered."""
        return self.asked.sampler.num_prompt_logprobs >= 0 and self.num_described_tokens < self.num_prompt_tokens

    def take_description(self, described: PromptLogprobs) -> list[TokenLogprobs]:
        """What is new in a run of described prompt tokens. Runs come in order, but begin anew after a preemption."""
        num_known = self.num_described_tokens - described.first_position
        if num_known < 0:
            raise InternalError(
                f"request {self.asked.request_id}: prompt log-probabilities from position {described.first_position} "
                f"on, but those from {self.num_described_tokens} on are missing"
            )
        new = described.positions[num_known:]
        self.num_described_tokens += len(new)
        return new

    @property
    def trace(self) -> RequestTrace:
        """Where it has been, for whoever looks where its time goes."""
        return RequestTrace(
            self.asked.request_id,
            self.asked.arrival_s,
            self.first_scheduled_s,
            self.first_token_s,
            list(self.carriers.first),
            list(self.carriers.recent),
        )

    def stop_cause(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """(finish reason, stop reason) if the request ends with this token as its latest, else None."""
        if token_id in self.asked.eos_token_ids:
            return "stop", None
        if token_id in self.asked.stop_token_ids:
            return "stop", token_id
        if self.num_output_tokens >= self.asked.max_tokens:
            return "length", None
        return None
