"""A chat template's rendering ends soon and in little memory, whatever the template, messages and variables."""

from __future__ import annotations

import resource
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.checkpoint.chat_template import ChatTemplate, ObjectOrText, client_variables
from stageline.checkpoint.template_meter import RenderLimits
from stageline.errors import CheckpointError, RequestError

MESSAGES = [{"role": "user", "content": "hi"}]
BRIEF = RenderLimits(cpu_s=0.2)

GROW = "{% set ns = namespace(x='a' * 16) %}{% for i in range(40) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
NEST = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}USE"

HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% set x = 'a' * 99999 %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "macros in macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a loop of written text": "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "a captured loop": "{% set y %}{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "one value captured often": "{% set x = 'a' * 999999 %}"
    "{% set y %}{% for a in range(9999) %}{{ x }}{% endfor %}{% endset %}",
    "multiplied text": "{{ 'a' * 10 ** 10 }}",
    "multiplied from the right": "{{ (10 ** 10) * 'a' }}",
    "a multiplied list": "{{ ([1] * 10 ** 10) | length }}",
    "a large power": "{{ (10 ** (10 ** 8)) % 7 }}",
    "squares of squares": "{% set ns = namespace(x=3) %}"
    "{% for i in range(50) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x % 7 }}",
    "a large hexadecimal number": "{{ ('f' * 1000000) | int(base=16) % 7 }}",
    "added text": GROW.replace("STEP", "ns.x + ns.x"),
    "concatenated text": GROW.replace("STEP", "ns.x ~ ns.x"),
    "joined text": GROW.replace("STEP", "[ns.x, ns.x] | join"),
    "joined by a method": GROW.replace("STEP", "ns.x.join([ns.x, ns.x, ns.x])"),
    "replaced text": GROW.replace("STEP", "ns.x | replace('a', 'aa')"),
    "replaced by a method": GROW.replace("STEP", "ns.x.replace('a', 'aa')"),
    "formatted text": GROW.replace("STEP", "'{0}{0}'.format(ns.x)"),
    "formatted by percent": GROW.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "formatted by a filter": GROW.replace("STEP", "'%s%s' | format(ns.x, ns.x)"),
    "added lists": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "many slices": "{% set x = 'a' * 999999 %}{% set ns = namespace(y=[]) %}"
    "{% for i in range(99999) %}{% set ns.y = ns.y + [x[1:]] %}{% endfor %}",
    "a wide center": "{{ 'a' | center(10 ** 9) }}",
    "a wide method": "{{ 'a'.ljust(10 ** 9) }}",
    "a wide zfill": "{{ 'a'.zfill(10 ** 9) }}",
    "a wide percent": "{{ '%1000000000d' % 1 }}",
    "a starred percent": "{{ '%*d' % (10 ** 9, 1) }}",
    "a wide format": "{{ '{:1000000000}'.format(1) }}",
    "a width from a field": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "a wide indent": "{{ ('a\n' * 99999) | indent(99999) }}",
    "a wide json": "{{ [1] | tojson(indent=10 ** 9) }}",
    "a wide date": "{{ strftime_now('%1000000000Y') }}",
    "a batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "slices of nothing": "{{ [1] | slice(10 ** 9) | list }}",
    "translated text": "{{ 'aaaa'.translate({97: 'b' * 99999}) }}",
    "tabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 9) }}",
    "sums of lists": "{% set x = [[1]] * 99999 %}{{ x | sum(start=[]) | length }}",
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "nested lists as json": NEST.replace("STEP", "[ns.x, ns.x]").replace("USE", "{{ ns.x | tojson }}"),
    "nested lists as text": NEST.replace("STEP", "[ns.x, ns.x]").replace("USE", "{{ ns.x }}"),
    "nested lists compared": NEST.replace("STEP", "[ns.x, ns.x]").replace("USE", "{{ ns.x == [ns.x[0], ns.x[1]] }}"),
    "nested tuples as a key": NEST.replace("STEP", "(ns.x, ns.x)").replace("USE", "{{ {ns.x: 1} }}"),
    "nested mappings": NEST.replace("STEP", "{'a': ns.x, 'b': ns.x}").replace("USE", "{{ ns.x }}"),
    "nested by dict": NEST.replace("STEP", "dict(a=ns.x, b=ns.x)").replace("USE", "{{ ns.x }}"),
    "nested namespaces": NEST.replace("STEP", "namespace(a=ns.x, b=ns.x)").replace("USE", "{{ ns.x }}"),
    "one text often, as json": "{% set x = 'a' * 999999 %}{{ ([x] * 9999) | tojson }}",
    "one text often, as text": "{% set x = 'a' * 999999 %}{{ [x] * 9999 }}",
    "a long prompt": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
}


@pytest.fixture(autouse=True)
def little_memory() -> Any:
    """What would take gigabytes fails here with MemoryError, which is not the refusal that is asked for."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 3_000_000_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped(template: str) -> None:
    with pytest.raises(RequestError) as error:
        ChatTemplate(template, "given as text", BRIEF).render(MESSAGES, True, {})
    assert error.value.field == "messages" and len(str(error.value)) < 1000
    assert "MemoryError" not in repr(error.value.__cause__)


@pytest.mark.timeout(20)
def test_a_template_slow_only_with_many_messages_is_stopped_by_them() -> None:
    source = "{% for a in messages %}{% for b in messages %}{{ b.role }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source, "given as text", BRIEF)
    assert template.render(MESSAGES * 2, True, {}) == "user" * 4
    with pytest.raises(RequestError, match=r"stopped.*ran for 0.2 s"):
        template.render(MESSAGES * 10_000, True, {})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}", "a1True"),
        ("{% for x in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ x }}{% else %}none{% endfor %}", "1/3a2/3b3/3c"),
        ("{% for x in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ x }}{% endfor %}", "13"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[0].content | default('x') ~ 1 ~ none }}", "hi1None"),
        ("{{ messages[::-1][0]['role'][1:] }}", "ser"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n * 2 ** 3 }}", "16"),
        ("{{ 'a<think>b</think>c'.split('</think>')[-1].lstrip('\n') }}", "c"),
        ("{{ '{} and {:>3}'.format('a', 1) }}{{ '%s %03d' % ('a', 2024) }}", "a and   1a 2024"),
        ("{{ 'aXbX'.replace('X', '--') | upper | trim('-') }}", "A--B"),
        ("{% macro f(x, y='d') %}{{ x }}{{ y }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}", "1d"),
        ("{% macro f(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) f(2) %}{{ y }}{% endcall %}", "<2>"),
        ("{% filter upper %}a{{ 1 }}b{% endfilter %}{% set x %}y{{ 1 }}{% endset %}{{ x }}", "A1By1"),
        ("{{ [[1], [2]] | sum(start=[]) | tojson }}{{ [1, 2] | sum }}", "[1, 2]3"),
        ("{{ missing }}{{ missing | default('d') }}{{ missing is defined }}", "dFalse"),
        ("{{ [1, 'a', none] }}{{ {'a': messages[0]} }}", "[1, 'a', None]{'a': {'role': 'user', 'content': 'hi'}}"),
        ("{{ {'a': [1, {'b': 'é'}]} | tojson(indent=1) }}", '{\n "a": [\n  1,\n  {\n   "b": "é"\n  }\n ]\n}'),
        ("{{ ['b', 'a'] | sort | join(d='') }}{{ 'x' is in ['x'] }}{{ 'a' in ('a', missing) }}", "abTrueTrue"),
        ("{{ '5' | int + 1 }}{{ 'a\nb' | indent(2) }}{{ 1000000 | default(5000000) }}", "6a\n  b1000000"),
        ("{{ dict(a=1).a }}{{ raise_exception is defined }}{{ range(3) | list }}", "1True[0, 1, 2]"),
    ],
)
def test_a_measured_template_renders_as_jinja_does(template: str, expected: str) -> None:
    assert ChatTemplate(template, "given as text").render(MESSAGES, True, {}) == expected


def test_a_calls_arguments_are_an_object_and_where_text_is_wanted_its_json() -> None:
    messages = [{"role": "assistant", "arguments": ObjectOrText({"a": "é"})}]
    cases = {
        "{% for k, v in m.arguments.items() %}{{ k }}={{ v }}{% endfor %}": "a=é",
        "{{ m.arguments | tojson }}{{ m.arguments is string }}{{ m.arguments.a }}": '{"a": "é"}Falseé',
        "{{ '<' + m.arguments + '>' }}": '<{"a": "é"}>',
        "{{ '<' ~ m.arguments ~ '>' }}{{ m.arguments }}": '<{"a": "é"}>{"a": "é"}',
    }
    for source, expected in cases.items():
        template = ChatTemplate("{% set m = messages[0] %}" + source, "given as text")
        assert template.render(messages, True, {}) == expected


@given(st.lists(st.text(max_size=50), min_size=1, max_size=10))
def test_every_text_of_a_message_is_rendered_unchanged(contents: list[str]) -> None:
    template = ChatTemplate("{% for m in messages %}{{ '[' + m.content ~ ']' }}{% endfor %}", "given as text")
    messages = [{"role": "user", "content": content} for content in contents]
    assert template.render(messages, True, {}) == "".join(f"[{content}]" for content in contents)


def test_a_conversation_of_megabytes_is_rendered() -> None:
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim }}{% endfor %}"
    template = ChatTemplate(source, "given as text")
    messages = [{"role": "user", "content": "word " * 2000} for _ in range(1000)]
    assert len(template.render(messages, True, {})) > 9_000_000


def test_a_template_nested_too_deeply_or_too_long_is_refused_at_start() -> None:
    nested = "{% for a in b %}" * 30 + "{% endfor %}" * 30
    for source in (nested, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * 2_000_000):
        with pytest.raises(CheckpointError, match="--chat-template"):
            ChatTemplate(source, "given as text")


@pytest.mark.parametrize(
    "variables",
    [
        {"messages": []},
        {"tools": []},
        {"add_generation_prompt": False},
        {"bos_token": "x"},
        {"raise_exception": 1},
        {"range": 1},
        {"_x": 1},
        {"": 1},
        {"a b": 1},
        {"the rendering's meter": 1},
        {"f": print},
        {"f": [{"a": object()}]},
    ],
)
def test_a_clients_variables_cannot_stand_in_for_the_servers(variables: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as error:
        client_variables(variables, {"bos_token": "<s>"})
    assert error.value.field == "chat_template_kwargs"


def test_a_clients_variables_of_plain_json_are_taken() -> None:
    variables = {"enable_thinking": False, "documents": [{"title": "t", "n": 1.5, "x": None}]}
    assert client_variables(variables, {}) == variables
