"""Multi-head latent attention: the cache keeps one compressed row per token; every head's key and value come from it.

One idea: a key is a matrix times the compressed row, so its product with a query is the row's product with that
matrix's transpose times the query. Queries are brought into the rows' space, all heads attend to the rows as they lie
in the cache, as if it had one key head, and each head's value matrix is applied to what comes out.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.
"""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.checkpoint.model_spec import MlaSpec
from stageline.layers.linear import Linear
from stageline.layers.norm import RMSNorm
from stageline.layers.rotary import Rotary


class LatentQueries:
    """Queries of all heads, through a rank of their own: b(norm(a(x)))."""

    def __init__(self, norm: RMSNorm, up: Linear) -> None:
        self._norm = norm
        self._up = up

    def __call__(self, compressed: torch.Tensor) -> torch.Tensor:
        """compressed: [tokens, q_lora_rank]. Returns: [tokens, num_heads * head_dim]."""
        normed, _ = self._norm(compressed.contiguous())
        return self._up(normed)


class LatentAttention:
    """Causal self-attention over a cache of compressed rows.

    Args:
        inputs: fused projection of the layer's input: the queries, or what `queries` takes; then a token's row, its
            rotated part last.
        queries: None if `inputs` gives them.
        row_norm: of a row's compressed part.
        kv_up: [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]: what makes keys and values of rows.
        out: projection back to the hidden size.
        rotary: of the `qk_rope_head_dim` numbers that rotate.
        backend: of one key head, whose values are its keys.
        scale: of scores.
    """

    def __init__(
        self,
        spec: MlaSpec,
        num_heads: int,
        *,
        inputs: Linear,
        queries: LatentQueries | None,
        row_norm: RMSNorm,
        kv_up: torch.Tensor,
        out: Linear,
        rotary: Rotary,
        backend: AttentionBackend,
        scale: float,
    ) -> None:
        head_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        self._spec, self._num_heads, self._head_dim = spec, num_heads, head_dim
        self._input_sizes = [num_heads * head_dim if queries is None else spec.q_lora_rank or 0, spec.row_size]
        self._inputs, self._queries, self._row_norm, self._out = inputs, queries, row_norm, out
        self._key_up = kv_up[:, : spec.qk_nope_head_dim].contiguous()
        self._value_up = kv_up[:, spec.qk_nope_head_dim :].transpose(1, 2).contiguous()
        self._rotary, self._backend, self._scale = rotary, backend, scale

    def __call__(self, x: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: [tokens, hidden]; the tokens' rows are in the cache afterwards."""
        spec, num_tokens = self._spec, x.shape[0]
        queries, rows = torch.split(self._inputs(x), self._input_sizes, dim=-1)
        if self._queries is not None:
            queries = self._queries(queries)
        heads = queries.reshape(num_tokens, self._num_heads, self._head_dim)
        still, turning = heads[..., : spec.qk_nope_head_dim], heads[..., spec.qk_nope_head_dim :]
        compressed, row_turning = rows[:, : spec.kv_lora_rank], rows[:, spec.kv_lora_rank :]
        compressed, _ = self._row_norm(compressed.contiguous())
        turned = self._rotary(torch.cat((turning, row_turning.unsqueeze(1)), dim=1), metadata.positions)
        self._store(torch.cat((compressed, turned[:, -1]), dim=-1).unsqueeze(1), metadata, cache)
        in_row_space = torch.bmm(still.transpose(0, 1), self._key_up).transpose(0, 1)
        attended = self._backend.attend(
            torch.cat((in_row_space, turned[:, :-1]), dim=-1), metadata, cache, self._scale, None
        )
        values = torch.bmm(attended[..., : spec.kv_lora_rank].transpose(0, 1), self._value_up)
        return self._out(values.transpose(0, 1).reshape(num_tokens, -1))

    def _store(self, rows: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        self._backend.store(rows, rows, metadata, cache)
