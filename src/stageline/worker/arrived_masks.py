"""The last stage's masks, from their arrival to the moment their microbatch is sampled.

One idea: a mask belongs to a microbatch that was announced and asked for it, or it is refused; one that comes after its
microbatch was sampled is of no use any more and is dropped.
"""

from __future__ import annotations

from stageline.errors import FrameError
from stageline.pipeline.microbatch import Microbatch, TokenMasks, check_masks


class ArrivedMasks:
    """Args: vocab_size: of the model; fixes the length of a mask."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._newest = (-1, -1)
        self._awaited: dict[tuple[int, int], tuple[list[int], dict[int, bytes]]] = {}

    def announce(self, microbatch: Microbatch) -> None:
        """A microbatch is on its way; in order."""
        self._newest = (microbatch.epoch, microbatch.number)
        if microbatch.masked_rows:
            self._awaited[self._newest] = (microbatch.masked_rows, {})

    def add(self, masks: TokenMasks) -> None:
        """Raises: FrameError if nobody asked for them, or they are not of the right size."""
        place = (masks.epoch, masks.number)
        if place > self._newest or masks.epoch < 0 or masks.number < 0:
            raise FrameError(f"masks for microbatch (epoch, number) {place}; the newest is {self._newest}")
        awaited = self._awaited.get(place)
        if awaited is None:
            return
        masked_rows, arrived = awaited
        check_masks(masks, masked_rows, self._vocab_size)
        for row, mask in zip(masks.rows, masks.masks, strict=True):
            arrived.setdefault(row, mask)

    def take(self, microbatch: Microbatch) -> dict[int, bytes]:
        """The masks that are there, by row, once: the microbatch is being sampled."""
        _, arrived = self._awaited.pop((microbatch.epoch, microbatch.number), ((), {}))
        return arrived
