"""How much may be out: the window of microbatches that are somewhere in the pipeline."""

from __future__ import annotations

from stageline.errors import InternalError
from stageline.pipeline.microbatch import Microbatch, MicrobatchResult


class InFlight:
    """The microbatches that were launched and not yet answered, oldest first.

    Stages run microbatches in order, so results come back in order; anything else is a bug worth stopping for.

    Args:
        window: most microbatches out at once; at least the number of stages, or stages idle.
    """

    def __init__(self, window: int) -> None:
        if window < 1:
            raise InternalError(f"a window of {window} microbatches can hold nothing")
        self.window = window
        self._microbatches: dict[int, Microbatch] = {}

    def __len__(self) -> int:
        return len(self._microbatches)

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """Oldest first."""
        return tuple(self._microbatches.values())

    @property
    def has_room(self) -> bool:
        return len(self._microbatches) < self.window

    def launched(self, microbatch: Microbatch) -> None:
        """Take a place in the window. Raises: InternalError if there is none."""
        if not self.has_room:
            raise InternalError(f"{microbatch} launched into a full window of {self.window}")
        self._microbatches[microbatch.number] = microbatch

    def completed(self, result: MicrobatchResult) -> Microbatch:
        """Give the place back. Returns: the microbatch that the result answers.

        Raises: InternalError if it is not the oldest one in flight.
        """
        oldest = next(iter(self._microbatches), None)
        if oldest != result.number:
            raise InternalError(f"result of m{result.number} while the oldest microbatch in flight is m{oldest}")
        return self._microbatches.pop(result.number)
