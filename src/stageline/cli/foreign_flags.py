"""Sorts vLLM's flags out of a command line by the tables of config/foreign_flags.py: taken with a note, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stageline.config.foreign_flags import FOREIGN_FLAGS, FOREIGN_VALUES, LOAD_GENERATOR_FLAGS, ForeignFlag


def foreign_flags(known_flags: Sequence[str]) -> Mapping[str, ForeignFlag]:
    """vLLM's flags for a command like the one that knows these; none for a command that vLLM has not."""
    if "--pipeline-parallel-size" in known_flags:
        return FOREIGN_FLAGS
    return LOAD_GENERATOR_FLAGS if "--max-concurrency" in known_flags else {}


def without_foreign(words: Sequence[str], known_flags: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort a command's words.

    Args:
        words: as typed, behind the command.
        known_flags: the command's own; those are left alone, and say which command it is.
    Returns: the words without the foreign flags, notes on those that change nothing, and why others are refused.
    """
    table = foreign_flags(known_flags)
    kept: list[str] = []
    notes: list[str] = []
    refusals: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        foreign = None if flag in known_flags else table.get(flag)
        if foreign is None:
            kept.append(word)
            given = value if equals else next(iter(rest), "")
            if table and (instead := FOREIGN_VALUES.get(flag, {}).get(given)):
                refusals.append(f"{flag} {given} is not supported: {instead}")
            continue
        if foreign.has_value and not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        typed = f"{flag} {value}".rstrip()
        if foreign.taken is None or value in foreign.taken:
            notes.append(f"{typed} changes nothing: {foreign.words}")
        else:
            refusals.append(f"{typed} is not supported: {foreign.words}")
    return kept, notes, refusals
