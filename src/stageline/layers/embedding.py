"""Token embedding and LM head: the two ends of a model, which may share one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stageline.layers.linear import Linear, TiedLinear
from stageline.layers.norm import RMSNorm


class TokenEmbedding:
    """Looks up a row per token.

    Args:
        weight: [vocab, hidden].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._table: torch.Tensor | TiedLinear = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns: [tokens, hidden]."""
        table = self._table
        return table.rows(token_ids) if isinstance(table, TiedLinear) else F.embedding(token_ids, table)

    def as_projection(self) -> Linear:
        """The same matrix as the LM head's projection; from now on it exists in that form only."""
        if not isinstance(self._table, TiedLinear):
            self._table = TiedLinear(self._table)
        return self._table


class LMHead:
    """Final norm and projection onto the vocabulary.

    Args:
        norm: the model's final norm.
        projection: hidden to vocab; the embedding's own if they are tied.
    """

    def __init__(self, norm: RMSNorm, projection: Linear) -> None:
        self._norm = norm
        self._projection = projection

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden], residual already added. Returns: float32 logits [rows, vocab]."""
        normed, _ = self._norm(hidden_states)
        return self._projection.in_float32(normed)

    def likeliest(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The place of each row's largest logit, of equals the first: int64 [rows]; None if logits are as quick."""
        normed, _ = self._norm(hidden_states)
        return self._projection.largest(normed)
