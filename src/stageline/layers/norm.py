"""Root-mean-square norm, fused with the residual addition in front of it."""

from __future__ import annotations

import torch

from stageline import kernels


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
