"""Chat templates: a checkpoint's Jinja, rendered in a bounded sandbox, in the environment that transformers gives it.

The template is foreign code and the messages are foreign data. A rendering that takes too long or too much is stopped
(`template_sandbox`), and the client's own variables cannot stand in for those that the server sets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from stageline.checkpoint.template_meter import LimitReached, RenderLimits
from stageline.checkpoint.template_sandbox import BoundedEnvironment, render_bounded
from stageline.errors import CheckpointError, RequestError

FIELD = "messages"
VARIABLES_FIELD = "chat_template_kwargs"
MAX_SOURCE_CHARS = 1_000_000
_MAX_REASON_CHARS = 500
# What the server sets itself; a request has fields of its own for these.
_FUNCTIONS = frozenset({"cycler", "dict", "joiner", "namespace", "raise_exception", "range", "strftime_now"})
_VARIABLES_OF_THE_SERVER = frozenset({"add_generation_prompt", "continue_final_message", "messages", "self", "tools"})
# The C library pads to any width that stands after the percent sign.
_WIDE_DATE = re.compile(r"%[^A-Za-z%]*[0-9]")


class ObjectOrText(dict[str, Any]):
    """A call's arguments, as most templates want them: an object. Others add them to text; there they are JSON."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: object) -> str:
        return str(self) + text if isinstance(text, str) else NotImplemented

    def __radd__(self, text: object) -> str:
        return text + str(self) if isinstance(text, str) else NotImplemented


class _GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here its body is rendered as if the tags were not there."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        origin: where it is from, in messages: "of a-model", "in a-file", "given as text".
        limits: what one rendering may cost.
    Raises: CheckpointError if it does not compile.
    """

    def __init__(self, source: str, origin: str, limits: RenderLimits | None = None) -> None:
        self.source = source
        self._limits = limits or RenderLimits()
        if len(source) > MAX_SOURCE_CHARS:
            raise CheckpointError(
                f"the chat template {origin} has {len(source)} characters, more than {MAX_SOURCE_CHARS}; "
                "give another with --chat-template"
            )
        environment = BoundedEnvironment(
            {"tojson": _to_json},
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlocks],
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # nested too deeply for Python's own compiler, beside what Jinja refuses
            raise CheckpointError(
                f"the chat template {origin} does not compile ({error}); give another with --chat-template"
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Args:
            messages: each with a `role` and usually `content`.
            variables: special tokens and whatever else the template may use.
        Raises: RequestError (field "messages") if the messages are malformed, the template refuses them, or rendering
            them takes too long or too much.
        """
        _check_messages(messages)
        context = {
            "tools": None,
            "documents": None,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render_bounded(self._template, context, self._limits)
        except LimitReached as error:
            raise RequestError(
                f"the chat template was stopped with these messages: {error}; send fewer or shorter ones", FIELD
            ) from error
        except Exception as error:  # the template is foreign code: anything it raises is about these messages
            reason = str(error)[:_MAX_REASON_CHARS]
            raise RequestError(f"the chat template refuses these messages: {reason}", FIELD) from error


def client_variables(variables: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """A client's own variables for the template, such as `enable_thinking`, checked.

    Args:
        special_tokens: names that mean the model's special tokens, such as "bos_token".
    Raises: RequestError (field "chat_template_kwargs") for a name that the server or Jinja gives a meaning, or a
        value that is no JSON.
    """
    for name, value in variables.items():
        if not name.isidentifier() or name.startswith("_"):
            shown = name[:_MAX_REASON_CHARS]
            raise RequestError(f"{VARIABLES_FIELD} has the name {shown!r}; use letters, digits and _", VARIABLES_FIELD)
        if name in _VARIABLES_OF_THE_SERVER or name in special_tokens or name in _FUNCTIONS:
            raise RequestError(f"{VARIABLES_FIELD} may not set {name}; it is given by the server", VARIABLES_FIELD)
        _check_json_value(name, value)
    return dict(variables)


def _check_json_value(name: str, value: Any) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            waiting.extend(part)
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
        elif not isinstance(part, str | int | float | None):
            kind = type(part).__name__
            raise RequestError(f"{VARIABLES_FIELD}.{name} holds a {kind}; it must be plain JSON", VARIABLES_FIELD)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages is empty or not a list; give a list of objects with role and content", FIELD)
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{position}] is {message!r}; it must have a role and content", FIELD)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    if not isinstance(layout, str) or len(layout) > _MAX_REASON_CHARS or _WIDE_DATE.search(layout):
        raise LimitReached("it used a date format with a width")
    return datetime.now().strftime(layout)
