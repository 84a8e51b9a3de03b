"""Reasoning apart from the answer proper: what stands between the model's markers, at the answer's beginning.

Many templates write the opening marker themselves, at the end of the prompt; then the answer begins in the middle.
"""

from __future__ import annotations

from collections.abc import Callable

from stageline.server.answer_parsing.deltas import AnswerDelta, AnswerParser, num_chars_held


class ReasoningParser:
    """Args:
    opening, closing: the markers.
    is_inside: the prompt ended with the opening marker.
    rest: parses what comes after the reasoning.
    """

    def __init__(self, opening: str, closing: str, is_inside: bool, rest: AnswerParser) -> None:
        self._opening = opening
        self._closing = closing
        self._is_inside = is_inside
        self._rest = rest
        self._buffer = ""
        self._step: Callable[[list[AnswerDelta]], bool] = self._begin

    def feed(self, new_text: str) -> list[AnswerDelta]:
        if self._step == self._pass_on and not self._buffer:
            return self._rest.feed(new_text)
        self._buffer += new_text
        out: list[AnswerDelta] = []
        while self._step(out):
            pass
        return out

    def finish(self) -> list[AnswerDelta]:
        out: list[AnswerDelta] = []
        if self._step == self._begin and not self._is_inside:
            out += self._rest.feed(self._buffer)
        elif self._step in (self._begin, self._think):
            is_first = self._step == self._begin
            _add_reasoning(out, self._buffer.strip() if is_first else self._buffer.rstrip())
        return out + self._rest.finish()

    def _begin(self, out: list[AnswerDelta]) -> bool:
        text = self._buffer.lstrip()
        if not text or num_chars_held(text, (self._opening,)) == len(text):
            return False
        if text.startswith(self._opening):
            self._buffer = text[len(self._opening) :]
            self._step = self._skip_to_thought
        elif self._is_inside:
            self._step = self._skip_to_thought
        else:
            self._step = self._pass_on
        return True

    def _skip_to_thought(self, out: list[AnswerDelta]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._step = self._think
        return bool(self._buffer)

    def _think(self, out: list[AnswerDelta]) -> bool:
        place = self._buffer.find(self._closing)
        if place >= 0:
            _add_reasoning(out, self._buffer[:place].rstrip())
            self._buffer = self._buffer[place + len(self._closing) :]
            self._step = self._skip_to_answer
            return True
        held = num_chars_held(self._buffer, (self._closing,))
        certain = self._buffer[: len(self._buffer) - held].rstrip()
        _add_reasoning(out, certain)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _skip_to_answer(self, out: list[AnswerDelta]) -> bool:
        self._buffer = self._buffer.lstrip("\r\n")
        if self._buffer:
            self._step = self._pass_on
        return bool(self._buffer)

    def _pass_on(self, out: list[AnswerDelta]) -> bool:
        out += self._rest.feed(self._buffer)
        self._buffer = ""
        return False


class PlainParser:
    """Everything is content."""

    def feed(self, new_text: str) -> list[AnswerDelta]:
        return [AnswerDelta(content=new_text)] if new_text else []

    def finish(self) -> list[AnswerDelta]:
        return []


def _add_reasoning(out: list[AnswerDelta], text: str) -> None:
    if text:
        out.append(AnswerDelta(reasoning=text))
