"""Answers of /v1/chat/completions: the engine's outputs, taken apart into content, reasoning and tool calls.

One idea: an answer's parts are found while its text comes, by the same parser for a stream and for a whole answer, so
both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from stageline.outputs import CompletionOutput, RequestOutput
from stageline.sampling import SamplingParams
from stageline.server.answer_parsing import AnswerDelta, AnswerParser, ToolCallDelta, make_answer_parser
from stageline.server.generation import TokenCount
from stageline.server.logprobs import chat_logprobs, prompt_logprobs
from stageline.server.protocol import Usage
from stageline.server.protocol_chat import (
    AnswerMessage,
    CalledFunction,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FinishReason,
    FunctionDelta,
    PromptLogprobs,
    ToolCall,
    ToolCallPiece,
)
from stageline.server.state import AnswerHead, ServerState
from stageline.server.streaming import encode_event


@dataclass(frozen=True)
class ChatPlan:
    """A chat request, understood.

    Args:
        prompt: the conversation as the model's template wrote it.
        num_top_logprobs: None if tokens are not to be described.
    """

    request: ChatCompletionRequest
    head: AnswerHead
    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    num_top_logprobs: int | None


def new_parser(state: ServerState, plan: ChatPlan) -> AnswerParser:
    """For the text of one answer."""
    return make_answer_parser(
        state.answer_style,
        plan.request.tools,
        plan.request.tool_choice,
        prompt=plan.prompt,
        is_parallel=plan.request.parallel_tool_calls is not False,
        has_form=plan.params.structured_outputs is not None,
    )


# ---- whole answers ----


@dataclass
class AnswerParts:
    """What the deltas of one answer come to."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def take(self, deltas: Sequence[AnswerDelta]) -> None:
        for delta in deltas:
            self.content.append(delta.content)
            self.reasoning.append(delta.reasoning)
            if delta.tool_call is not None:
                self._take_call(delta.tool_call)

    def _take_call(self, news: ToolCallDelta) -> None:
        if news.index == len(self.calls):
            function = CalledFunction(name=news.name or "", arguments="")
            self.calls.append(ToolCall(id=news.id or "", function=function))
        self.calls[news.index].function.arguments += news.arguments


def whole_answer(state: ServerState, plan: ChatPlan, output: RequestOutput, count: TokenCount) -> ChatCompletion:
    """All choices of a finished output."""
    return ChatCompletion(
        id=plan.head.id,
        created=plan.head.created,
        model=plan.head.model,
        system_fingerprint=plan.head.fingerprint,
        choices=[_whole_choice(state, plan, completion) for completion in output.outputs],
        usage=count.usage(),
        prompt_logprobs=_prompt_logprobs(output),
        prompt_token_ids=output.prompt_token_ids if plan.request.return_token_ids else UNSET,
    )


def _whole_choice(state: ServerState, plan: ChatPlan, completion: CompletionOutput) -> ChatChoice:
    parser = new_parser(state, plan)
    parts = AnswerParts()
    parts.take(parser.feed(completion.text))
    parts.take(parser.finish())
    content, reasoning = "".join(parts.content), "".join(parts.reasoning)
    message = AnswerMessage(
        content=None if parts.calls and not content else content,
        reasoning_content=reasoning if reasoning and plan.request.include_reasoning is not False else UNSET,
        tool_calls=parts.calls or UNSET,
    )
    return ChatChoice(
        index=completion.index,
        message=message,
        logprobs=_logprobs(state, plan, completion),
        finish_reason=_finish_reason(completion, bool(parts.calls)),
        stop_reason=stop_reason(completion),
        token_ids=completion.token_ids if plan.request.return_token_ids else UNSET,
    )


def stop_reason(completion: CompletionOutput) -> int | str | UnsetType:
    return UNSET if completion.stop_reason is None else completion.stop_reason


def _finish_reason(completion: CompletionOutput, has_calls: bool) -> FinishReason:
    assert completion.finish_reason in ("stop", "length"), completion.finish_reason
    return "tool_calls" if has_calls and completion.finish_reason == "stop" else completion.finish_reason


def _logprobs(state: ServerState, plan: ChatPlan, completion: CompletionOutput) -> ChoiceLogprobs | None:
    if plan.num_top_logprobs is None or completion.logprobs is None:
        return None
    tokenizer = state.llm.tokenizer
    return chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, plan.num_top_logprobs)


def _prompt_logprobs(output: RequestOutput) -> PromptLogprobs | UnsetType:
    return UNSET if output.prompt_logprobs is None else prompt_logprobs(output.prompt_logprobs)


# ---- streams ----


@dataclass
class _ChoiceProgress:
    """Args:
    has_begun: its role was sent.
    """

    parser: AnswerParser
    has_begun: bool = False
    has_calls: bool = False


class ChatStream:
    """Turns the engine's deltas into chunks.

    A chunk is sent for what a reader can use. Tokens whose text is not decided yet, because it may become a character,
    a stop string or a tool call, come with the text; or at once, if their logprobs or ids were asked for.
    """

    def __init__(self, state: ServerState, plan: ChatPlan, count: TokenCount) -> None:
        self._state = state
        self._plan = plan
        self._count = count
        self._choices = [_ChoiceProgress(new_parser(state, plan)) for _ in range(plan.params.n)]
        self._shows_reasoning = plan.request.include_reasoning is not False
        self._prompt_logprobs: PromptLogprobs = []
        self._has_begun = False

    def take(self, output: RequestOutput) -> bytes:
        """The events for one output; perhaps none."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs += prompt_logprobs(output.prompt_logprobs)
        return b"".join(self._events(completion, output) for completion in output.outputs)

    def ending(self) -> bytes:
        """After the last output: the usage, if it was asked for."""
        if not self._plan.request.wants_usage_chunk:
            return b""
        return encode_event(self._chunk([], self._count.usage()))

    def _events(self, completion: CompletionOutput, output: RequestOutput) -> bytes:
        progress = self._choices[completion.index]
        is_last = completion.finish_reason is not None
        found = progress.parser.feed(completion.text)
        if is_last:
            found = [*found, *progress.parser.finish()]
        deltas = [delta for answer_delta in found if (delta := self._delta(answer_delta)) is not None]
        progress.has_calls |= any(delta.tool_calls is not UNSET for delta in deltas)
        logprobs = _logprobs(self._state, self._plan, completion)
        token_ids = completion.token_ids if self._plan.request.return_token_ids else UNSET
        has_details = logprobs is not None or token_ids is not UNSET
        if is_last or (not deltas and has_details and completion.token_ids):
            deltas.append(Delta())
        events = []
        if deltas and not progress.has_begun:
            progress.has_begun = True
            first = ChunkChoice(index=completion.index, delta=Delta(role="assistant", content=""))
            events.append(self._event(first, output))
        for place, delta in enumerate(deltas):
            is_first, ends = place == 0, is_last and place == len(deltas) - 1
            choice = ChunkChoice(
                index=completion.index,
                delta=delta,
                logprobs=logprobs if is_first else None,
                finish_reason=_finish_reason(completion, progress.has_calls) if ends else None,
                stop_reason=stop_reason(completion) if ends else UNSET,
                token_ids=token_ids if is_first else UNSET,
            )
            events.append(self._event(choice, output))
        return b"".join(events)

    def _delta(self, found: AnswerDelta) -> Delta | None:
        reasoning = found.reasoning if self._shows_reasoning else ""
        if not found.content and not reasoning and found.tool_call is None:
            return None
        return Delta(
            content=found.content or UNSET,
            reasoning_content=reasoning or UNSET,
            tool_calls=UNSET if found.tool_call is None else [_call_piece(found.tool_call)],
        )

    def _event(self, choice: ChunkChoice, output: RequestOutput) -> bytes:
        usage: Usage | UnsetType | None = UNSET
        if self._plan.request.wants_usage_in_every_chunk:
            usage = self._count.usage()
        elif self._plan.request.wants_usage_chunk:
            usage = None
        if self._has_begun:
            return encode_event(self._chunk([choice], usage))
        self._has_begun = True
        ids = output.prompt_token_ids if self._plan.request.return_token_ids else UNSET
        return encode_event(self._chunk([choice], usage, ids, self._prompt_logprobs or UNSET))

    def _chunk(
        self,
        choices: list[ChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        described_prompt: PromptLogprobs | UnsetType = UNSET,
    ) -> ChatCompletionChunk:
        head = self._plan.head
        return ChatCompletionChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            usage=usage,
            prompt_logprobs=described_prompt,
            prompt_token_ids=prompt_token_ids,
        )


def _call_piece(news: ToolCallDelta) -> ToolCallPiece:
    is_first = news.id is not None
    return ToolCallPiece(
        index=news.index,
        id=news.id if news.id is not None else UNSET,
        type="function" if is_first else UNSET,
        function=FunctionDelta(name=news.name if news.name is not None else UNSET, arguments=news.arguments),
    )
