"""The model's head where ranks share it: the first rank says what it wants to know, the others compute their part.

One idea: what a token is chosen by depends on what has arrived at the rank that samples, so the others are told and
decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline.models.decoder import DecoderStage
from stageline.parallel.tensor_parallel import TensorParallel

_NOTHING, _LOGITS, _LIKELIEST = 0, 1, 2


class SharedHead:
    """Logits of rows of the last stage's hidden states [tokens, hidden], which every rank has."""

    def __init__(self, decoder: DecoderStage, ranks: TensorParallel) -> None:
        self._decoder = decoder
        self._ranks = ranks

    def logits(self, hidden_states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Returns: float32 [rows, vocab]."""
        self._tell(_LOGITS, rows)
        return self._decoder.logits(_some(hidden_states, rows))

    def likeliest(self, hidden_states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor | None:
        """See `stageline.models.family.Head.likeliest`."""
        self._tell(_LIKELIEST, rows)
        return self._decoder.likeliest(_some(hidden_states, rows))

    def finish(self) -> None:
        """The first rank wants no more of this microbatch."""
        self._tell(_NOTHING, ())

    def follow(self, hidden_states: torch.Tensor) -> None:
        """On the other ranks: take part in what the first one computes, until it has finished."""
        device = hidden_states.device
        while True:
            told = torch.empty(2, dtype=torch.int64, device=device)
            self._ranks.broadcast(told)
            what, count = told.tolist()
            if what == _NOTHING:
                return
            rows = torch.empty(count, dtype=torch.int64, device=device)
            self._ranks.broadcast(rows)
            chosen = hidden_states.index_select(0, rows)
            if what == _LOGITS:
                self._decoder.logits(chosen)
            else:
                self._decoder.likeliest(chosen)

    def _tell(self, what: int, rows: Sequence[int]) -> None:
        if self._ranks.size == 1:
            return
        device = self._decoder.device
        self._ranks.broadcast(torch.tensor([what, len(rows)], dtype=torch.int64, device=device))
        if what != _NOTHING:
            self._ranks.broadcast(torch.tensor(rows, dtype=torch.int64, device=device))


def _some(hidden_states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return hidden_states.index_select(0, torch.tensor(rows, device=hidden_states.device))
