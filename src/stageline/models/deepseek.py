"""DeepSeek-V2 and V3: latent attention; experts beside an MLP that all tokens share, on all but the first layers."""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionBackend
from stageline.checkpoint.model_spec import MlaSpec, ModelSpec
from stageline.kernels.quantized import QuantizedMatrix
from stageline.layers.linear import Linear
from stageline.layers.mla import LatentAttention, LatentScores, LatentWeights
from stageline.layers.rotary import Rotary
from stageline.models.family import WeightReader
from stageline.models.llama import MLP, LlamaFamily
from stageline.models.read_experts import ExpertNames, read_moe
from stageline.models.read_linear import fused_linear, read_linear
from stageline.parallel.tensor_parallel import ALONE, TensorParallel

NAMES = ExpertNames(shared="shared_experts")


class DeepseekFamily(LlamaFamily):
    """See `stageline.models.family`."""

    def __init__(
        self,
        spec: ModelSpec,
        reader: WeightReader,
        backend: AttentionBackend,
        max_model_len: int,
        ranks: TensorParallel = ALONE,
    ) -> None:
        super().__init__(spec, reader, backend, max_model_len, ranks)
        assert spec.mla is not None and spec.attention_scale is not None
        self._mla: MlaSpec = spec.mla
        self._scale: float = spec.attention_scale
        self._turning = Rotary(spec.rope, spec.mla.qk_rope_head_dim, max_model_len, reader.device)
        self._scores = LatentScores(spec.mla, reader.device, reader.dtype)

    def mlp(self, layer_index: int) -> MLP:
        if not self.spec.has_experts(layer_index):
            return super().mlp(layer_index)
        return read_moe(self.reader, self.spec, f"model.layers.{layer_index}.mlp", NAMES)

    def attention(self, layer_index: int) -> LatentAttention:
        spec, mla, reader = self.spec, self._mla, self.reader
        prefix = f"model.layers.{layer_index}.self_attn"
        out = read_linear(
            reader, f"{prefix}.o_proj", spec.hidden_size, spec.num_heads * mla.v_head_dim, spec.attention_output_bias
        )
        inputs, queries = self._projections(prefix)
        return LatentAttention(
            mla,
            inputs=inputs,
            queries=queries,
            weights=self._latent_weights(prefix),
            out=out,
            rotary=self._turning,
            scores=self._scores,
            scale=self._scale,
        )

    def _latent_weights(self, prefix: str) -> LatentWeights:
        mla, has_query_norm = self._mla, self._mla.q_lora_rank is not None
        key_up, value_up = self._from_rows(prefix)
        return LatentWeights(
            row_norm=self.norm_weight(f"{prefix}.kv_a_layernorm", mla.kv_lora_rank),
            query_norm=self.norm_weight(f"{prefix}.q_a_layernorm", mla.q_lora_rank or 0) if has_query_norm else None,
            eps=self.spec.rms_norm_eps,
            key_up=key_up.contiguous(),
            value_up=value_up.contiguous(),
        )

    def _from_rows(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Each head's matrices from the compressed row to its keys and its values: [heads, numbers, kv_lora_rank]."""
        mla, num_heads, read = self._mla, self.spec.num_heads, self.reader.read
        if mla.is_split:
            keys = read(f"{prefix}.k_b_proj.weight", (num_heads, mla.kv_lora_rank, mla.qk_nope_head_dim))
            values = read(f"{prefix}.v_b_proj.weight", (num_heads, mla.v_head_dim, mla.kv_lora_rank))
            return keys.transpose(1, 2), values
        size = mla.qk_nope_head_dim + mla.v_head_dim
        up = read(f"{prefix}.kv_b_proj.weight", (num_heads * size, mla.kv_lora_rank))
        keys, values = up.view(num_heads, size, -1).split_with_sizes([mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
        return keys, values

    def _projections(self, prefix: str) -> tuple[Linear, Linear]:
        """What the layer's input goes through first, side by side, and what gives queries."""
        spec, mla, reader = self.spec, self._mla, self.reader
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        row_name, down_name = f"{prefix}.kv_a_proj_with_mqa", f"{prefix}.q_a_proj"
        inputs = [self._rows_in_halves(row_name, 1, mla.row_size, spec.hidden_size)]
        biases = [self._bias_in_halves(row_name, 1, mla.row_size)] if spec.attention_bias else []
        if mla.q_lora_rank is None:
            queries = self._rows_in_halves(f"{prefix}.q_proj", spec.num_heads, head_dim, spec.hidden_size)
        else:
            queries = self._rows_in_halves(f"{prefix}.q_b_proj", spec.num_heads, head_dim, mla.q_lora_rank)
            inputs.insert(0, reader.read_matrix(f"{down_name}.weight", (mla.q_lora_rank, spec.hidden_size)))
            if biases:
                biases.insert(0, reader.read(f"{down_name}.bias", (mla.q_lora_rank,)))
        return fused_linear(inputs, biases, reader.dtype), fused_linear([queries], [], reader.dtype)

    def _rows_in_halves(
        self, name: str, num_heads: int, head_dim: int, in_features: int
    ) -> torch.Tensor | QuantizedMatrix:
        """A projection to heads whose last numbers rotate: their pairs are neighbours in the file, and halves here."""
        weight = self.reader.read_matrix(f"{name}.weight", (num_heads * head_dim, in_features))
        order = self._halves(num_heads, head_dim)
        if isinstance(weight, torch.Tensor):
            return weight if order is None else weight[order.to(weight.device)]
        if order is not None:
            weight.reorder_rows(order)
        return weight

    def _bias_in_halves(self, name: str, num_heads: int, head_dim: int) -> torch.Tensor:
        bias, order = self.reader.read(f"{name}.bias", (num_heads * head_dim,)), self._halves(num_heads, head_dim)
        return bias if order is None else bias[order.to(bias.device)]

    def _halves(self, num_heads: int, head_dim: int) -> torch.Tensor | None:
        """Which of a projection's rows comes at each place; None if they stay as they are."""
        if not self.spec.rope.pairs_neighbours:
            return None
        turning = self._mla.qk_rope_head_dim
        places = torch.arange(head_dim)
        pairs = places[-turning:].view(-1, 2)
        places = torch.cat((places[:-turning], pairs[:, 0], pairs[:, 1]))
        return (torch.arange(num_heads).unsqueeze(1) * head_dim + places).flatten()


FAMILY = DeepseekFamily
