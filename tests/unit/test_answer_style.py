"""A model's style is told from its chat template; tools are checked by name; what must be called is a form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import llguidance
import pytest

from stageline.errors import ConfigError, RequestError
from stageline.server.answer_parsing import (
    AnswerStyle,
    check_tools,
    choose_answer_style,
    structured_outputs_of_tool_choice,
)
from stageline.server.answer_parsing.prompt_tools import tools_as_text
from stageline.server.protocol_chat import FunctionDefinition, NamedFunction, NamedToolChoice, Tool, ToolChoice

HERMES = "{% if tools %}<tool_call>{% endif %}"


@dataclass
class FakeTokenizer:
    """Text is its own token ids; `special` texts are skipped."""

    chat_template_sources: list[str]
    special: Sequence[str] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = "".join(map(chr, ids))
        return "" if skip_special_tokens and text in self.special else text


@dataclass
class Settings:
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


@dataclass
class Request:
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None


def tool(name: str, parameters: Any = None) -> Tool:
    return Tool(type="function", function=FunctionDefinition(name=name, parameters=parameters))


def named(name: str) -> NamedToolChoice:
    return NamedToolChoice(type="function", function=NamedFunction(name=name))


@pytest.mark.parametrize(
    ("template", "names", "tool_parser", "reasoning_parser"),
    [
        ("{{ messages }}", ["m"], "hermes", "none"),
        ("{% if tools %}other{% endif %}", ["m"], "none", "none"),
        (HERMES + "{{ content.split('</think>')[-1] }}", ["m"], "hermes", "think"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}[THINK]", ["m"], "mistral", "mistral"),
        ("{% if tools %}<|python_tag|>{% endif %}", ["m"], "llama3_json", "none"),
        ("{% if tools %}[func_name1(params_name1=params_value1{% endif %}", ["m"], "pythonic", "none"),
        ("{{ messages }}", ["org/DeepSeek-R1-Distill"], "hermes", "think"),
    ],
)
def test_auto_reads_the_template(template: str, names: list[str], tool_parser: str, reasoning_parser: str) -> None:
    style = choose_answer_style(FakeTokenizer([template]), Settings(), names)
    assert (style.tool_parser, style.reasoning_parser) == (tool_parser, reasoning_parser)


def test_the_operators_word_wins_over_the_template() -> None:
    style = choose_answer_style(FakeTokenizer([HERMES]), Settings("llama3_json", "deepseek_r1"), ["m"])
    assert (style.tool_parser, style.reasoning_parser) == ("llama3_json", "think")
    assert choose_answer_style(FakeTokenizer([HERMES]), Settings("none", "none"), ["m"]) == AnswerStyle()
    unknown = [(Settings("what"), "--tool-call-parser what"), (Settings("auto", "x"), "--reasoning-parser x")]
    for settings, flag in unknown:
        with pytest.raises(ConfigError, match=flag):
            choose_answer_style(FakeTokenizer([HERMES]), settings, ["m"])


def test_special_tokens_are_kept_only_where_a_marker_is_one() -> None:
    style = choose_answer_style(FakeTokenizer(["[TOOL_CALLS]"], ["[TOOL_CALLS]"]), Settings(), ["m"])
    assert style.needs_special_tokens(has_tools=True) and not style.needs_special_tokens(has_tools=False)
    style = choose_answer_style(FakeTokenizer(["[TOOL_CALLS]"]), Settings(), ["m"])
    assert not style.needs_special_tokens(has_tools=True)
    style = choose_answer_style(FakeTokenizer(["<think>"], ["</think>"]), Settings(), ["m"])
    assert style.needs_special_tokens(has_tools=False)


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([tool("")], None, "tools[0].function.name"),
        ([tool("ok"), tool("a b")], None, "tools[1].function.name"),
        ([tool("x" * 65)], None, "tools[0].function.name"),
        ([tool("f"), tool("f")], None, "tools[1].function.name"),
        ([tool(f"f{n}") for n in range(200)], None, "tools"),
        ([tool("f", {"type": "array"})], None, "tools[0].function.parameters.type"),
        ([tool("f", {"properties": []})], None, "tools[0].function.parameters.properties"),
        ([tool("f", {"properties": {"a": 1}})], None, "tools[0].function.parameters.properties.a"),
        ([tool("f", {"properties": {"a": {"type": "text"}}})], None, "tools[0].function.parameters.properties.a.type"),
        ([tool("f", {"required": "a"})], None, "tools[0].function.parameters.required"),
        ([tool("f")], named("g"), "tool_choice.function.name"),
        (None, "required", "tool_choice"),
        ([], named("f"), "tool_choice"),
    ],
)
def test_tools_that_cannot_be_called_are_refused_by_their_field(
    tools: list[Tool] | None, choice: ToolChoice | None, field: str
) -> None:
    with pytest.raises(RequestError) as error:
        check_tools(Request(tools, choice))
    assert error.value.field == field and field in str(error.value)


def test_tools_that_can_be_called_pass() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": True}, "required": ["a"]}
    check_tools(Request([tool("a.b-c_1", parameters), tool("g", {})], named("g")))
    check_tools(Request(None, "auto"))
    check_tools(Request([], "none"))


TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def schema_for(tools: list[Tool], choice: ToolChoice, is_parallel: bool = True) -> dict[str, Any]:
    form = structured_outputs_of_tool_choice(tools, choice, is_parallel)
    assert form is not None and isinstance(form.json, dict)
    return form.json


def test_an_answer_that_must_call_has_a_form_that_allows_calls_only() -> None:
    schema = schema_for([tool("tree", TREE), tool("weather", CITY), tool("now")], "required")
    jsonschema.Draft202012Validator.check_schema(schema)
    good: list[Any] = [
        [{"name": "weather", "arguments": {"city": "Oslo"}}],
        [{"name": "tree", "arguments": {"root": {"v": 1, "next": {"v": 2}}}}, {"name": "now", "arguments": {}}],
    ]
    bad: list[Any] = [
        [],
        {},
        [{"name": "other", "arguments": {}}],
        [{"name": "weather", "arguments": {}}],
        [{"name": "weather", "arguments": {"city": "Oslo", "more": 1}}],
        [{"name": "tree", "arguments": {"root": {"v": 1, "next": {"v": "2"}}}}],
        [{"name": "now", "arguments": {"a": 1}}],
        [{"name": "now"}],
    ]
    for calls in good:
        jsonschema.validate(calls, schema)
    for calls in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(calls, schema)
    one = schema_for([tool("now")], "required", is_parallel=False)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"name": "now", "arguments": {}}] * 2, one)


def test_a_named_functions_answer_is_its_arguments() -> None:
    tools = [tool("tree", TREE), tool("weather", CITY)]
    assert schema_for(tools, named("tree")) == {**TREE, "additionalProperties": False}
    assert schema_for([tool("now")], named("now"))["additionalProperties"] is False


def test_the_forms_are_ones_that_the_sampler_can_keep() -> None:
    tools = [tool("tree", TREE), tool("weather", CITY), tool("now")]
    for choice in ("required", named("tree")):
        schema = schema_for(tools, choice)  # type: ignore[arg-type]
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
        assert not is_error, messages


@pytest.mark.parametrize(
    ("tools", "choice"), [(None, "auto"), ([tool("f")], "auto"), ([tool("f")], None), ([tool("f")], "none")]
)
def test_an_answer_that_need_not_call_has_no_form(tools: list[Tool] | None, choice: ToolChoice | None) -> None:
    assert structured_outputs_of_tool_choice(tools, choice) is None


TOLD = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALL = {"name": "f", "arguments": {"a": "é"}}
TURNS = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": CALL}]},
    {"role": "tool", "content": "r1", "tool_call_id": "1"},
    {"role": "tool", "content": "r2", "tool_call_id": "2"},
    {"role": "user", "content": "and?"},
]


def test_a_template_without_tools_is_told_of_them_in_its_texts() -> None:
    told = tools_as_text(TURNS, TOLD, ["{{ messages }}"])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user", "user"]
    assert json.dumps(TOLD[0]) in told[0]["content"] and "<tool_call>" in told[0]["content"]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert told[2] == {"role": "assistant", "content": call}
    assert told[3]["content"] == "<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>"
    with_system = tools_as_text([{"role": "system", "content": "Be brief."}], TOLD, [""])
    assert len(with_system) == 1 and with_system[0]["content"].startswith("Be brief.\n\nYou may call")


def test_a_template_with_tools_gets_messages_as_they_are() -> None:
    assert tools_as_text(TURNS, TOLD, ["{% if tools %}{{ message.tool_calls }}{% endif %}"]) == TURNS
    assert "tool_calls" in TURNS[1], "the caller's own messages are left alone"
