"""What one rendering of a chat template may cost: processor time, and characters produced on the way and in the end.

Every operation that can grow is charged, or asked for room, before it is carried out: a single one, such as
`'x' * 10**10`, would not come back to be stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jinja2
import jinja2.utils

# What an entry of a list or mapping counts for, beside its text.
ENTRY_CHARS = 32
# Widths, precisions, counts and the like, wherever a template may give one.
MAX_WIDTH = 10_000
MAX_INTEGER_BITS = 4096
_STEPS_PER_LOOK_AT_THE_CLOCK = 32
_SCALAR_CHARS = 16


@dataclass(frozen=True)
class RenderLimits:
    """Args:
    cpu_s: processor time of the rendering thread, so that a busy machine does not refuse what an idle one renders.
    produced_chars: everything made on the way, copies included; it bounds the memory.
    rendered_chars: the prompt.
    """

    cpu_s: float = 2.0
    produced_chars: int = 256_000_000
    rendered_chars: int = 32_000_000


class LimitReached(Exception):
    """A rendering was stopped. No template can catch it."""


class RenderMeter:
    """Counts one rendering against its limits; every method raises LimitReached when one is passed."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._num_steps = 0
        self._num_chars = 0
        self._ends_at_cpu_s = time.thread_time() + limits.cpu_s

    def step(self, static_chars: int = 0) -> None:
        """One turn of a loop, one call or one operation; `static_chars` of the template's own text are written."""
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_LOOK_AT_THE_CLOCK == 0 and time.thread_time() > self._ends_at_cpu_s:
            raise LimitReached(f"it ran for {self._limits.cpu_s:g} s")
        if static_chars:
            self.charge(static_chars)

    def require(self, num_chars: int) -> None:
        """There must be room for so many, but they are not charged yet."""
        if self._num_chars + num_chars > self._limits.produced_chars:
            raise LimitReached(f"it made more than {self._limits.produced_chars} characters on the way")

    def charge(self, num_chars: int) -> None:
        self._num_chars += num_chars
        self.require(0)

    def charge_result(self, value: object) -> None:
        """A value that an operation made: its text, or its entries and theirs."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, list | tuple | dict):
            self.charge(ENTRY_CHARS * len(value))
            self.charge(sum(len(entry) for entry in value if isinstance(entry, str)))

    def stepping(self, values: Iterable[object]) -> Iterator[object]:
        """The same values, with a step for each."""
        for value in values:
            self.step()
            yield value

    def text_size(self, value: object, indent: int = 0) -> int:
        """About how many characters the value has as text, at least as many as memory it shares with itself.

        Raises: LimitReached as soon as there would be no room for it, however often it contains the same part.
        """
        size = 0
        waiting: list[tuple[object, int]] = [(value, 0)]
        while waiting:
            self.step()
            item, depth = waiting.pop()
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping):
                waiting.extend((part, depth + 1) for pair in item.items() for part in pair)
                size += len(item) * ENTRY_CHARS
            elif isinstance(item, list | tuple | range):
                waiting.extend((part, depth + 1) for part in item)
                size += len(item) * ENTRY_CHARS
            elif isinstance(item, jinja2.utils.Namespace):
                raise LimitReached("it wrote a namespace as text")
            size += _SCALAR_CHARS * (not isinstance(item, str)) + indent * depth
            self.require(size + len(waiting))
        return size

    def rendered(self, pieces: Iterable[str]) -> str:
        """The pieces as one text."""
        kept: list[str] = []
        size = 0
        for piece in pieces:
            self.step()
            size += len(piece)
            if size > self._limits.rendered_chars:
                raise LimitReached(f"the prompt became longer than {self._limits.rendered_chars} characters")
            kept.append(piece)
        return "".join(kept)


def check_width(value: object) -> None:
    """Raises: LimitReached for a number that is large as a width, a count or a precision."""
    if isinstance(value, int) and not -MAX_WIDTH <= value <= MAX_WIDTH:
        raise LimitReached(f"it used a width or count of more than {MAX_WIDTH}")


def check_integer(value: object) -> None:
    """Raises: LimitReached for a number too large to calculate with at once."""
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise LimitReached(f"it calculated with a number of more than {MAX_INTEGER_BITS} bits")
