"""What an answer's text turns out to be, piece by piece, and who finds it out."""

from __future__ import annotations

from typing import Protocol

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Args:
    index: which call of the answer.
    id, name: in the first delta of a call only.
    arguments: the next piece of the JSON text.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new in an answer; one of the three."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class AnswerParser(Protocol):
    """Takes one answer's text in any pieces. How it was cut makes no difference to what the deltas come to."""

    def feed(self, new_text: str) -> list[AnswerDelta]:
        """What is certain now; text that may still become a marker or a call is held back."""

    def finish(self) -> list[AnswerDelta]:
        """The answer is over: what was held back. Nothing is fed afterwards."""


def num_chars_held(text: str, markers: tuple[str, ...]) -> int:
    """How long the longest end of the text is with which one of the markers begins, without being it."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) and size < len(marker) for marker in markers):
            return size
    return 0
