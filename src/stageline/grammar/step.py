"""What a token means for the grammar it is in."""

from __future__ import annotations

from enum import Enum, auto


class Step(Enum):
    """GOES_ON: more may come. COMPLETE: it was the last, and is text. STOPPED: it only said that nothing more comes.

    FAILED: nobody can say what may come, because the grammar exceeded its limits with this token.
    """

    GOES_ON = auto()
    COMPLETE = auto()
    STOPPED = auto()
    FAILED = auto()
