"""Root-mean-square norms: of hidden states, fused with the residual addition in front, and of queries and keys."""

from __future__ import annotations

import torch

from stageline import kernels
from stageline.parallel.tensor_parallel import TensorParallel


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    The mean and the division are computed in float32 and rounded once to x's dtype before the weight is applied, as
    `transformers` does, so that both round alike in bfloat16.

    Args:
        weight: [hidden].
        eps: added to the mean of squares.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._kernels = kernels.library(weight.device, weight.dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [rows, hidden]; neither is changed.

        Returns: (the norm of x + residual, x + residual); a residual of None counts as zero.
        """
        if self._kernels is not None:
            return self._kernels.rms_norm(x, residual, self._weight, self._eps)
        total = x if residual is None else x + residual
        wide = total.float()
        inverse_rms = wide.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_()
        return (wide * inverse_rms).to(total.dtype).mul_(self._weight), total


class QueryKeyNorm:
    """Norms of queries and of keys, in front of their rotation: of each head by itself, or of all heads together.

    Args:
        query_weight, key_weight: [numbers that have one norm]: head_dim, or all heads' numbers.
        eps: added to the mean of squares.
    """

    def __init__(self, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float) -> None:
        self._query_weight = query_weight
        self._key_weight = key_weight
        self._eps = eps
        self._kernels = kernels.library(query_weight.device, query_weight.dtype)

    def __call__(self, qkv: torch.Tensor, query_size: int, key_size: int) -> torch.Tensor:
        """Args:
            qkv: [tokens, query_size + key_size + what is left alone]; may be overwritten.
        Returns: the same with normed queries and keys.
        """
        query_weight, key_weight = self._query_weight, self._key_weight
        if self._kernels is not None:
            queries = query_size // query_weight.numel(), query_weight
            keys = key_size // key_weight.numel(), key_weight
            self._kernels.normalize_heads_(qkv, queries, keys, self._eps)
            return qkv
        end = query_size + key_size
        normed_queries = _rms_norm(qkv[:, :query_size], query_weight, self._eps)
        normed_keys = _rms_norm(qkv[:, query_size:end], key_weight, self._eps)
        return torch.cat((normed_queries, normed_keys, qkv[:, end:]), dim=1)


class SharedQueryKeyNorm(QueryKeyNorm):
    """The norm of all heads together, of which this rank has some, and of the weights those of its heads.

    Args:
        ranks: all have equally many heads, but may have copies of the same keys.
    """

    def __init__(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float, ranks: TensorParallel
    ) -> None:
        super().__init__(query_weight, key_weight, eps)
        self._ranks = ranks

    def __call__(self, qkv: torch.Tensor, query_size: int, key_size: int) -> torch.Tensor:
        end = query_size + key_size
        queries, keys, rest = qkv[:, :query_size].float(), qkv[:, query_size:end].float(), qkv[:, end:]
        own = torch.stack((queries.square().mean(-1), keys.square().mean(-1)), dim=1)
        # Copies are equally many of each, so they do not change the mean.
        inverse_rms = (self._ranks.all_reduce(own) / self._ranks.size + self._eps).rsqrt_()
        normed_queries = (queries * inverse_rms[:, :1]).to(qkv.dtype).mul_(self._query_weight)
        normed_keys = (keys * inverse_rms[:, 1:]).to(qkv.dtype).mul_(self._key_weight)
        return torch.cat((normed_queries, normed_keys, rest), dim=1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [rows, parts * weight's numbers]; every part has a norm of its own."""
    wide = x.float().reshape(x.shape[0], -1, weight.numel())
    inverse_rms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * inverse_rms).to(x.dtype).mul_(weight).flatten(1)
