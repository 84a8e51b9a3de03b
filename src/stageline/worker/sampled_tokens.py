"""What the last stage sampled, kept for microbatches that were launched before their tokens were known.

One idea: a microbatch names the one whose tokens it awaits, and that is always the oldest that was in flight. So tokens
of earlier ones can be forgotten, and what awaits tokens gets them in order. Either may come first: the announcement of
a successor usually does, but tokens may have been sampled and the engine not have heard of it yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from stageline.errors import FrameError
from stageline.pipeline.microbatch import Microbatch, MicrobatchResult


@dataclass(frozen=True)
class AwaitedTokens:
    """The tokens of a microbatch's `pending_rows`, in their order."""

    microbatch: Microbatch
    token_ids: list[int]


class SampledTokens:
    """Of one epoch. Microbatches and results come in order."""

    def __init__(self) -> None:
        self._oldest = -1
        self._sampled: dict[int, list[int]] = {}
        self._awaiting: deque[Microbatch] = deque()

    def announce(self, microbatch: Microbatch) -> None:
        """A microbatch is on its way. Raises: FrameError if it awaits tokens that are forgotten."""
        if microbatch.oldest < self._oldest:
            if microbatch.pending_rows:
                raise FrameError(f"{microbatch}: awaits tokens of m{microbatch.oldest}; the oldest is m{self._oldest}")
            return
        self._oldest = microbatch.oldest
        for number in [number for number in self._sampled if number < self._oldest]:
            del self._sampled[number]
        if microbatch.pending_rows:
            self._awaiting.append(microbatch)

    def add(self, result: MicrobatchResult) -> None:
        """A microbatch was sampled."""
        self._sampled[result.number] = result.token_ids

    def take(self) -> AwaitedTokens | None:
        """The next tokens that were sampled and are awaited, once.

        Raises: FrameError if a microbatch awaits a token that was not sampled.
        """
        if not self._awaiting or (sampled := self._sampled.get(self._awaiting[0].oldest)) is None:
            return None
        microbatch = self._awaiting.popleft()
        if max(microbatch.pending_places) >= len(sampled):
            raise FrameError(f"{microbatch}: awaits more tokens than the {len(sampled)} of m{microbatch.oldest}")
        token_ids = [sampled[place] for place in microbatch.pending_places]
        if min(token_ids) < 0:
            raise FrameError(f"{microbatch}: awaits a token of m{microbatch.oldest} that was not sampled")
        return AwaitedTokens(microbatch, token_ids)
