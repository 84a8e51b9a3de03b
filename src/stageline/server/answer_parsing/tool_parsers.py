"""Tool calls in the middle of text: content goes out at once, calls as they are written, and nothing is lost.

One idea: a parser is a list of steps over a buffer of text that is not decided yet. A step takes what it is certain of
and says whether another may follow. What began like a call and is none goes back into the buffer as content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from stageline.server.answer_parsing.call_writer import CallWriter
from stageline.server.answer_parsing.deltas import AnswerDelta, num_chars_held
from stageline.server.answer_parsing.json_calls import ArgumentsReader, CallListReader, CallReader

_LONGEST_HEADER = 200
_MISTRAL_HEADER = re.compile(r"\s*(?P<name>[A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9_-]*)?(?:\[ARGS\])?\s*")


class ToolParser:
    """Content around calls; a style says what begins a call and how it is read.

    Args:
        markers: texts that begin a call.
        closing: text that may end one.
        separator: text that may stand between calls without a marker of their own.
        may_begin_bare: a call may open the answer without a marker, with one of `openings`.
        new_reader: reads what follows a marker.
    """

    def __init__(
        self,
        writer: CallWriter,
        new_reader: Callable[[CallWriter], CallReader] = CallListReader,
        markers: tuple[str, ...] = (),
        closing: str = "",
        separator: str = "",
        may_begin_bare: bool = False,
        openings: str = "{[",
    ) -> None:
        self._writer = writer
        self._new_reader = new_reader
        self._markers = markers
        self._closing = closing
        self._separator = separator
        self._openings = openings
        self._buffer = ""
        self._gap = ""  # whitespace and marker before a call: content, if it becomes none
        self._reader: CallReader | None = None
        self._num_calls_before = 0
        self._step = self._bare_step if may_begin_bare else self._content_step

    def feed(self, new_text: str) -> list[AnswerDelta]:
        self._buffer += new_text
        while self._step():
            pass
        return self._writer.take()

    def finish(self) -> list[AnswerDelta]:
        """A call that is not complete has gone out as far as it came, or is content."""
        while self._reader is not None:
            self._give_up_reading()
            while self._step():
                pass
        held = self._gap + self._buffer
        self._gap = self._buffer = ""
        if self._writer.num_calls == 0 or held.strip() not in ("", self._separator):
            self._writer.content(held)
        return self._writer.take()

    def _bare_step(self) -> bool:
        """Before anything else: the answer may be a call as a whole."""
        text = self._buffer.lstrip()
        if not text or num_chars_held(text, self._markers) == len(text):
            return False
        if text[0] in self._openings:
            self._begin_reading(self._buffer[: -len(text)], text)
        else:
            self._step = self._content_step
        return True

    def _content_step(self) -> bool:
        found = [(place, marker) for marker in self._markers if (place := self._buffer.find(marker)) >= 0]
        if found:
            place, marker = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            kept = self._buffer[:place].rstrip()
            self._writer.content(kept)
            after = place + len(marker)
            self._begin_reading(self._buffer[len(kept) : after], self._buffer[after:])
            return True
        certain = self._buffer[: len(self._buffer) - num_chars_held(self._buffer, self._markers)].rstrip()
        self._writer.content(certain)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _begin_reading(self, gap: str, text: str) -> None:
        self._gap, self._buffer = gap, text
        self._reader = self._new_reader(self._writer)
        self._num_calls_before = self._writer.num_calls
        self._step = self._reading_step

    def _reading_step(self) -> bool:
        assert self._reader is not None
        taken = self._reader.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        if self._reader.is_broken:
            self._give_up_reading()
            return True
        if self._reader.is_done:
            self._reader, self._gap = None, ""
            self._step = self._after_step
            return True
        return False

    def _give_up_reading(self) -> None:
        """What was read goes back to be content, but for calls that went out; what only looked like a marker is one."""
        assert self._reader is not None
        unsent, self._reader = self._reader.unsent, None
        if self._writer.num_calls == self._num_calls_before:
            self._writer.content(self._gap)
        self._gap = ""
        self._buffer = unsent + self._buffer
        self._step = self._content_step

    def _after_step(self) -> bool:
        """After a call: its closing text, and another one if the style puts several together."""
        text = self._buffer.lstrip()
        expected = tuple(word for word in (self._closing, self._separator) if word)
        if not text or num_chars_held(text, expected) == len(text):
            return False
        if self._closing and text.startswith(self._closing):
            self._buffer = text[len(self._closing) :]
            self._step = self._content_step
        elif self._separator and text.startswith(self._separator):
            self._step = self._separated_step
        else:
            self._step = self._content_step
        return True

    def _separated_step(self) -> bool:
        """A separator is here; a call may follow it."""
        text = self._buffer.lstrip()[len(self._separator) :].lstrip()
        if not text:
            return False
        if text[0] in self._openings:
            self._begin_reading(self._buffer[: -len(text)], text)
        else:
            self._step = self._content_step
        return True


class MistralReader:
    """`[{"name": ..., "arguments": ...}, ...]`, or `name{...}`, with or without an id and a word between them."""

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer
        self._header = ""
        self._inner: CallReader | None = None
        self.is_done = False
        self.is_broken = False

    @property
    def unsent(self) -> str:
        if self._inner is None:
            return self._header
        return self._header + self._inner.unsent if self._inner.unsent else ""

    def feed(self, text: str) -> int:
        place = 0
        while place < len(text) and self._inner is None and not self.is_broken:
            place += self._take_header(text[place])
        if self._inner is not None:
            place += self._inner.feed(text[place:])
            self.is_done, self.is_broken = self._inner.is_done, self._inner.is_broken
        return place

    def _take_header(self, char: str) -> int:
        if char in "[{" and not self._header.strip():
            self._inner = CallListReader(self._writer)
            return 0
        if char == "{":
            found = _MISTRAL_HEADER.fullmatch(self._header)
            self.is_broken = found is None or not self._writer.knows(found["name"])
            if found is not None and not self.is_broken:
                self._inner = ArgumentsReader(self._writer, found["name"])
            return 0
        self._header += char
        self.is_broken = len(self._header) > _LONGEST_HEADER
        return 1


def hermes_parser(writer: CallWriter) -> ToolParser:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`"""
    return ToolParser(writer, markers=("<tool_call>",), closing="</tool_call>")


def llama3_json_parser(writer: CallWriter) -> ToolParser:
    """`{"name": ..., "parameters": ...}; {...}` from the answer's beginning, or after <|python_tag|>."""
    return ToolParser(writer, markers=("<|python_tag|>",), separator=";", may_begin_bare=True)


def mistral_parser(writer: CallWriter) -> ToolParser:
    """`[TOOL_CALLS]` and what `MistralReader` reads."""
    return ToolParser(writer, MistralReader, markers=("[TOOL_CALLS]",))


def required_parser(writer: CallWriter) -> ToolParser:
    """An answer that was made to be an array of calls."""
    return ToolParser(writer, may_begin_bare=True, openings="[")


def named_parser(writer: CallWriter, name: str) -> ToolParser:
    """An answer that was made to be one function's arguments."""
    return ToolParser(writer, lambda calls: ArgumentsReader(calls, name), may_begin_bare=True, openings="{")
