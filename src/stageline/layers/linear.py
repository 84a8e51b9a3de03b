"""Linear layers, with weights as checkpoints hold them: [out_features, in_features].

One idea: the matmul hides behind `Linear`, so packed or quantised weights can take its place without a model noticing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y = x Wᵀ + b.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in_features]. Returns: [rows, out_features]."""
        return F.linear(x, self._weight, self._bias)
