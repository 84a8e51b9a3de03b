"""Answers of /v1/responses: what an answer's text turns out to be, as items, and the events that tell of their growth.

One idea: an answer is a row of items, of which the last one grows. The same steps build the whole answer and the events
of a stream; a whole answer only forgets the events.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import UnsetType

from stageline.outputs import CompletionOutput
from stageline.server.answer_parsing import AnswerDelta, ToolCallDelta
from stageline.server.chat_answer import ChatPlan, new_parser
from stageline.server.errors import ApiError
from stageline.server.generation import TokenCount
from stageline.server.logprobs import chat_logprobs
from stageline.server.protocol_chat import TokenLogprob
from stageline.server.responses_protocol import (
    EventType,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    ModelResponse,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningSettings,
    ReasoningText,
    ResponseError,
    ResponseEvent,
    ResponsesRequest,
    ResponseStatus,
    ResponseUsage,
    TextFormat,
    TextSettings,
    TextSettingsShown,
)
from stageline.server.state import ServerState

_encoder = msgspec.json.Encoder()
_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}


@dataclass
class _GrowingItem:
    """Args:
    text: a message's or reasoning's text, or a call's arguments.
    logprobs: of a message's tokens so far.
    """

    kind: Literal["message", "function_call", "reasoning"]
    id: str
    call_id: str = ""
    name: str = ""
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def as_item(self, status: ItemStatus) -> OutputItem:
        is_empty = status == "in_progress"
        if self.kind == "function_call":
            return FunctionCall(
                id=self.id, call_id=self.call_id, name=self.name, arguments=self.text, status=status
            )
        if self.kind == "reasoning":
            thoughts = [] if is_empty else [ReasoningText(text=self.text)]
            return ReasoningItem(id=self.id, status=status, content=thoughts)
        said = [] if is_empty else [OutputText(text=self.text, logprobs=self.logprobs)]
        return OutputMessage(id=self.id, status=status, content=said)

    def as_part(self) -> OutputText | ReasoningText:
        if self.kind == "reasoning":
            return ReasoningText(text=self.text)
        return OutputText(text=self.text, logprobs=self.logprobs)


class ResponseBuilder:
    """Takes the engine's outputs of one request; every method gives the events that tell of what it did, encoded."""

    def __init__(self, state: ServerState, request: ResponsesRequest, plan: ChatPlan, count: TokenCount) -> None:
        self._state = state
        self._request = request
        self._plan = plan
        self._count = count
        self._parser = new_parser(state, plan)
        self._items: list[OutputItem] = []
        self._growing: _GrowingItem | None = None
        self._pending_logprobs: list[TokenLogprob] = []
        self._num_events = 0

    def beginning(self) -> bytes:
        response = self.response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def take(self, completion: CompletionOutput) -> bytes:
        """What is new; at the end, all of what ends with it."""
        is_last = completion.finish_reason is not None
        self._describe(completion)
        found = self._parser.feed(completion.text)
        if is_last:
            found = [*found, *self._parser.finish()]
        events = b"".join(self._take_delta(delta) for delta in found)
        return events + self._end(completion) if is_last else events

    def failure(self, error: ApiError) -> bytes:
        """The answer breaks off."""
        event = self._event("error", code=error.code or "server_error", message=str(error), param=error.param)
        response = self.response("failed", error=ResponseError("server_error", str(error)))
        return event + self._event("response.failed", response=response)

    def response(
        self,
        status: ResponseStatus,
        details: IncompleteDetails | None = None,
        error: ResponseError | None = None,
    ) -> ModelResponse:
        """As it is now, without the item that still grows."""
        request, params = self._request, self._plan.params
        return ModelResponse(
            id=self._plan.head.id,
            created_at=self._plan.head.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=details,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=self._plan.head.model,
            output=list(self._items),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning or ReasoningSettings(),
            temperature=params.temperature,
            text=_shown(request.text or TextSettings()),
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_p=params.top_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            max_tool_calls=request.max_tool_calls,
            safety_identifier=request.safety_identifier,
            prompt_cache_key=request.prompt_cache_key,
            top_logprobs=request.top_logprobs or 0,
            truncation=request.truncation or "disabled",
            usage=None if status == "in_progress" else self._usage(),
            user=request.user,
            metadata=request.metadata or {},
        )

    # ---- items ----

    def _take_delta(self, delta: AnswerDelta) -> bytes:
        if delta.tool_call is not None:
            return self._take_call(delta.tool_call)
        kind: Literal["message", "reasoning"] = "message" if delta.content else "reasoning"
        text = delta.content or delta.reasoning
        events = b"" if self._growing is not None and self._growing.kind == kind else self._begin_item(kind)
        growing = self._grown(text)
        if kind == "reasoning":
            self._pending_logprobs.clear()
            return events + self._part_event("response.reasoning_text.delta", delta=text)
        logprobs, self._pending_logprobs = self._pending_logprobs, []
        growing.logprobs += logprobs
        return events + self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _take_call(self, news: ToolCallDelta) -> bytes:
        self._pending_logprobs.clear()
        events = b""
        if news.id is not None:
            events = self._begin_item("function_call", news.id, news.name or "")
        if not news.arguments:
            return events
        growing = self._grown(news.arguments)
        place = len(self._items)
        return events + self._event(
            "response.function_call_arguments.delta", item_id=growing.id, output_index=place, delta=news.arguments
        )

    def _begin_item(
        self, kind: Literal["message", "function_call", "reasoning"], call_id: str = "", name: str = ""
    ) -> bytes:
        events = self._end_item("completed")
        self._growing = growing = _GrowingItem(kind, f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", call_id, name)
        item = growing.as_item("in_progress")
        events += self._event("response.output_item.added", output_index=len(self._items), item=item)
        if kind == "function_call":
            return events
        return events + self._part_event("response.content_part.added", part=growing.as_part())

    def _grown(self, text: str) -> _GrowingItem:
        assert self._growing is not None
        self._growing.text += text
        return self._growing

    def _end_item(self, status: ItemStatus) -> bytes:
        """The item that grows is over, if there is one."""
        growing, place = self._growing, len(self._items)
        if growing is None:
            return b""
        if growing.kind == "function_call":
            events = self._event(
                "response.function_call_arguments.done",
                item_id=growing.id,
                output_index=place,
                name=growing.name,
                arguments=growing.text,
            )
        else:
            if growing.kind == "message":
                done = self._part_event("response.output_text.done", text=growing.text, logprobs=growing.logprobs)
            else:
                done = self._part_event("response.reasoning_text.done", text=growing.text)
            events = done + self._part_event("response.content_part.done", part=growing.as_part())
        item = growing.as_item(status)
        events += self._event("response.output_item.done", output_index=place, item=item)
        self._items.append(item)
        self._growing = None
        return events

    def _end(self, completion: CompletionOutput) -> bytes:
        is_cut_off = completion.finish_reason == "length"
        events = b""
        if self._growing is None and not self._items:
            events = self._begin_item("message")
        if self._growing is not None and self._growing.kind == "message":
            self._growing.logprobs += self._pending_logprobs
        events += self._end_item("incomplete" if is_cut_off else "completed")
        if is_cut_off:
            response = self.response("incomplete", IncompleteDetails("max_output_tokens"))
            return events + self._event("response.incomplete", response=response)
        return events + self._event("response.completed", response=self.response("completed"))

    # ---- numbers ----

    def _describe(self, completion: CompletionOutput) -> None:
        """Tokens' logprobs wait for the text that they belong to; those of reasoning and calls are not shown."""
        num_top = self._plan.num_top_logprobs
        if num_top is None or completion.logprobs is None:
            return
        described = chat_logprobs(self._state.llm.tokenizer, completion.token_ids, completion.logprobs, num_top)
        self._pending_logprobs += described.content or []

    def _usage(self) -> ResponseUsage:
        usage = self._count.usage()
        thoughts = [item.content for item in self._items if isinstance(item, ReasoningItem)]
        text = "".join(thought.text for content in thoughts for thought in content)
        num_reasoning = len(self._state.llm.tokenizer.encode(text, add_special_tokens=False)) if text else 0
        details = usage.prompt_tokens_details
        num_cached = 0 if isinstance(details, UnsetType) else details.cached_tokens
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=num_cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=min(num_reasoning, usage.completion_tokens)),
            total_tokens=usage.total_tokens,
        )

    # ---- events ----

    def _part_event(self, kind: EventType, **fields: Any) -> bytes:
        """About the text of the item that grows: its only part."""
        assert self._growing is not None
        return self._event(
            kind, item_id=self._growing.id, output_index=len(self._items), content_index=0, **fields
        )

    def _event(self, kind: EventType, **fields: Any) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


def _shown(text: TextSettings) -> TextSettingsShown:
    form = text.format or TextFormat()
    if form.type == "json_schema":
        name = form.name or "answer"
        form = TextFormat(
            type="json_schema", name=name, schema=form.schema, description=form.description or None, strict=True
        )
    return TextSettingsShown(format=form, verbosity=text.verbosity or "medium")


def whole_response(
    state: ServerState,
    request: ResponsesRequest,
    plan: ChatPlan,
    count: TokenCount,
    completions: Sequence[CompletionOutput],
) -> ModelResponse:
    """The response to a finished output, which has one completion."""
    [completion] = completions
    builder = ResponseBuilder(state, request, plan, count)
    builder.take(completion)
    is_cut_off = completion.finish_reason == "length"
    if is_cut_off:
        return builder.response("incomplete", IncompleteDetails("max_output_tokens"))
    return builder.response("completed")


