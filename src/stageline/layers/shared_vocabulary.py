"""The two ends of a model whose vocabulary is shared by the ranks of a stage: each has the rows of some tokens."""

from __future__ import annotations

import torch

from stageline import kernels
from stageline.layers.embedding import TokenEmbedding
from stageline.layers.linear import Linear
from stageline.layers.quantized_linear import QuantizedEmbedding
from stageline.parallel.tensor_parallel import TensorParallel


class SharedEmbedding:
    """Looks up the rows of this rank's tokens; the others' come by the sum.

    Args:
        own: of this rank's tokens.
        tokens: which they are.
    """

    def __init__(self, own: TokenEmbedding | QuantizedEmbedding, tokens: range, ranks: TensorParallel) -> None:
        self._own = own
        self._tokens = tokens
        self._ranks = ranks

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns: [tokens, hidden]."""
        places = token_ids - self._tokens.start
        is_own = (places >= 0) & (places < len(self._tokens))
        rows = self._own(places.clamp(0, max(len(self._tokens) - 1, 0)))
        return self._ranks.all_reduce(rows.mul_(is_own.unsqueeze(1)))


class SharedProjection(Linear):
    """Hidden states to logits of all tokens, of which each rank computes some. All ranks call it together.

    Args:
        own: to this rank's tokens.
        tokens: which they are; as many as on any other rank, but for the last ones.
    """

    def __init__(self, own: Linear, tokens: range, vocab_size: int, ranks: TensorParallel) -> None:
        self._own = own
        self._tokens = tokens
        self._vocab_size = vocab_size
        self._ranks = ranks
        self._share = -(-vocab_size // ranks.size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, hidden]. Returns: [rows, vocab]."""
        own = torch.full((x.shape[0], self._share), -torch.inf, device=x.device)
        own[:, : len(self._tokens)] = self._own.in_float32(x)
        return self._ranks.all_gather(own).transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()

    def largest(self, x: torch.Tensor) -> torch.Tensor | None:
        """Where each row's largest logit stands, of equals the first: int64 [rows]. Two numbers of a row are told."""
        own = self._own.in_float32(x)
        library = kernels.library(own.device, own.dtype)
        places = own.argmax(-1) if library is None else library.argmax(own.contiguous())
        best = own.gather(1, places.unsqueeze(1)).squeeze(1)
        told = torch.stack((best.double(), (places + self._tokens.start).double()), dim=1)
        everybody = self._ranks.all_gather(told)
        ranks = everybody[..., 0].argmax(0)
        return everybody[..., 1].gather(0, ranks.unsqueeze(0)).squeeze(0).long()
