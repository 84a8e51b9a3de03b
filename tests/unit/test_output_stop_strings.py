"""Stop strings are found wherever the text is cut, and nothing is passed on that would have to be taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stageline.engine.stop_strings import StopStringScanner

# Two letters make overlaps and near misses common; single letters as stop strings would hide them.
TEXT = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=2, max_size=6), max_size=3)


def _cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


def _plain(text: str, stops: list[str], is_included: bool) -> tuple[str, str | None]:
    """The string that ends first wins, of those that end together the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if is_included else end - len(stop)], stop


@given(text=TEXT, stops=STOPS, sizes=st.lists(st.integers(0, 7), max_size=12), is_included=st.booleans())
@example(text="aaab", stops=["aab"], sizes=[1, 1, 1], is_included=False)
@settings(max_examples=500)
def test_the_cut_text_is_that_of_a_plain_search_however_it_arrives(
    text: str, stops: list[str], sizes: list[int], is_included: bool
) -> None:
    scanner = StopStringScanner(stops, is_included)
    passed = "".join(scanner.push(piece) for piece in _cut(text, sizes)) + scanner.finish()
    assert (passed, scanner.found) == _plain(text, stops, is_included)


@given(text=TEXT, stops=STOPS, sizes=st.lists(st.integers(0, 7), max_size=12), more=TEXT)
def test_what_was_passed_on_is_never_taken_back_and_nothing_is_held_without_need(
    text: str, stops: list[str], sizes: list[int], more: str
) -> None:
    scanner = StopStringScanner(stops, is_included=False)
    passed = "".join(scanner.push(piece) for piece in _cut(text, sizes))
    assert _plain(text + more, stops, is_included=False)[0].startswith(passed)
    if scanner.found is None:
        held = text[len(passed) :]
        assert not held or any(stop.startswith(held) and len(stop) > len(held) for stop in stops)


@given(early=TEXT, late=TEXT, stops=STOPS)
@example(early="aa", late="a", stops=["aa"])
@settings(max_examples=500)
def test_a_stop_string_completed_too_early_does_not_count(early: str, late: str, stops: list[str]) -> None:
    """It must end in the text that counts, and may begin before."""
    text = early + late
    scanner = StopStringScanner(stops, is_included=False)
    passed = scanner.push(early, may_stop=False) + scanner.push(late) + scanner.finish()
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(early) + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    if not ends:
        assert (passed, scanner.found) == (text, None)
        return
    end, _, stop = min(ends)
    assert scanner.found == stop
    assert passed == text[: end - len(stop)]


@pytest.mark.parametrize("is_included", [False, True])
def test_text_after_the_stop_string_is_dropped(is_included: bool) -> None:
    scanner = StopStringScanner(["END"], is_included)
    assert scanner.push("one EN") == "one "
    assert scanner.push("D two") == ("END" if is_included else "")
    assert scanner.push("three") == ""
    assert scanner.finish() == ""
