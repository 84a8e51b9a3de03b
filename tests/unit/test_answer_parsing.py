"""An answer's parts do not depend on the pieces in which its text came, and nothing of it is lost."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.server.answer_parsing import AnswerDelta, AnswerStyle, make_answer_parser
from stageline.server.protocol_chat import FunctionDefinition, NamedFunction, NamedToolChoice, Tool, ToolChoice

TOOLS = [Tool(type="function", function=FunctionDefinition(name=name)) for name in ("f", "g", "get_weather", "a.b")]
NAMED = NamedToolChoice(type="function", function=NamedFunction(name="f"))
STYLES = ("hermes", "llama3_json", "pythonic", "mistral", "none")

Call = tuple[str, str]


class Answer:
    """What deltas come to; checks that each call's first delta, and no other, has its id and name."""

    def __init__(self, deltas: Iterable[AnswerDelta]) -> None:
        self.content = self.reasoning = ""
        self.calls: list[Call] = []
        self.ids: list[str] = []
        for delta in deltas:
            assert bool(delta.content) + bool(delta.reasoning) + (delta.tool_call is not None) == 1
            self.content += delta.content
            self.reasoning += delta.reasoning
            if (call := delta.tool_call) is None:
                continue
            if call.index == len(self.calls):
                assert call.id and call.name
                self.calls.append((call.name, ""))
                self.ids.append(call.id)
            else:
                assert call.id is None and call.name is None and call.index == len(self.calls) - 1
            name, arguments = self.calls[-1]
            self.calls[-1] = name, arguments + call.arguments

    @property
    def parts(self) -> tuple[str, str, list[Call]]:
        return self.content, self.reasoning, self.calls


def parse(
    pieces: str | Sequence[str],
    tool_parser: str = "hermes",
    choice: ToolChoice | None = "auto",
    reasoning: str = "none",
    prompt: str = "",
    is_parallel: bool = True,
) -> Answer:
    style = AnswerStyle(tool_parser=tool_parser, reasoning_parser=reasoning)
    parser = make_answer_parser(style, TOOLS, choice, prompt=prompt, is_parallel=is_parallel)
    deltas = [delta for piece in ([pieces] if isinstance(pieces, str) else pieces) for delta in parser.feed(piece)]
    return Answer([*deltas, *parser.finish()])


ONE = ("f", '{"a": 1}')
HALF = ("f", '{"a": "\\ud800"}')
"""Half of a surrogate pair, which no UTF-8 can hold, is written as an escape."""
CASES: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [ONE]),
    ("hermes", 'Sure.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n', "Sure.", [ONE]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ONE]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [ONE]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call>', "", [ONE, ("g", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"x": "<tool_call>"}}</tool_call>',
        "",
        [ONE, ("g", '{"x": "<tool_call>"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone.',
        "\nDone.",
        [ONE],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "", [("f", '{"a": "x\\ny"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', "", [HALF]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [ONE]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [ONE]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}; {"name": "g"}', "", [ONE, ("g", "{}")]),
    ("llama3_json", 'Well.\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "Well.", [ONE]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', "", [ONE, ("g", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [ONE]),
    ("mistral", 'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]a.b[CALL_ID]x1[ARGS]{}', "Hm.", [ONE, ("a.b", "{}")]),
    ("pythonic", "[f(a=1)]", "", [ONE]),
    ("pythonic", " [f(a=1), a.b(x='é)]', y=[True, None, {'k': -1.5}], z=false)]", "", [
        ONE, ("a.b", '{"x": "é)]", "y": [true, null, {"k": -1.5}], "z": false}'),
    ]),
    ("pythonic", "<|python_start|>[f(a=1)]<|python_end|>", "", [ONE]),
    ("pythonic", "[g()]\nDone.", "\nDone.", [("g", "{}")]),
    ("pythonic", "[f(a='\\ud800')]", "", [HALF]),
]  # fmt: skip


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_a_styles_calls_are_found_whole_and_character_by_character(
    style: str, text: str, content: str, calls: list[Call]
) -> None:
    for pieces in (text, list(text)):
        assert parse(pieces, style).parts == (content, "", calls)


NO_CALLS = [
    ("hermes", "<tool_call>not json</tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": ' + "1" * 5000 + ', "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "' + "[" * 5000 + "]" * 5000 + '"}</tool_call>'),
    ("hermes", "a <tool_call"),
    ("hermes", "  \n a <b> \n"),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "Ada", "parameters": {}}'),
    ("llama3_json", '{"name": 5}'),
    ("llama3_json", "  {}"),
    ("llama3_json", "[1] says so; {"),
    ("pythonic", "[1] says so"),
    ("pythonic", "[unknown(a=1)]"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=g())]"),
    ("pythonic", "[f(a=__import__('os'))]"),
    ("pythonic", "[f(**{'a': 1})]"),
    ("pythonic", "[f(a={1, 2})]"),
    ("pythonic", "[f(a=b'x')]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=" + "(" * 5000 + ")" * 5000 + ")]"),
    ("pythonic", "[f(a=0x" + "f" * 9000 + ")]"),
    ("pythonic", "[]"),
    ("pythonic", "[" + "f" * 300 + "(a=1)]"),
    ("mistral", "[TOOL_CALLS]unknown{}"),
    ("mistral", "[TOOL_CALLS] " + "x" * 300),
    ("mistral", "[TOOL_CALLS]f [1]"),
    ("none", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
]


@pytest.mark.parametrize(("style", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(style: str, text: str) -> None:
    for pieces in (text, list(text)):
        assert parse(pieces, style).parts == (text, "", [])


def test_with_tool_choice_none_a_call_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(text, "hermes", "none").parts == (text, "", [])


def test_arguments_go_out_while_they_are_written() -> None:
    parser = make_answer_parser(AnswerStyle(tool_parser="hermes"), TOOLS, "auto")
    assert parser.feed('Hi <tool_call>{"name": "f", "argu')[0].content == "Hi"
    [first, second] = parser.feed('ments": {"a": "lo')
    assert first.tool_call and first.tool_call.name == "f"
    assert second.tool_call and second.tool_call.arguments == '{"a": "lo'
    assert Answer([first, *parser.feed("ng")]).calls == [("f", "ng")]


def test_text_is_held_back_only_while_it_may_become_a_call() -> None:
    parser = make_answer_parser(AnswerStyle(tool_parser="hermes"), TOOLS, "auto")
    assert Answer(parser.feed("a <tool")).content == "a"
    assert Answer(parser.feed("box> b")).content == " <toolbox> b"
    parser = make_answer_parser(AnswerStyle(tool_parser="llama3_json"), TOOLS, "auto")
    assert parser.feed('{"na') == []
    assert Answer(parser.feed('tion": ')).content == '{"nation":'
    parser = make_answer_parser(AnswerStyle(tool_parser="pythonic"), TOOLS, "auto")
    assert parser.feed("[") == []
    assert Answer(parser.feed("1")).content == "[1"


def test_without_parallel_calls_only_the_first_is_kept() -> None:
    text = '<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]</tool_call>'
    assert parse(text, is_parallel=False).parts == ("", "", [ONE])


def test_ids_are_unlike_one_another_and_of_the_styles_form() -> None:
    two = '[TOOL_CALLS]f{}[TOOL_CALLS]g{}'
    ids = parse(two, "mistral").ids
    assert len(set(ids)) == 2 and all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)
    text = '<tool_call>{"name": "f"}</tool_call>' * 2
    ids = parse(text, "hermes").ids
    assert len(set(ids)) == 2 and all(re.fullmatch("call_[0-9a-f]{24}", one) for one in ids)


@pytest.mark.parametrize("style", STYLES)
def test_a_forced_answer_is_read_whatever_the_models_style(style: str) -> None:
    for text in ('{"a": 1}', ' \n{"a": 1}\n'):
        assert parse(list(text), style, NAMED).parts == ("", "", [ONE])
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert parse(list(text), style, "required").parts == ("", "", [ONE, ("g", "{}")])


def test_a_forced_answer_that_was_cut_off_is_a_call_as_far_as_it_came() -> None:
    assert parse('{"a": [1, "x', choice=NAMED).parts == ("", "", [("f", '{"a": [1, "x')])
    assert parse('[{"name": "g", "arguments": {"b', choice="required").parts == ("", "", [("g", '{"b')])


# ---- reasoning ----


@pytest.mark.parametrize(
    ("text", "prompt", "content", "reasoning"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", "", "because", "why"),
        ("\n<think>why</think>because", "", "because", "why"),
        ("why\n</think>\n\nbecause", "...<think>\n", "because", "why"),
        ("<think>why</think>because", "...<think>", "because", "why"),
        ("<think>\n\n</think>\n\nbecause", "", "because", ""),
        ("<think>why so", "", "", "why so"),
        ("why </thi", "<think>", "", "why </thi"),
        ("because", "", "because", ""),
        ("a <think>b</think>", "", "a <think>b</think>", ""),
        ("  <thin", "", "  <thin", ""),
        ("<think>a < b</thinker></think>c", "", "c", "a < b</thinker>"),
    ],
)
def test_reasoning_is_apart_from_content(text: str, prompt: str, content: str, reasoning: str) -> None:
    for pieces in (text, list(text)):
        assert parse(pieces, "none", reasoning="think", prompt=prompt).parts == (content, reasoning, [])


def test_reasoning_comes_before_calls_and_hides_its_own() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text = f"<think>I could {call} now</think>\n\n{call}"
    for pieces in (text, list(text)):
        assert parse(pieces, reasoning="think").parts == ("", f"I could {call} now", [ONE])


def test_an_answer_with_a_form_has_no_reasoning() -> None:
    parser = make_answer_parser(AnswerStyle(reasoning_parser="think"), prompt="<think>\n", has_form=True)
    assert Answer([*parser.feed('{"a": 1}'), *parser.finish()]).parts == ('{"a": 1}', "", [])


# ---- any text, in any pieces ----

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("<think>", "</think>", "[ARGS]", "[CALL_ID]", "<", "</", "[", "]", "{", "}", "(", ")", ",", ";", ":", '"', "\\"),
    *('{"name": "f", "arguments": {"a": "é\\n"}}', '{"name": "g", "parameters": {}}', '"name"', '"arguments"', '"f"'),
    *('[{"name": "f", "arguments": {}}', "f(a=1)", "[g(x='y')]", "f", "get_weather", " ", "\n"),
    *("日本", "😀", "1", "null"),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)
choices: st.SearchStrategy[ToolChoice] = st.sampled_from(["auto", "auto", "required", NAMED, "none"])


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=500, deadline=None)
@given(texts, st.lists(st.integers(0, 200), max_size=8), st.sampled_from(STYLES), choices, st.booleans(), st.booleans())
def test_any_pieces_give_the_same_answer_and_lose_nothing(
    text: str, places: list[int], style: str, choice: ToolChoice, thinks: bool, is_inside: bool
) -> None:
    reasoning, prompt = "think" if thinks else "none", "<think>" if is_inside else ""
    whole = parse(text, style, choice, reasoning, prompt)
    assert parse(cut(text, places), style, choice, reasoning, prompt).parts == whole.parts
    assert parse(list(text), style, choice, reasoning, prompt).parts == whole.parts
    if not whole.calls and not thinks:
        assert whole.content == text
    kept = iter(text)
    assert all(char in kept for char in whole.content), "content is the answer's own text, in order"


identifiers = st.from_regex("[a-z]{1,5}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
some_calls = st.tuples(st.sampled_from(["f", "g", "a.b"]), st.dictionaries(st.text(), json_values))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(some_calls, min_size=1, max_size=3),
    st.sampled_from(["hermes", "llama3_json", "mistral", "mistral array", "required"]),
    st.booleans(),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_any_arguments_are_read_as_they_were_written(
    calls: list[tuple[str, dict[str, object]]], style: str, is_ascii: bool, places: list[int]
) -> None:
    objects = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=is_ascii) for name, arguments in calls
    ]
    array = "[" + ", ".join(objects) + "]"
    text = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects),
        "llama3_json": "; ".join(objects),
        "mistral": "".join(f"[TOOL_CALLS]{name}{json.dumps(arguments)}" for name, arguments in calls),
        "mistral array": f"[TOOL_CALLS]{array}",
        "required": array,
    }[style]
    choice: ToolChoice = "required" if style == "required" else "auto"
    answer = parse(cut(text, places), style.split(maxsplit=1)[0] if style != "required" else "hermes", choice)
    assert answer.content == ""
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == calls


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(identifiers, json_values), st.lists(st.integers(0, 400), max_size=8))
def test_any_python_literals_are_read_as_they_were_written(arguments: dict[str, object], places: list[int]) -> None:
    text = "[f(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")]"
    answer = parse(cut(text, places), "pythonic")
    assert answer.content == "" and [json.loads(found) for _, found in answer.calls] == [arguments]
