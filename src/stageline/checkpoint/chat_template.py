"""Chat templates: a checkpoint's Jinja, rendered in a sandbox, in the environment that transformers gives it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from stageline.errors import CheckpointError, RequestError

FIELD = "messages"


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
    Raises: CheckpointError if it does not compile.
    """

    def __init__(self, source: str, origin: str) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template {origin} does not compile ({error}); give another with --chat-template"
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """Args:
            messages: each with a `role` and usually `content`.
            variables: special tokens and whatever else the template may use.
        Raises: RequestError (field "messages") if the messages are malformed or the template refuses them.
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
            return self._template.render(context)
        except Exception as error:  # the template is foreign code: anything it raises is about these messages
            raise RequestError(f"the chat template refuses these messages: {error}", FIELD) from error


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
    return datetime.now().strftime(layout)
