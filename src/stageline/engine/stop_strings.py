"""Finds stop strings in text that arrives in pieces, and holds back what may be the beginning of one.

One idea: each stop string is matched character by character (Knuth, Morris and Pratt), so the answer does not depend on
how the text was cut into pieces and every character is looked at once. The state of the match is also the number of
characters to hold back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringScanner:
    """Passes text on until a stop string is complete.

    The first string to be completed wins; of those completed by the same character, the longest.

    Args:
        stop_strings: non-empty strings; none at all passes everything on at once.
        is_included: whether the text passed on ends after the stop string instead of before it.
    """

    def __init__(self, stop_strings: Sequence[str], is_included: bool) -> None:
        self._matchers = [_Matcher(string) for string in sorted(set(stop_strings), key=len, reverse=True)]
        self._is_included = is_included
        self._held = ""
        self.found: str | None = None

    def push(self, text: str, may_stop: bool = True) -> str:
        """Take the next piece and return what can be passed on now; nothing once a stop string was found.

        Args:
            may_stop: whether a stop string that is completed in this piece counts.
        """
        if self.found is not None:
            return ""
        if not self._matchers:
            return text
        for position, character in enumerate(text):
            completed = [matcher.string for matcher in self._matchers if matcher.advance(character)]
            if completed and may_stop:
                return self._stop(completed[0], self._held + text[: position + 1])
        text = self._held + text
        safe = len(text) - max(matcher.num_matched for matcher in self._matchers)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _stop(self, string: str, text: str) -> str:
        self.found = string
        self._held = ""
        return text if self._is_included else text[: len(text) - len(string)]


class _Matcher:
    """How much of one string the latest characters match."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.num_matched = 0
        self._shorter = _border_lengths(string)

    def advance(self, character: str) -> bool:
        """Take one character; true if it completes the string. `num_matched` is always less than the whole string."""
        matched = self.num_matched
        while matched and self.string[matched] != character:
            matched = self._shorter[matched]
        if self.string[matched] == character:
            matched += 1
        is_complete = matched == len(self.string)
        self.num_matched = self._shorter[matched] if is_complete else matched
        return is_complete


def _border_lengths(string: str) -> list[int]:
    """[len + 1] for each beginning of the string, the longest shorter beginning that is also its end."""
    lengths = [0, 0]
    border = 0
    for character in string[1:]:
        while border and string[border] != character:
            border = lengths[border]
        if string[border] == character:
            border += 1
        lengths.append(border)
    return lengths
