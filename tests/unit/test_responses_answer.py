"""Reasoning, text and calls of one answer are items in order, and their events build them up, however the text came."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from stageline.outputs import CompletionOutput, FinishReason, RequestTimings
from stageline.sampling import SamplingParams
from stageline.server.answer_parsing import AnswerStyle
from stageline.server.chat_answer import ChatPlan
from stageline.server.errors import ApiError
from stageline.server.generation import TokenCount
from stageline.server.request_record import RequestRecord
from stageline.server.responses_answer import ResponseBuilder, whole_response
from stageline.server.responses_input import chat_request_of
from stageline.server.responses_protocol import ModelResponse, ResponseEvent, ResponsesRequest
from stageline.server.state import AnswerHead

TEXT = (
    "<think>\nLet me think.</think>\n\nI look it up.\n"
    '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"a": 2}}\n</tool_call>'
)
STYLE = AnswerStyle(tool_parser="hermes", reasoning_parser="think")


@dataclass
class FakeTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * len(text.split())


def new_builder(**fields: Any) -> tuple[ResponseBuilder, Any]:
    asked = {"model": "m", "input": "hi", "tools": [{"type": "function", "name": "f"}], **fields}
    request = msgspec.json.decode(json.dumps(asked), type=ResponsesRequest)
    head = AnswerHead("resp_1", 1, "m", "fp")
    plan = ChatPlan(chat_request_of(request), head, "prompt", [1, 2, 3], SamplingParams(), None)
    state: Any = SimpleNamespace(answer_style=STYLE, llm=SimpleNamespace(tokenizer=FakeTokenizer()))
    count = TokenCount(RequestRecord("r"), 3, num_output_tokens=50)
    return ResponseBuilder(state, request, plan, count), (state, request, plan, count)


def piece(text: str, finish_reason: FinishReason | None) -> CompletionOutput:
    return CompletionOutput(0, text, [], finish_reason, None, None, None, RequestTimings(0.0))


def decoded(stream: bytes) -> list[ResponseEvent]:
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        kind, data = block.split("\n")
        events.append(msgspec.json.decode(data.removeprefix("data: "), type=ResponseEvent))
        assert kind == f"event: {events[-1].type}"
    return events


def streamed(text: str, size: int, finish_reason: FinishReason = "stop") -> list[ResponseEvent]:
    builder, _ = new_builder()
    stream = builder.beginning()
    for place in range(0, len(text), size):
        stream += builder.take(piece(text[place : place + size], None))
    return decoded(stream + builder.take(piece("", finish_reason)))


def without_ids(response: ModelResponse) -> Any:
    plain = msgspec.to_builtins(response)
    for item in plain["output"]:
        prefix = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}[item["type"]]
        assert item.pop("id").startswith(prefix)
        item.pop("call_id", None)
    assert (plain.pop("completed_at") is not None) == (plain["status"] == "completed")
    return plain


def test_a_whole_answer_is_reasoning_text_and_calls() -> None:
    _, (state, request, plan, count) = new_builder()
    response = whole_response(state, request, plan, count, [piece(TEXT, "stop")])
    done = {"status": "completed"}
    text = {"type": "output_text", "text": "I look it up.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "name": "f", **done}
    thought = {"type": "reasoning_text", "text": "Let me think."}
    assert without_ids(response)["output"] == [
        {"type": "reasoning", "summary": [], "content": [thought], **done},
        {"type": "message", "role": "assistant", "content": [text], **done},
        {"arguments": '{"a": 1}', **call},
        {"arguments": '{"a": 2}', **call},
    ]
    assert response.usage and response.usage.output_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_stream_ends_with_the_whole_answer_and_its_events_build_it(size: int) -> None:
    _, (state, request, plan, count) = new_builder()
    whole = without_ids(whole_response(state, request, plan, count, [piece(TEXT, "stop")]))
    events = streamed(TEXT, size)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert isinstance(last, ModelResponse) and without_ids(last) == whole
    grown: dict[int, str] = {}
    ended: dict[int, Any] = {}
    for event in events:
        if isinstance(event.delta, str):
            assert isinstance(event.output_index, int) and event.output_index not in ended
            grown[event.output_index] = grown.get(event.output_index, "") + event.delta
        if event.type == "response.output_item.done":
            assert isinstance(event.output_index, int)
            ended[event.output_index] = event.item
    assert grown == {0: "Let me think.", 1: "I look it up.", 2: '{"a": 1}', 3: '{"a": 2}'}
    assert [ended[place] for place in range(4)] == last.output


def test_an_answer_without_any_text_is_an_empty_message() -> None:
    last = streamed("", 1)[-1].response
    assert isinstance(last, ModelResponse)
    [item] = without_ids(last)["output"]
    assert item["content"][0]["text"] == ""


def test_an_answer_that_is_cut_off_in_a_call_is_incomplete() -> None:
    event = streamed(TEXT[: TEXT.index("1}}")], 5, "length")[-1]
    assert event.type == "response.incomplete" and isinstance(event.response, ModelResponse)
    states = [item["status"] for item in without_ids(event.response)["output"]]
    assert states == ["completed", "completed", "incomplete"]


def test_an_answer_that_breaks_off_says_why() -> None:
    builder, _ = new_builder()
    stream = builder.beginning() + builder.take(piece("Hel", None))
    events = decoded(stream + builder.failure(ApiError(500, "a stage was lost", code="lost")))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2].message, events[-2].code) == ("a stage was lost", "lost")
    failed = events[-1].response
    assert isinstance(failed, ModelResponse) and failed.status == "failed" and failed.error
    assert failed.error.message == "a stage was lost"
