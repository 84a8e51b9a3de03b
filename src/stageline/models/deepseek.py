"""DeepSeek-V2 and V3: latent attention; experts beside an MLP that all tokens share, on all but the first layers."""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionBackend
from stageline.attention.select import select_latent_backend
from stageline.checkpoint.model_spec import MlaSpec, ModelSpec
from stageline.layers.linear import Linear
from stageline.layers.mla import LatentAttention, LatentQueries
from stageline.layers.norm import RMSNorm
from stageline.layers.rotary import Rotary
from stageline.models.family import WeightReader
from stageline.models.llama import MLP, LlamaFamily
from stageline.models.read_experts import ExpertNames, read_moe
from stageline.models.read_linear import read_linear

NAMES = ExpertNames(shared="shared_experts")


class DeepseekFamily(LlamaFamily):
    """See `stageline.models.family`."""

    def __init__(self, spec: ModelSpec, reader: WeightReader, backend: AttentionBackend, max_model_len: int) -> None:
        super().__init__(spec, reader, backend, max_model_len)
        assert spec.mla is not None and spec.attention_scale is not None
        self._mla: MlaSpec = spec.mla
        self._scale: float = spec.attention_scale
        self._turning = Rotary(spec.rope, spec.mla.qk_rope_head_dim, max_model_len, reader.device)
        self._latent_backend = select_latent_backend(reader.device)

    def mlp(self, layer_index: int) -> MLP:
        if not self.spec.has_experts(layer_index):
            return super().mlp(layer_index)
        return read_moe(self.reader, self.spec, f"model.layers.{layer_index}.mlp", NAMES)

    def attention(self, layer_index: int) -> LatentAttention:
        spec, mla, reader = self.spec, self._mla, self.reader
        prefix = f"model.layers.{layer_index}.self_attn"
        up_size = mla.qk_nope_head_dim + mla.v_head_dim
        kv_up = reader.read(f"{prefix}.kv_b_proj.weight", (spec.num_heads * up_size, mla.kv_lora_rank))
        out = read_linear(
            reader, f"{prefix}.o_proj", spec.hidden_size, spec.num_heads * mla.v_head_dim, spec.attention_output_bias
        )
        inputs, queries = self._inputs(prefix)
        return LatentAttention(
            mla,
            spec.num_heads,
            inputs=inputs,
            queries=queries,
            row_norm=self._small_norm(f"{prefix}.kv_a_layernorm", mla.kv_lora_rank),
            kv_up=kv_up.view(spec.num_heads, up_size, mla.kv_lora_rank),
            out=out,
            rotary=self._turning,
            backend=self._latent_backend,
            scale=self._scale,
        )

    def _inputs(self, prefix: str) -> tuple[Linear, LatentQueries | None]:
        """The projections of a layer's input, side by side, and what makes queries of the first of them."""
        spec, mla, bias = self.spec, self._mla, self.spec.attention_bias
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        rows = self._rows_in_halves(f"{prefix}.kv_a_proj_with_mqa", 1, mla.row_size, spec.hidden_size, bias)
        if mla.q_lora_rank is None:
            queries = self._rows_in_halves(f"{prefix}.q_proj", spec.num_heads, head_dim, spec.hidden_size, False)
            return _side_by_side(queries, rows), None
        size = (mla.q_lora_rank, spec.hidden_size)
        down = self.reader.read(f"{prefix}.q_a_proj.weight", size)
        down_bias = self.reader.read(f"{prefix}.q_a_proj.bias", size[:1]) if bias else None
        up, _ = self._rows_in_halves(f"{prefix}.q_b_proj", spec.num_heads, head_dim, mla.q_lora_rank, False)
        norm = self._small_norm(f"{prefix}.q_a_layernorm", mla.q_lora_rank)
        return _side_by_side((down, down_bias), rows), LatentQueries(norm, Linear(up))

    def _rows_in_halves(
        self, name: str, num_heads: int, head_dim: int, in_features: int, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A projection to heads whose last numbers rotate: their pairs are neighbours in the file, and halves here."""
        weight = self.reader.read(f"{name}.weight", (num_heads * head_dim, in_features))
        bias = self.reader.read(f"{name}.bias", (num_heads * head_dim,)) if has_bias else None
        if not self.spec.rope.pairs_neighbours:
            return weight, bias
        turning = self._mla.qk_rope_head_dim
        places = torch.arange(head_dim)
        pairs = places[-turning:].view(-1, 2)
        places = torch.cat((places[:-turning], pairs[:, 0], pairs[:, 1]))
        order = (torch.arange(num_heads).unsqueeze(1) * head_dim + places).flatten().to(weight.device)
        return weight[order], None if bias is None else bias[order]

    def _small_norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.norm_weight(name, size), self.spec.rms_norm_eps)


def _side_by_side(*parts: tuple[torch.Tensor, torch.Tensor | None]) -> Linear:
    """Projections of one input as one; a part without a bias beside one that has it gets zeros."""
    biases = [torch.zeros_like(weight[:, 0]) if bias is None else bias for weight, bias in parts]
    has_bias = any(bias is not None for _, bias in parts)
    return Linear(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if has_bias else None)


FAMILY = DeepseekFamily
