"""Token embedding and LM head: the two ends of a model, which may share one matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stageline.layers.norm import RMSNorm


class TokenEmbedding:
    """Looks up a row per token.

    Args:
        weight: [vocab, hidden].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns: [tokens, hidden]."""
        return F.embedding(token_ids, self.weight)


class LMHead:
    """Final norm and projection onto the vocabulary.

    Args:
        norm: the model's final norm.
        weight: [vocab, hidden]; the embedding's own tensor if they are tied.
    """

    def __init__(self, norm: RMSNorm, weight: torch.Tensor) -> None:
        self._norm = norm
        self._weight = weight

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden], residual already added. Returns: float32 logits [rows, vocab]."""
        normed, _ = self._norm(hidden_states)
        return F.linear(normed, self._weight).float()
