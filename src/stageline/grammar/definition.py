"""From what a user writes (a schema, a pattern, choices, a grammar) to one definition that `llguidance` compiles.

One idea: everything that can be refused without a tokenizer is refused here, so that a definition is always a text of
bounded size in one language.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from stageline.errors import RequestError
from stageline.grammar.endless_schema import accepts_nothing_finite
from stageline.grammar.productive import never_ends
from stageline.request import GrammarSpec
from stageline.sampling import StructuredOutputs

MAX_GRAMMAR_BYTES = 128 * 2**10
"""Longest schema, or all choices together."""

MAX_REGEX_BYTES = 4 * 2**10
"""Longest regular expression, and all patterns of a schema together: time to compile grows with the square at worst."""

MAX_RULES_BYTES = 16 * 2**10
"""Longest grammar in Lark's syntax or as GBNF, whose rules may put regular expressions together."""

MAX_GBNF_RULES = 300
"""The conversion of GBNF takes time that grows with the square of its rules."""

MAX_MESSAGE_CHARACTERS = 300

# Bounded: a model that is at a loss writes blanks for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"


def define(asked: StructuredOutputs) -> GrammarSpec:
    """Raises: RequestError, naming the field, if it cannot mean anything or is too large."""
    asked.validate()
    kind = asked.kind
    field = f"structured_outputs.{kind}"
    if kind == "json_object":
        definition = _json_schema('{"type": "object"}', asked.disable_any_whitespace, field)
    elif kind == "json":
        definition = _json_schema(_schema_text(asked.json, field), asked.disable_any_whitespace, field)
    elif kind == "regex":
        definition = LLMatcher.grammar_from_regex(_bounded(asked.regex or "", field, MAX_REGEX_BYTES))
    elif kind == "choice":
        definition = LLMatcher.grammar_from_lark(_choice_grammar(asked.choice or [], field))
    else:
        definition = LLMatcher.grammar_from_lark(_lark_grammar(asked.grammar or "", field))
    return GrammarSpec(field=field, definition=definition)


def _json_schema(schema: str, without_whitespace: bool, field: str) -> str:
    options: Any = {"whitespace_flexible": False} if without_whitespace else {"whitespace_pattern": _WHITESPACE}
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        raise RequestError(f"{field} cannot be used: {shortened(str(error))}", field) from None


def _schema_text(schema: dict[str, Any] | str | None, field: str) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{field} cannot be written as JSON: {error}", field) from None
    _bounded(text, field)
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{field} is not JSON: {error}", field) from None
    if not isinstance(found, dict):
        raise RequestError(f"{field} is {shortened(text)}; a JSON schema is an object", field)
    _bounded("".join(_patterns(found)), f"{field}'s patterns together", MAX_REGEX_BYTES, field)
    if accepts_nothing_finite(found):
        raise RequestError(f"{field} accepts nothing: each value would have to hold another one, for ever", field)
    return text


def _patterns(schema: dict[str, Any]) -> Iterator[str]:
    """Every text in it that may be a regular expression."""
    values: list[Any] = [schema]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
            if isinstance(pattern := value.get("pattern"), str):
                yield pattern
            if isinstance(properties := value.get("patternProperties"), dict):
                yield from properties
        elif isinstance(value, list):
            values += value


def _choice_grammar(choices: list[str], field: str) -> str:
    # JSON leaves DEL as it is; Lark's strings hold no control character.
    quoted = [json.dumps(one, ensure_ascii=False).replace("\x7f", r"\u007f") for one in dict.fromkeys(choices)]
    return _bounded("start: " + " | ".join(quoted), field)


def _lark_grammar(text: str, field: str) -> str:
    _bounded(text, field, MAX_RULES_BYTES)
    if not text.strip():
        raise RequestError(f"{field} is empty; give at least a rule named start, or root in GBNF", field)
    lark = text if is_lark_syntax(text) else _from_gbnf(text, field)
    if never_ends(lark):
        raise RequestError(f"{field} accepts nothing: it never ends, whichever alternatives are taken", field)
    return lark


def _from_gbnf(text: str, field: str) -> str:
    num_rules = text.count("::=")
    if num_rules == 0:
        raise RequestError(f"{field} has neither a Lark rule named start nor GBNF rules such as root ::= ...", field)
    if num_rules > MAX_GBNF_RULES:
        raise RequestError(f"{field} has {num_rules} GBNF rules; give at most {MAX_GBNF_RULES}, or use Lark", field)
    try:
        return any_to_lark(text)
    except RecursionError:
        raise RequestError(f"{field} is nested too deeply for a GBNF grammar", field) from None
    except Exception as error:  # the converter raises bare Exception, too
        raise RequestError(f"{field} is no GBNF grammar: {shortened(str(error))}", field) from None


def _bounded(text: str, what: str, most_bytes: int = MAX_GRAMMAR_BYTES, field: str = "") -> str:
    """The text, if it is none too long. field: if `what` is not its name."""
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is no Unicode text: {error.reason} at {error.start}", field or what) from None
    if num_bytes > most_bytes:
        raise RequestError(f"{what} has {num_bytes} bytes; give at most {most_bytes}", field or what)
    return text


def shortened(text: str) -> str:
    """For a message: one line, without the end of a long one."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else line[:MAX_MESSAGE_CHARACTERS] + "..."
