"""Answers of /v1/completions: the engine's outputs as text, with the prompt before them if it is to be echoed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET, UnsetType

from stageline.outputs import CompletionOutput, RequestOutput
from stageline.sampling import SamplingParams
from stageline.server.generation import TokenCount
from stageline.server.logprobs import Described, completion_logprobs, narrowed, prompt_logprobs
from stageline.server.protocol import Usage
from stageline.server.protocol_chat import PromptLogprobs
from stageline.server.protocol_completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from stageline.server.state import AnswerHead, ServerState
from stageline.server.streaming import encode_event


@dataclass(frozen=True)
class PlannedPrompt:
    """Args:
    text: to be echoed; empty if it is not.
    """

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class CompletionPlan:
    """A completion request, understood. `params.n` is best_of."""

    request: CompletionRequest
    head: AnswerHead
    prompts: list[PlannedPrompt]
    params: SamplingParams

    @property
    def num_choices(self) -> int:
        """Of each prompt."""
        return self.request.n or 1

    @property
    def is_only_scored(self) -> bool:
        """Nothing is to be generated."""
        return self.request.max_tokens == 0

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.request.echo) and self.request.logprobs is not None


def whole_answer(
    state: ServerState, plan: CompletionPlan, outputs: Sequence[RequestOutput], count: TokenCount
) -> Completion:
    """The choices of all prompts, whose outputs are finished."""
    choices = []
    for place, output in enumerate(outputs):
        for rank, completion in enumerate(_best(plan, output)):
            writer = _ChoiceWriter(state, plan, place, place * plan.num_choices + rank)
            choices.append(writer.choice(completion, output.prompt_logprobs))
    return _completion(plan, choices, count.usage())


def _best(plan: CompletionPlan, output: RequestOutput) -> list[CompletionOutput]:
    """As many as were asked for; of more, those whose tokens are likeliest in the mean."""
    if len(output.outputs) == plan.num_choices:
        return output.outputs
    ranked = sorted(output.outputs, key=lambda one: -(one.cumulative_logprob or 0.0) / max(1, len(one.token_ids)))
    return ranked[: plan.num_choices]


class CompletionStream:
    """Turns the engine's deltas into chunks: one for each choice that has news."""

    def __init__(self, state: ServerState, plan: CompletionPlan, count: TokenCount) -> None:
        self._plan = plan
        self._count = count
        self._writers = [
            _ChoiceWriter(state, plan, index // plan.num_choices, index)
            for index in range(len(plan.prompts) * plan.num_choices)
        ]
        self._prompt_logprobs: list[list[Described | None]] = [[] for _ in plan.prompts]

    def take(self, place: int, output: RequestOutput) -> bytes:
        """The events for one output of the prompt at that place; perhaps none."""
        self._prompt_logprobs[place] += output.prompt_logprobs or []
        events = []
        for completion in output.outputs:
            writer = self._writers[place * self._plan.num_choices + completion.index]
            if completion.text or completion.finish_reason is not None or writer.shows_details(completion):
                choice = writer.choice(completion, self._prompt_logprobs[place])
                events.append(encode_event(_completion(self._plan, [choice], self._usage_so_far())))
        return b"".join(events)

    def ending(self) -> bytes:
        """After the last output: the usage, if it was asked for."""
        if not self._plan.request.wants_usage_chunk:
            return b""
        return encode_event(_completion(self._plan, [], self._count.usage()))

    def _usage_so_far(self) -> Usage | UnsetType | None:
        if self._plan.request.wants_usage_in_every_chunk:
            return self._count.usage()
        return None if self._plan.request.wants_usage_chunk else UNSET


@dataclass
class _ChoiceWriter:
    """One choice, in one piece or in several.

    Args:
        place: of its prompt.
        offset: characters of text that its tokens' texts came to so far.
    """

    state: ServerState
    plan: CompletionPlan
    place: int
    index: int
    offset: int = 0
    has_begun: bool = field(default=False)

    def shows_details(self, completion: CompletionOutput) -> bool:
        """Whether its new tokens are worth a chunk without text."""
        is_asked = self.plan.request.logprobs is not None or bool(self.plan.request.return_token_ids)
        return is_asked and bool(completion.token_ids)

    def choice(
        self, completion: CompletionOutput, described_prompt: list[Described | None] | None
    ) -> CompletionChoice:
        """The next piece. The first one has what was asked for about the prompt."""
        request, is_first = self.plan.request, not self.has_begun
        self.has_begun = True
        prompt = self.plan.prompts[self.place]
        is_scored = self.plan.is_only_scored
        text = "" if is_scored else completion.text
        prompt_ids: list[int] | UnsetType = UNSET
        shown_prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        if is_first:
            text = prompt.text + text
            prompt_ids = prompt.token_ids if request.return_token_ids else UNSET
            if request.prompt_logprobs is not None and described_prompt is not None:
                shown_prompt_logprobs = prompt_logprobs(narrowed(described_prompt, request.prompt_logprobs))
        return CompletionChoice(
            index=self.index,
            text=text,
            logprobs=self._logprobs(completion, described_prompt if is_first else None),
            finish_reason=_finish_reason(completion, is_scored),
            stop_reason=UNSET if completion.stop_reason is None or is_scored else completion.stop_reason,
            token_ids=([] if is_scored else completion.token_ids) if request.return_token_ids else UNSET,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=shown_prompt_logprobs,
        )

    def _logprobs(
        self, completion: CompletionOutput, described_prompt: list[Described | None] | None
    ) -> CompletionLogprobs | None:
        if self.plan.request.logprobs is None or completion.logprobs is None:
            return None
        token_ids: list[int] = []
        described: list[Described | None] = []
        texts: list[str] = []
        if self.plan.echoes_logprobs and described_prompt is not None:
            token_ids += self.plan.prompts[self.place].token_ids
            described += narrowed(described_prompt, self.plan.request.logprobs)
            texts = [self.state.llm.tokenizer.token_text(token_ids[0])]
        if not self.plan.is_only_scored:
            token_ids += completion.token_ids
            described += completion.logprobs
        shown = completion_logprobs(token_ids, described, self.offset, texts)
        self.offset += sum(len(text) for text in shown.tokens)
        return shown


def _finish_reason(completion: CompletionOutput, is_only_scored: bool) -> Literal["stop", "length"] | None:
    if completion.finish_reason is None:
        return None
    if is_only_scored:
        return "length"
    assert completion.finish_reason in ("stop", "length"), completion.finish_reason
    return completion.finish_reason


def _completion(
    plan: CompletionPlan, choices: list[CompletionChoice], usage: Usage | UnsetType | None
) -> Completion:
    head = plan.head
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.fingerprint,
        choices=choices,
        usage=usage,
    )
