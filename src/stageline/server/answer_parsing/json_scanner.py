"""Where a JSON value ends, and whether it still is one, known from any pieces of its text."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_PLAIN_TEXT = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_CHARS = frozenset("0123456789+-.eEtrufalsn")
_WHITESPACE = " \t\r\n"
_MAX_DEPTH = 200


class _Where(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()  # or the end of an empty array
    KEY = auto()
    FIRST_KEY = auto()  # or the end of an empty object
    COLON = auto()
    AFTER_VALUE = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    SCALAR = auto()


class JsonScanner:
    """Follows one value. After `feed`, either it goes on, or `is_done`, or `is_broken`."""

    def __init__(self) -> None:
        self._where = _Where.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._scalar = ""
        self._num_hex_digits = 0
        self.is_done = False
        self.is_broken = False

    def feed(self, text: str) -> tuple[int, str]:
        """Returns: how many characters belong to the value, and they as valid JSON: models write line breaks inside
        strings as they are, where JSON wants them escaped. The character that breaks the value does not belong to it.
        """
        taken: list[str] = []
        place = 0
        while place < len(text) and not (self.is_done or self.is_broken):
            if self._where is _Where.STRING and (plain := _PLAIN_TEXT.match(text, place)):
                taken.append(plain.group())
                place = plain.end()
                continue
            piece = self._take(text[place])
            if piece is not None:
                taken.append(piece)
                place += 1
        return place, "".join(taken)

    def _take(self, char: str) -> str | None:
        """The character as JSON; None if it was not taken."""
        where = self._where
        if where in (_Where.STRING, _Where.ESCAPE, _Where.HEX):
            return self._take_in_string(char)
        if where is _Where.SCALAR:
            if char in _SCALAR_CHARS:
                self._scalar += char
                return char
            self._end_scalar()
            return None
        if char in _WHITESPACE:
            return char
        is_taken = self._take_between(char)
        self.is_broken = not is_taken
        return char if is_taken else None

    def _take_in_string(self, char: str) -> str | None:
        if self._where is _Where.HEX:
            self._num_hex_digits += 1
            self.is_broken = char not in "0123456789abcdefABCDEF"
            self._where = _Where.STRING if self._num_hex_digits == 4 else _Where.HEX
        elif self._where is _Where.ESCAPE:
            self._num_hex_digits = 0
            self.is_broken = char not in '"\\/bfnrtu'
            self._where = _Where.HEX if char == "u" else _Where.STRING
        elif char == '"':
            if self._is_key:
                self._where = _Where.COLON
            else:
                self._end_value()
        elif char == "\\":
            self._where = _Where.ESCAPE
        else:
            return json.dumps(char)[1:-1]
        return None if self.is_broken else char

    def _take_between(self, char: str) -> bool:
        where = self._where
        is_first = where in (_Where.FIRST_VALUE, _Where.FIRST_KEY)
        if self._closers and char == self._closers[-1] and (is_first or where is _Where.AFTER_VALUE):
            self._closers.pop()
            self._end_value()
        elif where in (_Where.VALUE, _Where.FIRST_VALUE):
            return self._begin_value(char)
        elif where in (_Where.KEY, _Where.FIRST_KEY) and char == '"':
            self._where, self._is_key = _Where.STRING, True
        elif where is _Where.COLON and char == ":":
            self._where = _Where.VALUE
        elif where is _Where.AFTER_VALUE and char == ",":
            self._where = _Where.KEY if self._closers[-1] == "}" else _Where.VALUE
        else:
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._where, self._is_key = _Where.STRING, False
        elif char in "{[" and len(self._closers) < _MAX_DEPTH:
            self._closers.append("}" if char == "{" else "]")
            self._where = _Where.FIRST_KEY if char == "{" else _Where.FIRST_VALUE
        elif char in "-0123456789tfn":
            self._where, self._scalar = _Where.SCALAR, char
        else:
            return False
        return True

    def _end_scalar(self) -> None:
        if _SCALAR.fullmatch(self._scalar):
            self._end_value()
        else:
            self.is_broken = True

    def _end_value(self) -> None:
        self.is_done = not self._closers
        self._where = _Where.AFTER_VALUE
