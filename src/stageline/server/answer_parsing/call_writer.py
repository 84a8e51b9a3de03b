"""One answer's tool calls as they are found: their numbers, ids, and which names are calls at all."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection

from stageline.server.answer_parsing.deltas import AnswerDelta, ToolCallDelta

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


def openai_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_call_id() -> str:
    """Mistral's templates refuse any other form."""
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(9))


class CallWriter:
    """Args:
    names: the functions that may be called. What looks like a call of another is the answer's content.
    is_parallel: False keeps the first call and drops further ones.
    """

    def __init__(self, names: Collection[str], is_parallel: bool, new_id: Callable[[], str] = openai_call_id) -> None:
        self._names = frozenset(names)
        self._is_parallel = is_parallel
        self._new_id = new_id
        self._out: list[AnswerDelta] = []
        self.num_calls = 0

    def knows(self, name: object) -> bool:
        return isinstance(name, str) and name in self._names

    def content(self, text: str) -> None:
        if text:
            self._out.append(AnswerDelta(content=text))

    def begin(self, name: str) -> None:
        self.num_calls += 1
        self._write(ToolCallDelta(index=self.num_calls - 1, id=self._new_id(), name=name))

    def arguments(self, text: str) -> None:
        """More of the call that was begun last. Half a surrogate pair becomes an escape of JSON: UTF-8 has none."""
        if text:
            sent = text.encode("utf-8", "backslashreplace").decode()
            self._write(ToolCallDelta(index=self.num_calls - 1, arguments=sent))

    def take(self) -> list[AnswerDelta]:
        """What was written since the last time."""
        out, self._out = self._out, []
        return out

    def _write(self, delta: ToolCallDelta) -> None:
        if self._is_parallel or delta.index == 0:
            self._out.append(AnswerDelta(tool_call=delta))
