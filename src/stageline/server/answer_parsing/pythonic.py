"""Calls written as Python: `[f(a=1), g(b="x")]`. They are parsed, never run, and only literals are arguments."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from stageline.server.answer_parsing.call_writer import CallWriter
from stageline.server.answer_parsing.tool_parsers import ToolParser

_NAME_SO_FAR = re.compile(r"\s*(?:[A-Za-z_][A-Za-z0-9_.]*\s*)?")
_LONGEST_NAME = 200
_OPENING, _CLOSING = "([{", ")]}"


def pythonic_parser(writer: CallWriter) -> ToolParser:
    """A list of calls from the answer's beginning, or between <|python_start|> and <|python_end|>."""
    return ToolParser(
        writer, PythonCallsReader, ("<|python_start|>",), "<|python_end|>", may_begin_bare=True, openings="["
    )


class PythonCallsReader:
    """Each call goes out when it is complete; see `json_calls.CallReader`."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._between = ""  # the bracket, a comma or space before the call that is being read
        self._call = ""
        self._is_open = False
        self._depth = 0
        self._quote = ""
        self._is_escaped = False
        self._needs_comma = False
        self.is_done = False
        self.is_broken = False

    @property
    def unsent(self) -> str:
        return self._between + self._call

    def feed(self, text: str) -> int:
        for place, char in enumerate(text):
            if self._call:
                self._take_of_call(char)
            else:
                self._take_between(char)
            if self.is_broken:
                return place
            if self.is_done:
                return place + 1
        return len(text)

    def _take_between(self, char: str) -> None:
        if not self._is_open:
            self.is_broken = not (char == "[" or char.isspace())
            self._is_open = char == "["
        elif self._needs_comma and char == ",":
            self._needs_comma = False
        elif self._needs_comma and char == "]":
            self.is_done = True
        elif not char.isspace():
            self.is_broken = self._needs_comma or not _NAME_SO_FAR.fullmatch(char)
            self._call = "" if self.is_broken else char
            return
        if not self.is_broken:
            self._between += char

    def _take_of_call(self, char: str) -> None:
        if self._quote:
            self._take_in_string(char)
        elif self._depth == 0 and char == "(":
            self._depth = 1
            self.is_broken = not self._writer.knows(self._call.strip())
        elif self._depth == 0:
            is_long = len(self._call) >= _LONGEST_NAME
            self.is_broken = is_long or not _NAME_SO_FAR.fullmatch(self._call + char)
        elif char in "\"'":
            self._quote = char
        elif char in _OPENING:
            self._depth += 1
        elif char in _CLOSING:
            self._depth -= 1
        if self.is_broken:
            return
        if self._depth == 0 and char in _CLOSING and not self._quote:
            self._end_call(self._call + char)
        else:
            self._call += char

    def _take_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""

    def _end_call(self, text: str) -> None:
        parsed = _parse_call(text)
        if parsed is None or not self._writer.knows(parsed[0]):
            self.is_broken = True
            return
        name, arguments = parsed
        self._writer.begin(name)
        self._writer.arguments(arguments)
        self._call = self._between = ""
        self._needs_comma = True


def _parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments as JSON; None if it is no call, or its arguments are more than literals by name."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        arguments: dict[str | None, Any] = {word.arg: _literal(word.value) for word in call.keywords}
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """A literal; models also write JSON's words for Python's."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    return ast.literal_eval(node)
