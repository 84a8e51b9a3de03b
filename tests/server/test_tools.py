"""Tool calls of a real model, through the official client: forced ones, found ones, and the turns that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from stageline.config.engine_config import EngineConfig
from stageline.config.serve_config import ServeConfig
from stageline.errors import ConfigError
from stageline.server.start import serve
from tests.server.conftest import MODEL

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
}
SCHEMAS = {"get_weather": CITY, "add": SUM}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given = {"model": MODEL, "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_completion_tokens": 80}
    return client.chat.completions.create(**{**given, **fields})


def check_calls(choice: Any) -> list[tuple[str, Any]]:
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids) and all(one.startswith("call_") for one in ids)
    return calls


def test_a_required_call_is_a_valid_call_of_some_tool(client: openai.OpenAI) -> None:
    [choice] = ask(client, tool_choice="required").choices
    assert check_calls(choice)


def test_without_parallel_calls_there_is_one(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice="required", parallel_tool_calls=False, n=2, temperature=1, seed=1)
    for choice in answer.choices:
        assert len(check_calls(choice)) == 1


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    [choice] = ask(client, tool_choice=WEATHER).choices
    [(name, _)] = check_calls(choice)
    assert name == "get_weather"


@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_a_stream_comes_to_the_same_calls(client: openai.OpenAI, choice: Any) -> None:
    whole = ask(client, tool_choice=choice).choices[0].message.tool_calls
    calls: list[list[str]] = []
    reasons = []
    for chunk in ask(client, tool_choice=choice, stream=True):
        [news] = chunk.choices
        reasons.append(news.finish_reason)
        assert not news.delta.content
        for piece in news.delta.tool_calls or ():
            if piece.id is not None:
                assert piece.index == len(calls) and piece.type == "function"
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
    assert calls == [[call.function.name, call.function.arguments] for call in whole]
    assert reasons[-1] == "tool_calls" and not any(reasons[:-1])


def test_the_clients_own_helper_follows_a_stream_with_calls(client: openai.OpenAI) -> None:
    strict: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    given: Any = {"model": MODEL, "messages": ASKED, "tools": strict, "tool_choice": "required", "temperature": 0}
    with client.chat.completions.stream(**given, max_completion_tokens=80) as stream:
        kinds = {event.type for event in stream}
        [choice] = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds
    for call in choice.message.tool_calls or ():
        jsonschema.validate(call.function.parsed_arguments, SCHEMAS[call.function.name])


def test_special_tokens_that_are_kept_do_not_end_up_in_the_answer(client: openai.OpenAI) -> None:
    """Styles whose markers are special tokens keep them in the text; the one that ends the answer is none of it."""
    asked = {"tools": openai.omit, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    [choice] = ask(client, **asked, extra_body={"skip_special_tokens": False}).choices
    assert choice.finish_reason == "stop" and choice.message.content == ask(client, **asked).choices[0].message.content


def test_a_call_is_found_in_what_the_model_writes_by_itself(client: openai.OpenAI) -> None:
    """A small model seldom decides to call: a form that is text with a call in it decides for it."""
    call = '<tool_call>\\{"name": "add", "arguments": \\{"a": [0-9]{1,2}, "b": [0-9]{1,2}\\}\\}</tool_call>'
    extra = {"structured_outputs": {"regex": f"I add\\.\n{call}\n{call}"}}
    [choice] = ask(client, tool_choice="auto", extra_body=extra).choices
    assert choice.message.content == "I add." and choice.finish_reason == "tool_calls"
    for made in choice.message.tool_calls:
        assert made.function.name == "add"
        jsonschema.validate(json.loads(made.function.arguments), SUM)
    assert len(choice.message.tool_calls) == 2


def test_a_call_that_was_cut_off_ends_by_length(client: openai.OpenAI) -> None:
    [choice] = ask(client, tool_choice=WEATHER, max_completion_tokens=4).choices
    assert choice.finish_reason == "length"


def test_with_tool_choice_none_nothing_is_called(client: openai.OpenAI) -> None:
    [choice] = ask(client, tool_choice="none", max_completion_tokens=8).choices
    assert choice.message.tool_calls is None and choice.message.content


def test_the_tools_and_the_results_of_calls_reach_the_model(client: openai.OpenAI) -> None:
    called = ask(client, tool_choice=WEATHER).choices[0].message
    [call] = called.tool_calls
    turns = [*ASKED, called.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "It rains pineapples."})
    answer = ask(client, messages=turns, tool_choice="none", max_completion_tokens=16)
    assert answer.choices[0].message.content
    bare = ask(client, tools=openai.omit, max_completion_tokens=1)
    told = ask(client, max_completion_tokens=1)
    assert told.usage.prompt_tokens > bare.usage.prompt_tokens + 50
    assert answer.usage.prompt_tokens > bare.usage.prompt_tokens + 20


def test_what_follows_a_prompt_that_begins_reasoning_is_reasoning_until_it_ends(client: openai.OpenAI) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "<think>"}]
    extra = {"continue_final_message": True, "ignore_eos": True}
    asked = {"messages": messages, "tools": openai.omit, "max_completion_tokens": 8}
    message = ask(client, **asked, extra_body=extra).choices[0].message
    assert message.reasoning_content and message.content == ""
    deltas = [chunk.choices[0].delta for chunk in ask(client, **asked, extra_body=extra, stream=True)]
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert len(thoughts) > 1 and "".join(thoughts) == message.reasoning_content
    assert not any(delta.content for delta in deltas)
    silent = ask(client, **asked, extra_body={**extra, "include_reasoning": False}).choices[0].message
    assert not hasattr(silent, "reasoning_content") and silent.content == ""


def test_the_name_of_no_parser_is_refused_before_anything_starts(smollm2_gguf: Path) -> None:
    for flag, settings in (("tool-call", {"tool_call_parser": "what"}), ("reasoning", {"reasoning_parser": "what"})):
        with pytest.raises(ConfigError, match=f"--{flag}-parser what is not known; give one of auto, none, "):
            serve(EngineConfig(model=str(smollm2_gguf)), ServeConfig(port=0, **settings))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": TOOLS + TOOLS}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools[0].function.parameters.type"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice.function.name"),
        ({"messages": [*ASKED, {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{"}}]}]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"bos_token": "x"}}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_by_its_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, **fields)
    assert error.value.param == param
