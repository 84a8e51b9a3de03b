"""What to say of a flag that a command does not know: which was meant, or which command has it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_REPLICAS = "replicas are for stageline serve; other commands run one pipeline"
_ELSEWHERE = {"-dp": _REPLICAS, "--data-parallel-size": _REPLICAS}


def describe_unknown(unknown: Sequence[str], known_flags: Iterable[str]) -> str:
    """One line for everything that was not understood.

    Args:
        unknown: as typed, flags and values.
        known_flags: of the command, such as "--port".
    """
    flags = list(known_flags)
    hints = [hint for word in unknown if word.startswith("-") and (hint := _hint(word.split("=")[0], flags))]
    return f"unrecognized arguments: {' '.join(unknown)}" + "".join(f"; {hint}" for hint in hints)


def _hint(flag: str, known_flags: list[str]) -> str:
    if words := _ELSEWHERE.get(flag):
        return f"{flag}: {words}"
    close = difflib.get_close_matches(flag, known_flags, n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close and flag.startswith("--") else ""
