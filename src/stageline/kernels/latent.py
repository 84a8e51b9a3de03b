"""Latent attention around its scores, as functions of tensors. Checked here, not in C++.

One idea: what every token's row and every head's query and value go through is four calls without torch between them,
so that a layer with latent attention can be recorded like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stageline.kernels.gemm import PANEL
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.program import Argument, Kernel, result

_POINTER, _SIZE, _FLAG, _TOKENS = Argument.POINTER, Argument.SIZE, Argument.FLAG, Argument.NUM_TOKENS
SIGNATURES: dict[str, list[Argument]] = {
    "store_latent_rows": [_POINTER] * 9 + [_TOKENS] + [_SIZE] * 5 + [Argument.FLOAT, _FLAG],
    "latent_queries": [_POINTER] * 6 + [_TOKENS] + [_SIZE] * 4 + [_FLAG] * 2,
    "latent_values": [_POINTER] * 3 + [_TOKENS] + [_SIZE] * 4 + [_FLAG] * 2,
}
RECORDABLE = tuple(SIGNATURES)

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each [positions, pairs that rotate]."""


@dataclass(frozen=True)
class PackedHeads:
    """A matrix for each head, [out_features, in_features], packed one behind the other."""

    panels: torch.Tensor
    num_heads: int
    out_features: int
    in_features: int


class LatentKernels:
    """One variant's functions. Args: functions: by name, as in SIGNATURES and `gemm.SIGNATURES`."""

    def __init__(self, functions: dict[str, Kernel]) -> None:
        self._store_rows = functions["store_latent_rows"]
        self._queries = functions["latent_queries"]
        self._values = functions["latent_values"]
        self._pack = functions["gemm_pack"]
        self._memory = HugePages()

    def pack(self, weights: torch.Tensor) -> PackedHeads:
        """weights: [num_heads, out_features, in_features], bfloat16 or float32, with an even number of in_features."""
        num_heads, out_features, in_features = weights.shape
        per_word = 2 if weights.dtype == torch.bfloat16 else 1
        assert in_features % 2 == 0 and weights.dtype in (torch.bfloat16, torch.float32)
        weights, steps = weights.contiguous(), in_features // per_word
        shape = (num_heads, -(-out_features // PANEL), steps, PANEL, per_word)
        panels, zeros = self._memory.empty(shape, weights.dtype), torch.zeros(steps, dtype=torch.int32)
        for head in range(num_heads):
            self._pack(weights[head].data_ptr(), panels[head].data_ptr(), zeros.data_ptr(), out_features, steps, False)
        return PackedHeads(panels, num_heads, out_features, in_features)

    def store_rows(
        self,
        inputs: torch.Tensor,
        row_norm: torch.Tensor,
        query_norm: torch.Tensor | None,
        eps: float,
        tables: Tables,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor | None:
        """Norm each token's compressed part, rotate the rest, and put both into its slot of the cache.

        Args:
            inputs: [tokens, numbers]: queries or what becomes of them, then a row of the cache.
            row_norm: the weight of the compressed part's norm.
            query_norm: that of a norm of the first numbers; None if they have none.
            positions, slots: int64 [tokens].
            cache: [num_blocks, 1, block_size, compressed and rotated numbers].
        Returns: the first numbers, normed, [tokens, size of query_norm]; None without a norm.
        """
        (tokens, width), row_size, rank = inputs.shape, cache.shape[3], row_norm.numel()
        half = (row_size - rank) // 2
        self._check(inputs, row_norm, cache, *tables)
        assert tables[0].shape[1] == half and rank + 2 * half == row_size <= width
        assert positions.shape == slots.shape == (tokens,) and positions.dtype == slots.dtype == torch.int64
        queries, query_rank = None, 0
        if query_norm is not None:
            self._check(inputs, query_norm)
            query_rank = query_norm.numel()
            queries = result((tokens, query_rank), inputs.dtype)
        self._store_rows(
            inputs.data_ptr(), row_norm.data_ptr(), None if query_norm is None else query_norm.data_ptr(),
            None if queries is None else queries.data_ptr(), tables[0].data_ptr(), tables[1].data_ptr(),
            positions.data_ptr(), slots.data_ptr(), cache.data_ptr(), tokens, width, width - row_size, rank, half,
            query_rank, eps, inputs.dtype == torch.bfloat16,
        )  # fmt: skip
        return queries

    def queries(
        self, x: torch.Tensor, key_up: PackedHeads, tables: Tables, positions: torch.Tensor, row_size: int
    ) -> torch.Tensor:
        """Each head's query in the space of the cache's rows.

        Args:
            x: [tokens, at least num_heads * (in_features + rotated numbers)]; only these are looked at, from the first.
            key_up: out_features is a row's compressed part.
        Returns: [tokens, num_heads, row_size].
        """
        tokens, half = x.shape[0], (row_size - key_up.out_features) // 2
        self._check(x, key_up.panels, *tables)
        assert x.shape[1] == key_up.num_heads * (key_up.in_features + 2 * half)
        assert positions.shape == (tokens,) and tables[0].shape[1] == half
        out = result((tokens, key_up.num_heads, row_size), x.dtype)
        self._queries(
            x.data_ptr(), key_up.panels.data_ptr(), tables[0].data_ptr(), tables[1].data_ptr(), positions.data_ptr(),
            out.data_ptr(), tokens, key_up.num_heads, key_up.in_features, key_up.out_features, half,
            torch.get_num_threads(), x.dtype == torch.bfloat16,
        )  # fmt: skip
        return out

    def values(self, attended: torch.Tensor, value_up: PackedHeads) -> torch.Tensor:
        """What each head's value matrix makes of what it attended to.

        Args: attended: [tokens, num_heads, row_size], of which the first in_features count.
        Returns: [tokens, num_heads * out_features].
        """
        tokens, num_heads, row_size = attended.shape
        self._check(attended, value_up.panels)
        assert num_heads == value_up.num_heads and value_up.in_features <= row_size and row_size % 2 == 0
        out = result((tokens, num_heads * value_up.out_features), attended.dtype)
        self._values(
            attended.data_ptr(), value_up.panels.data_ptr(), out.data_ptr(), tokens, num_heads, value_up.in_features,
            row_size, value_up.out_features, torch.get_num_threads(), attended.dtype == torch.bfloat16,
        )  # fmt: skip
        return out

    def _check(self, *tensors: torch.Tensor) -> None:
        assert all(tensor.dtype == tensors[0].dtype and tensor.is_contiguous() for tensor in tensors)
