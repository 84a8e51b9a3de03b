"""Linear layers, embedding and LM head over weights that stay quantised; the dense ones' places in a model.

One idea: what the projections of one input give stands side by side, so a run of quantised matrices, of whatever types,
is one call of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline import kernels
from stageline.kernels.quantized import QuantizedMatrix, QuantizedProduct
from stageline.layers.norm import RMSNorm


def _product(
    matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, bias: torch.Tensor | None = None
) -> QuantizedProduct:
    library = kernels.library(torch.device("cpu"), dtype)
    return QuantizedProduct(None if library is None else library.quantized_linear, matrices, bias)


class QuantizedLinear:
    """y = x Wᵀ + b, rounded to the compute dtype once.

    Args:
        matrices: the rows of W, one below the other; each may be of another type.
        dtype: the compute dtype.
        bias: [out_features] or None.
    """

    def __init__(
        self, matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, bias: torch.Tensor | None = None
    ) -> None:
        self._product = _product(matrices, dtype, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in_features]. Returns: [rows, out_features]."""
        return self._product(x, x.dtype)


class QuantizedEmbedding:
    """Looks up a row per token and makes only these rows floating-point.

    Args:
        matrix: [vocab, hidden].
        dtype: the compute dtype.
    """

    def __init__(self, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
        self.matrix = matrix
        self._dtype = dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [tokens] int64. Returns: [tokens, hidden]."""
        return self.matrix.rows(token_ids).to(self._dtype)


class QuantizedLMHead:
    """Final norm and projection onto the vocabulary.

    Args:
        matrix: [vocab, hidden]; the embedding's own if they are tied.
        dtype: the compute dtype.
    """

    def __init__(self, norm: RMSNorm, matrix: QuantizedMatrix, dtype: torch.dtype) -> None:
        self._norm = norm
        self._product = _product([matrix], dtype)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden], residual already added. Returns: float32 logits [rows, vocab]."""
        normed, _ = self._norm(hidden_states)
        return self._product(normed, torch.float32)
