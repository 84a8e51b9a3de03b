"""Spans in a file, as `/debug/timeline` answers them: what a command wrote another can draw."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stageline.timeline.span import Span


class SavedTimeline(msgspec.Struct):
    """A stretch of a run, or of a simulation."""

    start_s: float
    end_s: float
    num_stages: int
    spans: list[Span]
    is_complete: bool = True

    @classmethod
    def of(cls, spans: Sequence[Span], num_stages: int) -> SavedTimeline:
        """From the first span's start to the last one's end."""
        start_s = min((span.start_s for span in spans), default=0.0)
        return cls(start_s, max((span.end_s for span in spans), default=start_s), num_stages, list(spans))

    def save(self, path: Path) -> None:
        """Write it in place of what is there; folders are made. Raises: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written beside and moved: whoever reads meanwhile finds the old one or the new one, whole.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(msgspec.json.encode(self))
        part.replace(path)
