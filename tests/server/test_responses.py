"""/v1/responses of a real model, through the official client: whole, as events, with tools and with a form."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.conftest import MODEL

SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SUM, "strict": True}
FORM: Any = {"format": {"type": "json_schema", "name": "sum", "schema": SUM, "strict": True}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 60}
    return client.responses.create(**{**given, **fields})


def events_of(client: openai.OpenAI, **fields: Any) -> list[Any]:
    return list(ask(client, stream=True, **fields))


def test_a_text_is_answered(client: openai.OpenAI) -> None:
    answer = ask(client, metadata={"k": "v"}, instructions="Be brief.", user="u", store=True)
    assert answer.status == "completed" and "Paris" in answer.output_text
    assert (answer.error, answer.incomplete_details, answer.previous_response_id) == (None, None, None)
    assert (answer.instructions, answer.metadata, answer.model) == ("Be brief.", {"k": "v"}, MODEL)
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 0
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_the_answer_is_that_of_a_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=60)
    answer = ask(client)
    assert answer.output_text == chat.choices[0].message.content
    assert chat.usage and answer.usage.input_tokens == chat.usage.prompt_tokens


def test_an_answer_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    answer = ask(client, max_output_tokens=3)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 3 and answer.output[0].status == "incomplete"
    assert events_of(client, max_output_tokens=3)[-1].type == "response.incomplete"


def test_a_stream_tells_the_whole_answer_in_the_order_of_the_official_events(client: openai.OpenAI) -> None:
    whole = ask(client)
    events = events_of(client)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last = events[-1].response
    assert last.output_text == text and last.usage.output_tokens == whole.usage.output_tokens
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert events[0].response.output == [] and events[0].response.usage is None


def test_the_clients_own_helper_follows_the_stream(client: openai.OpenAI) -> None:
    given: Any = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 60}
    with client.responses.stream(**given) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert snapshots[-1] == answer.output_text


def test_a_forced_call_is_an_item_and_its_result_can_be_sent_back(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What is 2 and 3?"}]
    answer = ask(client, input=asked, tools=[ADD], tool_choice={"type": "function", "name": "add"})
    [call] = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    jsonschema.validate(json.loads(call.arguments), SUM)
    turns = [*asked, call.model_dump(exclude_none=True)]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    again = ask(client, input=turns, tools=[ADD], max_output_tokens=8)
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_a_streamed_call_has_the_events_of_a_call(client: openai.OpenAI) -> None:
    events = events_of(client, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    kinds = [event.type for event in events]
    num_deltas = kinds.count("response.function_call_arguments.delta")
    assert num_deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * num_deltas,
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    arguments = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
    assert events[-3].arguments == arguments == events[-1].response.output[0].arguments
    jsonschema.validate(json.loads(arguments), SUM)
    assert events[2].item.call_id == events[-2].item.call_id


def test_an_answer_keeps_to_its_form(client: openai.OpenAI) -> None:
    answer = ask(client, text=FORM)
    jsonschema.validate(json.loads(answer.output_text), SUM)
    assert answer.text.format.schema_ == SUM


def test_logprobs_are_given_for_each_token_of_the_text(client: openai.OpenAI) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = ask(client, **asked)
    [part] = answer.output[0].content
    assert "".join(one.token for one in part.logprobs).removesuffix("<|im_end|>") == part.text
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    done = next(event for event in events_of(client, **asked) if event.type == "response.output_text.done")
    assert [one.token for one in done.logprobs] == [one.token for one in part.logprobs]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": "word " * 20_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused_by_its_field(
    client: openai.OpenAI, fields: Any, param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, stream=stream, **fields)
    assert error.value.param == param


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ask(client, model="nobody")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
