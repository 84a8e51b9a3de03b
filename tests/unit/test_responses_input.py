"""Items become the conversation that they mean, and errors name the item."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from stageline.server.errors import ApiError, bad_request
from stageline.server.protocol_chat import ChatMessage, NamedToolChoice
from stageline.server.responses_input import chat_request_of, renamed
from stageline.server.responses_protocol import ResponsesRequest


def request(**fields: Any) -> ResponsesRequest:
    return msgspec.json.decode(json.dumps({"model": "m", "input": "hi", **fields}), type=ResponsesRequest)


def roles_and_contents(messages: list[ChatMessage]) -> list[tuple[str, Any]]:
    return [(message.role, message.content) for message in messages]


def test_a_text_is_a_users_message_after_the_instructions() -> None:
    assert roles_and_contents(chat_request_of(request()).messages) == [("user", "hi")]
    told = chat_request_of(request(instructions="Be brief.")).messages
    assert roles_and_contents(told) == [("system", "Be brief."), ("user", "hi")]


def test_instructions_join_a_system_message_that_is_first() -> None:
    items = [{"role": "developer", "content": "Rhyme."}, {"role": "user", "content": "hi"}]
    told = chat_request_of(request(instructions="Be brief.", input=items)).messages
    assert roles_and_contents(told) == [("system", "Be brief.\n\nRhyme."), ("user", "hi")]


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "r2"}]},
    ]
    told = chat_request_of(request(input=items)).messages
    assert roles_and_contents(told) == [("user", "q"), ("assistant", "Let me see."), ("tool", "r1"), ("tool", "r2")]
    assert told[1].reasoning_content == "why"
    assert [(call.id, call.function.name) for call in told[1].tool_calls or ()] == [("c1", "f"), ("c2", "g")]
    assert [message.tool_call_id for message in told[2:]] == ["c1", "c2"]


def test_settings_become_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat = chat_request_of(
        request(
            max_output_tokens=7,
            temperature=0.5,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}},
            reasoning={"effort": "low"},
            include=["message.output_text.logprobs"],
            top_logprobs=2,
            tools=[{"type": "function", "name": "f", "parameters": schema}],
            tool_choice={"type": "function", "name": "f"},
        )
    )
    assert (chat.max_completion_tokens, chat.temperature, chat.reasoning_effort) == (7, 0.5, "low")
    assert (chat.logprobs, chat.top_logprobs) == (True, 2)
    assert chat.response_format and chat.response_format.json_schema
    assert chat.response_format.json_schema.schema == schema
    assert chat.tools and chat.tools[0].function.parameters == schema
    assert isinstance(chat.tool_choice, NamedToolChoice) and chat.tool_choice.function.name == "f"


def test_of_the_tools_only_the_allowed_ones_are_left() -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g", "h")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    chat = chat_request_of(request(tools=tools, tool_choice=allowed))
    assert [tool.function.name for tool in chat.tools or ()] == ["g"] and chat.tool_choice == "required"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"role": "user", "content": "x", "summary": [{"type": "picture"}]}]},
            "input[0].summary[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
            "tool_choice.tools[0].name",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        chat_request_of(request(**fields))
    assert (error.value.status, error.value.param) == (400, param)
    assert param in str(error.value)


def test_what_says_nothing_to_this_server_is_taken() -> None:
    request(max_tool_calls=1, safety_identifier="u", prompt_cache_key="k", service_tier="auto", truncation="auto")
    nobody = {"type": "allowed_tools", "mode": "auto", "tools": []}
    for out_of_range in ({"max_tool_calls": 0}, {"top_logprobs": 21}, {"tool_choice": nobody}):
        with pytest.raises(msgspec.ValidationError):
            request(**out_of_range)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("tools[3].function.name", "tools[3].name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("max_completion_tokens", "max_output_tokens"),
        ("messages", "input"),
        ("temperature", "temperature"),
    ],
)
def test_errors_of_a_chat_name_the_fields_of_a_response(theirs: str, ours: str) -> None:
    error = renamed(bad_request(f"{theirs} is wrong", theirs))
    assert (str(error), error.param) == (f"{ours} is wrong", ours)
