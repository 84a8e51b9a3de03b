"""Tools told in words, for models whose chat template has no place for them.

Such a template would silently leave out the tools, and the calls and results of earlier turns. Here they become text of
the messages, in the style that the answers are searched for (Hermes).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = (
    "You may call functions to answer. These are their declarations, one per line:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write its name and arguments as JSON between tags:\n<tool_call>\n{{"name": "a_function", '
    '"arguments": {{"an_argument": "a value"}}}}\n</tool_call>'
)


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, template_sources: Sequence[str]
) -> list[dict[str, Any]]:
    """The messages as templates expect them, with whatever the templates have no place for written into the texts.

    Args:
        tools: each with `type` and `function`.
    """
    told = [dict(message) for message in messages]
    templates = "\n".join(template_sources)
    if "tool_calls" not in templates:
        told = _with_calls_as_text(told)
    if tools and "tools" not in templates:
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told = _with_system_text(told, _INTRODUCTION.format(tools=lines))
    return told


def _with_calls_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    is_result_before = False
    for message in messages:
        calls = message.pop("tool_calls", None) or ()
        for call in calls:
            function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            text = f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
            message["content"] = f"{message.get('content') or ''}\n{text}".lstrip("\n")
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            message = {"role": "user", "content": text}
        if is_result and is_result_before:
            told[-1]["content"] += f"\n{message['content']}"
        else:
            told.append(message)
        is_result_before = is_result
    return told


def _with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{text}".lstrip("\n")}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
