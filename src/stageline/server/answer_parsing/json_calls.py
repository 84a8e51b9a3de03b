"""Calls written as JSON, read while they are written: a call's arguments go out as soon as its name is known.

A reader takes text until it `is_done` or `is_broken`. Before a call has begun to go out, whoever feeds the reader can
still turn the text (`unsent`) into content.
"""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Protocol

from stageline.server.answer_parsing.call_writer import CallWriter
from stageline.server.answer_parsing.json_scanner import JsonScanner

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"id", "function", "name", "type", *_ARGUMENTS})
_WHITESPACE = " \t\r\n"


class CallReader(Protocol):
    """Reads one call, or one list of calls."""

    is_done: bool
    is_broken: bool

    @property
    def unsent(self) -> str:
        """Text taken of which nothing has gone out as a call."""

    def feed(self, text: str) -> int:
        """How many characters were taken."""


class ArgumentsReader:
    """An object that is the arguments of a call whose name is known; the call begins with its first character."""

    def __init__(self, writer: CallWriter, name: str) -> None:
        self._writer = writer
        self._name = name
        self._scanner = JsonScanner()
        self._has_begun = False
        self.is_done = False
        self.is_broken = False
        self.unsent = ""

    def feed(self, text: str) -> int:
        taken = 0
        if not self._has_begun:
            while taken < len(text) and text[taken] in _WHITESPACE:
                taken += 1
            self.unsent += text[:taken]
            if taken == len(text):
                return taken
            if text[taken] != "{":
                self.is_broken = True
                return taken
            self._has_begun = True
            self.unsent = ""
            self._writer.begin(self._name)
        size, arguments = self._scanner.feed(text[taken:])
        self._writer.arguments(arguments)
        self.is_done, self.is_broken = self._scanner.is_done, self._scanner.is_broken
        return taken + size


class _Where(Enum):
    OPENING = auto()
    KEY = auto()
    FIRST_KEY = auto()
    COLON = auto()
    VALUE = auto()
    AFTER_VALUE = auto()


class CallObjectReader:
    """`{"name": "f", "arguments": {...}}`, in any order of keys; "parameters" does as well.

    It breaks at the first key that no call has, and at a name that is none of the functions', so that an answer that is
    JSON but no call is held back only for a few characters.
    """

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._where = _Where.OPENING
        self._scanner: JsonScanner | None = None  # of the key or value that is being read
        self._text = ""
        self._key = ""
        self._name: str | None = None
        self._arguments: str | None = None  # that came before the name, or are not an object
        self._has_begun = False
        self._streams = False
        self.is_done = False
        self.is_broken = False
        self.unsent = ""

    def feed(self, text: str) -> int:
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            before = place
            place += self._step(text[place:])
            if not self._has_begun:
                self.unsent += text[before:place]
        return place

    def _step(self, text: str) -> int:
        if self._scanner is not None:
            return self._scan(self._scanner, text)
        char = text[0]
        if char in _WHITESPACE:
            return 1
        if self._where is _Where.OPENING and char == "{":
            self._where = _Where.FIRST_KEY
        elif self._where in (_Where.FIRST_KEY, _Where.AFTER_VALUE) and char == "}":
            self._end()
        elif self._where in (_Where.FIRST_KEY, _Where.KEY) and char == '"':
            self._start_scanning()
            return 0
        elif self._where is _Where.COLON and char == ":":
            self._where = _Where.VALUE
        elif self._where is _Where.VALUE:
            self._start_scanning()
            self._streams = self._key in _ARGUMENTS and char == "{" and self._name is not None and not self._has_begun
            if self._streams:
                self._begin()
            return 0
        elif self._where is _Where.AFTER_VALUE and char == ",":
            self._where = _Where.KEY
        else:
            self.is_broken = True
            return 0
        return 1

    def _start_scanning(self) -> None:
        self._scanner = JsonScanner()
        self._text = ""
        self._streams = False

    def _scan(self, scanner: JsonScanner, text: str) -> int:
        size, taken = scanner.feed(text)
        if self._streams:
            self._writer.arguments(taken)
        else:
            self._text += taken
        self.is_broken = scanner.is_broken
        if scanner.is_done:
            self._scanner = None
            if self._where is _Where.VALUE:
                self._where = _Where.AFTER_VALUE
                self._end_value()
            else:
                self._where = _Where.COLON
                self._key = json.loads(self._text)
                self.is_broken = self._key not in _KEYS
        return size

    def _end_value(self) -> None:
        if self._has_begun:
            return
        if self._key in _ARGUMENTS:
            self._arguments = self._text
        elif self._key in ("name", "function"):
            # Only a text can be one: Python refuses to read numbers of thousands of digits.
            self._name = json.loads(self._text) if self._text.startswith('"') else None
            self.is_broken = not self._writer.knows(self._name)
        if self._name is not None and self._arguments is not None and not self.is_broken:
            self._write_held_arguments()

    def _write_held_arguments(self) -> None:
        """Some models write the object once more as a text."""
        arguments = self._arguments or ""
        try:
            value = json.loads(arguments)
            if isinstance(value, str):
                arguments = value
                value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            value = None
        if value is None and arguments.strip() == "null":
            arguments, value = "{}", {}
        if not isinstance(value, dict):
            self.is_broken = True
            return
        self._begin()
        self._writer.arguments(arguments or "{}")

    def _end(self) -> None:
        self.is_done = True
        if self._has_begun:
            return
        if self._name is None:
            self.is_broken, self.is_done = True, False
            return
        self._begin()
        self._writer.arguments("{}")

    def _begin(self) -> None:
        assert self._name is not None
        self._has_begun = True
        self.unsent = ""
        self._writer.begin(self._name)


class CallListReader:
    """One call object, or an array of them."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._is_array = False
        self._call: CallObjectReader | None = None
        self._may_end = False
        self._needs_comma = False
        self._between = ""  # what stood since the last call
        self.is_done = False
        self.is_broken = False

    @property
    def unsent(self) -> str:
        return self._between + (self._call.unsent if self._call else "")

    def feed(self, text: str) -> int:
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            if self._call is None:
                place += self._take_between(text[place])
                continue
            place += self._call.feed(text[place:])
            if not self._call.unsent:
                self._between = ""
            if self._call.is_done:
                self._call, self._may_end, self._needs_comma = None, True, True
                self.is_done = not self._is_array
            elif self._call.is_broken:
                self.is_broken = True
        return place

    def _take_between(self, char: str) -> int:
        if char == "{" and not self._needs_comma:
            self._call = CallObjectReader(self._writer)
            return 0
        if char == "[" and not self._is_array:
            self._is_array = True
        elif char == "," and self._needs_comma:
            self._needs_comma, self._may_end = False, False
        elif char == "]" and self._is_array and self._may_end:
            self.is_done = True
        elif char not in _WHITESPACE:
            self.is_broken = True
            return 0
        self._between += char
        return 1
