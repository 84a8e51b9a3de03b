"""Grammars: what is accepted means what it says, and what cannot be used is refused with its field, in bounded work."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from stageline.errors import RequestError
from stageline.grammar.compiler import GrammarCompiler, Matcher
from stageline.grammar.definition import MAX_GBNF_RULES, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, define
from stageline.grammar.endless_schema import accepts_nothing_finite
from stageline.grammar.mask_pool import Guide, MaskPool
from stageline.grammar.productive import never_ends
from stageline.grammar.step import Step
from stageline.pipeline.microbatch import mask_bytes
from stageline.request import GrammarSpec
from stageline.sampling import SamplingParams, StructuredOutputs
from tests.unit.byte_tokenizer import EOS_TOKEN_ID, STOP_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

DEADLINE_S = 30.0
TOKENIZER = byte_tokenizer()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.serialized, VOCAB_SIZE, (EOS_TOKEN_ID,))


def allowed(mask: bytes | None) -> set[int]:
    assert mask is not None and len(mask) == mask_bytes(VOCAB_SIZE)
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def accepts(compiler: GrammarCompiler, asked: StructuredOutputs, text: str) -> bool:
    """Whether the text is a whole answer: each of its tokens was allowed, and then the end is."""
    matcher, mask = compiler.new_matcher(define(asked))
    step = Step.GOES_ON
    for token_id in TOKENIZER.encode(text):
        if step is Step.COMPLETE or token_id not in allowed(mask):
            return False
        step = matcher.advance(token_id)
        if step is Step.GOES_ON:
            mask = matcher.mask()
    return step is Step.COMPLETE or EOS_TOKEN_ID in allowed(mask)


@pytest.mark.parametrize(
    ("asked", "whole", "others"),
    [
        (
            StructuredOutputs(json=PERSON),
            ['{"name":"Zoë","age":3}', '{\n  "name": "x",\n  "age": -1\n}'],
            ['{"name":"x"}', '{"name":"x","age":1.5}', '{"name":"x","age":1,"more":2}', "[]", ""],
        ),
        (StructuredOutputs(json=json.dumps(PERSON)), ['{"name":"x","age":3}'], ["{}"]),
        (StructuredOutputs(json=PERSON, disable_any_whitespace=True), ['{"name":"x","age":3}'], ['{"name": "x"}']),
        (StructuredOutputs(json_object=True), ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", "{a:1}"]),
        (StructuredOutputs(regex=r"\d{3}-\d{4}"), ["123-4567"], ["123-456", "123-45678", "abc"]),
        (StructuredOutputs(regex="^(yes|no)$"), ["yes", "no"], ["^yes$", "maybe"]),
        (StructuredOutputs(choice=["yes", "né\n", 'q"\\\x7f'] ), ["yes", "né\n", 'q"\\\x7f'], ["y", "yes!", ""]),
        (StructuredOutputs(grammar='start: "a" start "b" | "c"'), ["c", "aacbb"], ["ac", "acbb", "ab"]),
        (StructuredOutputs(grammar='root ::= "x" num ("," num)*\nnum ::= [0-9]+'), ["x1", "x1,22"], ["x", "1"]),
    ],
)  # fmt: skip
def test_a_grammar_accepts_its_texts_and_no_others(
    compiler: GrammarCompiler, asked: StructuredOutputs, whole: list[str], others: list[str]
) -> None:
    assert [text for text in whole if not accepts(compiler, asked, text)] == []
    assert [text for text in others if accepts(compiler, asked, text)] == []


def test_blanks_between_json_tokens_are_bounded(compiler: GrammarCompiler) -> None:
    asked = StructuredOutputs(json={"type": "object"})
    assert accepts(compiler, asked, "{" + " " * 40 + "}")
    assert not accepts(compiler, asked, "{" + " " * 41 + "}")


def test_the_end_of_the_text_is_told_from_the_end_of_sequence(compiler: GrammarCompiler) -> None:
    matcher, _ = compiler.new_matcher(define(StructuredOutputs(regex="ab")))
    a, b = TOKENIZER.encode("ab")
    assert [matcher.advance(a), matcher.advance(b)] == [Step.GOES_ON, Step.COMPLETE]
    matcher, _ = compiler.new_matcher(define(StructuredOutputs(regex="a+")))
    assert [matcher.advance(a), matcher.advance(a), matcher.advance(EOS_TOKEN_ID)] == [
        Step.GOES_ON,
        Step.GOES_ON,
        Step.STOPPED,
    ]
    matcher, _ = compiler.new_matcher(define(StructuredOutputs(regex="a+")))
    assert matcher.advance(b) is Step.FAILED


def test_each_end_of_sequence_token_may_end_an_answer_and_other_special_tokens_never_come() -> None:
    compiler = GrammarCompiler(TOKENIZER.serialized, VOCAB_SIZE, (EOS_TOKEN_ID, STOP_TOKEN_ID))
    _, mask = compiler.new_matcher(define(StructuredOutputs(regex="(x)?")))
    assert allowed(mask) == {*TOKENIZER.encode("x"), EOS_TOKEN_ID, STOP_TOKEN_ID}


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 2, VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 100])
def test_a_mask_is_as_long_as_the_models_vocabulary_whatever_the_tokenizers(vocab_size: int) -> None:
    compiler = GrammarCompiler(TOKENIZER.serialized, vocab_size, (EOS_TOKEN_ID,))
    _, mask = compiler.new_matcher(define(StructuredOutputs(regex="[ab]")))
    assert len(mask) == mask_bytes(vocab_size)
    matcher, _ = compiler.new_matcher(define(StructuredOutputs(regex="[ab][ab]")))
    matcher.advance(TOKENIZER.encode("a")[0])
    assert len(matcher.mask() or b"") == mask_bytes(vocab_size)


@pytest.mark.parametrize("keyword", ["$ref", "allOf", "items"])
def test_references_may_lead_as_deep_as_a_schema_is_long(compiler: GrammarCompiler, keyword: str) -> None:
    """The library follows them by recursion; without room for that, the process ends."""

    def part(place: int) -> dict[str, Any]:
        next_one = {"$ref": f"#/{place + 1}"}
        return next_one if keyword == "$ref" else {keyword: [next_one] if keyword == "allOf" else next_one}

    schema = {"$ref": "#/0", **{str(place): part(place) for place in range(2700)}, "2700": {"type": "integer"}}
    assert MAX_GRAMMAR_BYTES / 2 < len(json.dumps(schema)) <= MAX_GRAMMAR_BYTES
    with suppress(RequestError):  # too many levels, perhaps
        compiler.check(define(StructuredOutputs(json=schema)))


def test_completions_of_one_grammar_do_not_touch_each_other(compiler: GrammarCompiler) -> None:
    spec = define(StructuredOutputs(regex="ab|cd"))
    (one, first_mask), (other, _) = compiler.new_matcher(spec), compiler.new_matcher(spec)
    one.advance(TOKENIZER.encode("a")[0])
    assert allowed(one.mask()) == set(TOKENIZER.encode("b"))
    assert allowed(other.mask()) == allowed(first_mask) == set(TOKENIZER.encode("ac"))


# ---- what is refused ----

DOUBLING = "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(60)) + 'a60: "x"\n'

REFUSED: dict[str, tuple[StructuredOutputs, str, str]] = {
    "nothing": (StructuredOutputs(), "", "none of its fields"),
    "false": (StructuredOutputs(json_object=False), "", "none of its fields"),
    "two": (StructuredOutputs(regex="a", choice=["b"]), "", "regex and choice"),
    "not JSON": (StructuredOutputs(json='{"type"'), ".json", "not JSON"),
    "not an object": (StructuredOutputs(json="[1]"), ".json", "is an object"),
    "NaN": (StructuredOutputs(json={"const": float("nan")}), ".json", "cannot be written as JSON"),
    "no such type": (StructuredOutputs(json={"type": "objekt"}), ".json", "objekt"),
    "keyword that is not supported": (StructuredOutputs(json={"type": "array", "uniqueItems": True}), ".json", "uni"),
    "format that is not known": (StructuredOutputs(json={"type": "string", "format": "x"}), ".json", "format"),
    "schema of another server": (StructuredOutputs(json={"$ref": "http://h.example/s.json"}), ".json", "Resource"),
    "schema without values": (StructuredOutputs(json={"enum": []}), ".json", "Unsatisfiable"),
    "schema in a circle": (StructuredOutputs(json={"$ref": "#"}), ".json", "accepts nothing"),
    "schema too deep": (StructuredOutputs(json='{"items":' * 5000 + "{}" + "}" * 5000), ".json", "recursion"),
    "surrogate": (StructuredOutputs(regex="\ud800"), ".regex", "no Unicode"),
    "look-ahead": (StructuredOutputs(regex="(?=a)b"), ".regex", "look-around"),
    "open group": (StructuredOutputs(regex="(a"), ".regex", "unclosed group"),
    "catastrophic regex": (StructuredOutputs(regex=".*" * 10_000), ".regex", f"most {MAX_REGEX_BYTES}"),
    "catastrophic pattern": (StructuredOutputs(json={"items": [{"pattern": ".*" * 10_000}]}), ".json", "patterns"),
    "catastrophic terminal": (StructuredOutputs(grammar="start: A\nA: " + "/.*/" * 5000), ".grammar", "at most"),
    "long schema": (StructuredOutputs(json="{" + " " * MAX_GRAMMAR_BYTES + "}"), ".json", f"most {MAX_GRAMMAR_BYTES}"),
    "no choices": (StructuredOutputs(choice=[]), ".choice", "empty"),
    "empty grammar": (StructuredOutputs(grammar=" "), ".grammar", "empty"),
    "no grammar": (StructuredOutputs(grammar="hello"), ".grammar", "neither"),
    "unknown rule": (StructuredOutputs(grammar="start: foo"), ".grammar", "foo"),
    "endless": (StructuredOutputs(grammar='start: "a" start'), ".grammar", "accepts nothing"),
    "endless GBNF": (StructuredOutputs(grammar='root ::= "a" root'), ".grammar", "accepts nothing"),
    "doubling": (StructuredOutputs(grammar=DOUBLING), ".grammar", "too complex"),
    "no such token": (StructuredOutputs(grammar="start: <[99999999]>"), ".grammar", "99999999"),
    "two heads in a line": (StructuredOutputs(grammar='start: "a"? ' * 500), ".grammar", "Expected"),
    "regex that is hopeless after a step": (StructuredOutputs(regex="(a?){200}a{200}"), ".regex", "too complex"),
    "long regex": (StructuredOutputs(regex="(a{1000}){1000}"), ".regex", "too complex"),
    "a thousand optional properties": (
        StructuredOutputs(json={"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1000)}}),
        ".json", "too complex",
    ),
    "endless schema": (
        StructuredOutputs(json={"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        ".json", "accepts nothing",
    ),
    "contradiction": (StructuredOutputs(grammar="start: A\nA: /a/ & /b/"), ".grammar", "accepts nothing"),
    "deep": (StructuredOutputs(grammar="start: " + "(" * 10_000), ".grammar", "nested"),
    "deep GBNF": (StructuredOutputs(grammar="root ::= " + "(" * 10_000), ".grammar", "nested"),
    "many GBNF rules": (
        StructuredOutputs(grammar='root ::= "a"\n' * (MAX_GBNF_RULES + 1)), ".grammar", f"most {MAX_GBNF_RULES}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_with_its_field_in_one_line(compiler: GrammarCompiler, name: str) -> None:
    asked, field, words = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=asked).validate(VOCAB_SIZE)
        compiler.check(define(asked))
    assert caught.value.field == "structured_outputs" + field
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("field", "value"),
    [("json", 3), ("regex", ["a"]), ("choice", "yes"), ("choice", ["a", 3]), ("grammar", {}), ("json_object", "yes")],
)
def test_a_value_of_the_wrong_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=StructuredOutputs(**{field: value})).validate(VOCAB_SIZE)
    assert caught.value.field == f"structured_outputs.{field}"


def test_a_grammar_that_becomes_too_complex_on_its_way_has_no_mask_rather_than_a_wrong_one(
    compiler: GrammarCompiler,
) -> None:
    matcher, _ = compiler.new_matcher(define(StructuredOutputs(regex=r"[ab]*a[ab]{16}c")))
    rng = np.random.default_rng(0)
    tokens = TOKENIZER.encode("ab")
    for choice in rng.integers(0, 2, 100_000).tolist():
        if matcher.mask() is None:
            return
        if matcher.advance(tokens[choice]) is not Step.GOES_ON:
            return
    raise AssertionError("a lexer of 2^16 states was built without a limit")


@pytest.mark.parametrize(
    ("lark", "is_endless"),
    [
        ('start: "a" start', True),
        ("start: a\na: b\nb: a", True),
        ('start: a | b\na: "x" a\nb: "y" (a | b)', True),
        ('start: "x" (start | start "y")', True),
        ('start: "x" start+', True),
        ('start: "a" start | "b"', False),
        ('start: "a" start?', False),
        ('start: "a" [start]', False),
        ('start: ("a" start)* "b"', False),
        ('start: a{0,3} "x"\na: a "y"', False),
        ("start: /a b|start/ // start\n", False),
        ('start: "start" | start', False),
        ("start: thing\n%import common.INT -> thing", False),
        ('?start.2: "a" | start\n', False),
        ('start[capture]: "a" start', True),
        ('start: "a" start: "b"', False),
        ("nothing here", False),
        ("start: " + "(" * 1000, False),
    ],
)
def test_a_grammar_is_called_endless_only_where_it_is(lark: str, is_endless: bool) -> None:
    assert never_ends(lark) is is_endless


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@pytest.mark.parametrize(
    ("schema", "is_endless"),
    [
        ({"$defs": {"node": NODE}, "$ref": "#/$defs/node"}, True),
        ({"$defs": {"node": NODE}, "type": "array", "minItems": 1, "items": {"$ref": "#/$defs/node"}}, True),
        ({"$defs": {"node": NODE}, "type": "array", "items": {"$ref": "#/$defs/node"}}, False),
        ({"$defs": {"node": NODE}, "anyOf": [{"$ref": "#/$defs/node"}, {"allOf": [NODE]}]}, True),
        ({"$defs": {"node": NODE}, "anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}, False),
        ({"$defs": {"node": NODE}, "anyOf": [{"$ref": "#/$defs/node"}, True]}, False),
        ({"$defs": {"node": {**NODE, "required": []}}, "$ref": "#/$defs/node"}, False),
        ({"$defs": {"node": {**NODE, "type": ["object", "null"]}}, "$ref": "#/$defs/node"}, False),
        ({"$defs": {"a/b": NODE, "node": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/%24defs/node"}, True),
        ({"$defs": {"node": {**NODE, "$id": "other"}}, "$ref": "#/$defs/node"}, False),
        ({"$ref": "#/nowhere"}, False),
        ({"$ref": "#anchor"}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, True),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}, False),
        ({}, False),
    ],
)
def test_a_schema_is_called_endless_only_where_it_is(schema: dict[str, Any], is_endless: bool) -> None:
    assert accepts_nothing_finite(schema) is is_endless


# ---- the threads ----


def finished_guides(pool: MaskPool, bell: threading.Semaphore, count: int) -> list[Guide]:
    guides: list[Guide] = []
    while len(guides) < count:
        assert bell.acquire(timeout=DEADLINE_S)
        guides += pool.finished()
    return guides


def test_a_guide_comes_back_with_its_mask_and_the_bell_rings(compiler: GrammarCompiler) -> None:
    bell = threading.Semaphore(0)
    pool = MaskPool(compiler, bell.release)
    guides = [Guide(define(StructuredOutputs(regex=pattern))) for pattern in ("a", "b+", "c")]
    guides.append(Guide(GrammarSpec("structured_outputs.regex", "no definition")))
    for guide in guides:
        pool.compute(guide)
    assert set(finished_guides(pool, bell, 4)) == set(guides)
    assert [allowed(guide.mask) for guide in guides[:3]] == [set(TOKENIZER.encode(text)) for text in "abc"]
    assert guides[3].mask is None and guides[3].failure is not None
    assert guides[3].failure.field == "structured_outputs.regex"
    assert guides[1].matcher is not None
    guides[1].matcher.advance(TOKENIZER.encode("b")[0])
    pool.compute(guides[1])
    [again] = finished_guides(pool, bell, 1)
    assert allowed(again.mask) == {*TOKENIZER.encode("b"), EOS_TOKEN_ID}
    pool.close()


class SlowCompiler:
    """Compiles what is called slow only when told to."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.go_on = threading.Event()
        self._compiler = compiler

    def new_matcher(self, spec: GrammarSpec) -> tuple[Matcher, bytes]:
        if spec.field == "slow":
            assert self.go_on.wait(DEADLINE_S)
        return self._compiler.new_matcher(spec)


def test_a_grammar_that_compiles_slowly_delays_no_request_that_is_under_way(compiler: GrammarCompiler) -> None:
    bell, source = threading.Semaphore(0), SlowCompiler(compiler)
    pool = MaskPool(source, bell.release)
    definition = define(StructuredOutputs(regex="a+")).definition
    under_way, slow = Guide(GrammarSpec("quick", definition)), Guide(GrammarSpec("slow", definition))
    pool.compute(under_way)
    finished_guides(pool, bell, 1)
    pool.compute(slow)
    advance: Callable[[int], Step] = under_way.matcher.advance  # type: ignore[union-attr]
    for _ in range(5):
        advance(TOKENIZER.encode("a")[0])
        pool.compute(under_way)
        assert finished_guides(pool, bell, 1) == [under_way]
    source.go_on.set()
    assert finished_guides(pool, bell, 1) == [slow]
    pool.close()
