"""Multi-head latent attention: the cache keeps one compressed row per token; every head's key and value come from it.

One idea: a key is a matrix times the compressed row, so its product with a query is the row's product with that
matrix's transpose times the query. Queries are brought into the rows' space, all heads attend to the rows as they lie
in the cache, as if it had one key head, and each head's value matrix is applied to what comes out.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stageline import kernels
from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.attention.latent import KernelLatentAttention
from stageline.attention.torch_paged import TorchPagedAttention
from stageline.checkpoint.model_spec import MlaSpec
from stageline.kernels.cpu import CpuKernels
from stageline.layers.linear import Linear
from stageline.layers.norm import RMSNorm
from stageline.layers.rotary import Rotary


@dataclass(frozen=True)
class LatentWeights:
    """What one layer has beside its linear layers.

    Args:
        row_norm: [kv_lora_rank], weight of the norm of a row's compressed part.
        query_norm: [q_lora_rank], that of the norm in front of the projection to queries; None if there is none.
        eps: of both norms.
        key_up: [num_heads, qk_nope_head_dim, kv_lora_rank]: what makes keys of rows.
        value_up: [num_heads, v_head_dim, kv_lora_rank]: what makes values of rows.
    """

    row_norm: torch.Tensor
    query_norm: torch.Tensor | None
    eps: float
    key_up: torch.Tensor
    value_up: torch.Tensor


class LatentScores:
    """Attends to rows; one for all layers of a stage, because what it keeps between layers saves time."""

    def __init__(self, spec: MlaSpec, device: torch.device, dtype: torch.dtype) -> None:
        sizes = spec.kv_lora_rank, spec.qk_nope_head_dim, spec.v_head_dim
        library = kernels.library(device, dtype)
        self.library: CpuKernels | None = library if all(size % 2 == 0 for size in sizes) else None
        self.torch = TorchPagedAttention(device)
        self.kernel = None if self.library is None else KernelLatentAttention(self.library)


class LatentAttention:
    """Causal self-attention over a cache of compressed rows.

    Args:
        inputs: fused projection of the layer's input: what the norm in front of `queries` takes, if there is one; then
            a token's row, its rotated part last.
        queries: to all heads' queries, of what was normed, or else of the layer's input.
        out: projection back to the hidden size.
        rotary: of the `qk_rope_head_dim` numbers that rotate.
        scale: of scores.
    """

    def __init__(
        self,
        spec: MlaSpec,
        *,
        inputs: Linear,
        queries: Linear,
        weights: LatentWeights,
        out: Linear,
        rotary: Rotary,
        scores: LatentScores,
        scale: float,
    ) -> None:
        self._inputs, self._queries, self._out = inputs, queries, out
        self._way: _ByKernels | _ByTorch
        if scores.library is not None and scores.kernel is not None:
            self._way = _ByKernels(spec, weights, rotary, scores.library, scores.kernel, scale)
        else:
            self._way = _ByTorch(spec, weights, rotary, scores.torch, scale)

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: [tokens, hidden]; the tokens' rows are in the cache afterwards."""
        normed = self._way.store(self._inputs(x), metadata, cache)
        queries = self._queries(x if normed is None else normed)
        return self._out(self._way.attend(queries, metadata, cache))


class _ByKernels:
    def __init__(
        self,
        spec: MlaSpec,
        weights: LatentWeights,
        rotary: Rotary,
        library: CpuKernels,
        scores: KernelLatentAttention,
        scale: float,
    ) -> None:
        self._row_size, self._rotary, self._eps = spec.row_size, rotary, weights.eps
        self._row_norm, self._query_norm = weights.row_norm, weights.query_norm
        self._kernels, self._scores, self._scale = library.latent, scores, scale
        self._key_up = library.latent.pack(weights.key_up.transpose(1, 2))
        self._value_up = library.latent.pack(weights.value_up)

    def store(self, inputs: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> torch.Tensor | None:
        tables = self._rotary.tables(inputs.dtype)
        return self._kernels.store_rows(
            inputs, self._row_norm, self._query_norm, self._eps, tables, metadata.positions, metadata.slot_mapping,
            cache.keys,
        )  # fmt: skip

    def attend(self, queries: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> torch.Tensor:
        tables = self._rotary.tables(queries.dtype)
        in_row_space = self._kernels.queries(queries, self._key_up, tables, metadata.positions, self._row_size)
        attended = self._scores.attend(in_row_space, metadata, cache, self._scale)
        return self._kernels.values(attended, self._value_up)


class _ByTorch:
    def __init__(
        self, spec: MlaSpec, weights: LatentWeights, rotary: Rotary, scores: TorchPagedAttention, scale: float
    ) -> None:
        self._spec, self._rotary, self._scores, self._scale = spec, rotary, scores, scale
        self._row_norm = RMSNorm(weights.row_norm, weights.eps)
        self._query_norm = None if weights.query_norm is None else RMSNorm(weights.query_norm, weights.eps)
        self._key_up = weights.key_up
        self._value_up = weights.value_up.transpose(1, 2)

    def store(self, inputs: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> torch.Tensor | None:
        spec = self._spec
        rows = inputs[:, -spec.row_size :]
        compressed, _ = self._row_norm(rows[:, : spec.kv_lora_rank].contiguous())
        turned = self._rotary(rows[:, None, spec.kv_lora_rank :], metadata.positions)
        stored = torch.cat((compressed.unsqueeze(1), turned), dim=-1)
        self._scores.store(stored, stored, metadata, cache)
        if self._query_norm is None:
            return None
        normed, _ = self._query_norm(inputs[:, : -spec.row_size].contiguous())
        return normed

    def attend(self, queries: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> torch.Tensor:
        spec, num_heads = self._spec, self._key_up.shape[0]
        heads = queries.view(queries.shape[0], num_heads, -1)
        still, turning = heads[..., : spec.qk_nope_head_dim], heads[..., spec.qk_nope_head_dim :]
        in_row_space = torch.bmm(still.transpose(0, 1), self._key_up).transpose(0, 1)
        turned = self._rotary(turning, metadata.positions)
        rows = torch.cat((in_row_space, turned), dim=-1)
        attended = self._scores.attend(rows, metadata, cache, self._scale, None)
        values = torch.bmm(attended[..., : spec.kv_lora_rank].transpose(0, 1), self._value_up)
        return values.transpose(0, 1).flatten(1)
