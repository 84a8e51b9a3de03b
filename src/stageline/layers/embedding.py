"""Token embedding and LM head: the two ends of a model, which may share one matrix."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from stageline.layers.linear import Linear, TiedLinear
from stageline.layers.norm import RMSNorm


class TokenEmbedding:
    """Looks up a row per token.

    Args:
        weight: [vocab, hidden].
        scale: what rows are multiplied by; rounded to the weight's dtype before, as `transformers` does.
    """

    def __init__(self, weight: torch.Tensor, scale: float = 1.0) -> None:
        self._table: torch.Tensor | TiedLinear = weight
        self._scale = rounded(scale, weight.dtype)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns: [tokens, hidden]."""
        table = self._table
        rows = table.rows(token_ids) if isinstance(table, TiedLinear) else F.embedding(token_ids, table)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def as_projection(self) -> Linear:
        """The same matrix as the LM head's projection; from now on it exists in that form only."""
        if not isinstance(self._table, TiedLinear):
            self._table = TiedLinear(self._table)
        return self._table


def rounded(number: float, dtype: torch.dtype) -> float:
    """To the precision of `dtype`."""
    return float(torch.tensor(number, dtype=dtype).item())


class LMHead:
    """Final norm and projection onto the vocabulary.

    Args:
        norm: the model's final norm.
        projection: hidden to vocab; the embedding's own if they are tied.
        scale: a positive factor on the logits.
        cap: logits are bent to stay within ± this; None for none.
    """

    def __init__(self, norm: RMSNorm, projection: Linear, scale: float = 1.0, cap: float | None = None) -> None:
        self._norm = norm
        self._projection = projection
        self._scale = scale
        self._cap = cap

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden], residual already added. Returns: float32 logits [rows, vocab]."""
        normed, _ = self._norm(hidden_states)
        logits = self._projection.in_float32(normed)
        if self._scale != 1.0:
            logits = logits.mul_(self._scale)
        return logits if self._cap is None else logits.div_(self._cap).tanh_().mul_(self._cap)

    def likeliest(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The place of each row's largest logit, of equals the first: int64 [rows]; None if logits are as quick.

        A cap makes equal what differed by little before, and so may a scale that rounds: only logits tell then.
        """
        if self._cap is not None or abs(math.frexp(self._scale)[0]) != 0.5:
            return None
        normed, _ = self._norm(hidden_states)
        return self._projection.largest(normed)
