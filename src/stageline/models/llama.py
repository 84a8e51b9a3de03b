"""Llama and the models built like it: Llama 2 and 3, SmolLM2, Mistral (sliding window), Qwen2 (biases on q, k, v)."""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.checkpoint.model_spec import ModelSpec
from stageline.layers.attention import Attention, AttentionShape
from stageline.layers.embedding import LMHead, TokenEmbedding
from stageline.layers.linear import GatedLinear, Linear
from stageline.layers.norm import RMSNorm
from stageline.layers.quantized_linear import QuantizedEmbedding
from stageline.layers.rotary import Rotary
from stageline.models.family import WeightReader
from stageline.models.read_linear import read_embedding, read_fused_linear, read_gated_linear, read_linear

_EMBEDDING_NAME = "model.embed_tokens.weight"


class LlamaFamily:
    """Builds Llama's parts; see `stageline.models.family`."""

    def __init__(self, spec: ModelSpec, reader: WeightReader, backend: AttentionBackend, max_model_len: int) -> None:
        self._spec = spec
        self._reader = reader
        self._backend = backend
        self._rotary = Rotary(spec.rope, spec.head_dim, max_model_len, reader.device)
        self._embedding: TokenEmbedding | QuantizedEmbedding | None = None

    def embedding(self) -> TokenEmbedding | QuantizedEmbedding:
        if self._embedding is None:
            spec = self._spec
            self._embedding = read_embedding(self._reader, _EMBEDDING_NAME, spec.vocab_size, spec.hidden_size)
        return self._embedding

    def block(self, layer_index: int) -> LlamaBlock:
        prefix = f"model.layers.{layer_index}"
        return LlamaBlock(
            input_norm=self._norm(f"{prefix}.input_layernorm"),
            attention=self._attention(f"{prefix}.self_attn"),
            post_attention_norm=self._norm(f"{prefix}.post_attention_layernorm"),
            mlp=self._mlp(f"{prefix}.mlp"),
        )

    def head(self) -> LMHead:
        spec = self._spec
        if spec.tie_word_embeddings:
            projection = self.embedding().as_projection()
        else:
            projection = read_linear(self._reader, "lm_head", spec.vocab_size, spec.hidden_size)
        return LMHead(self._norm("model.norm"), projection)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._reader.read(f"{name}.weight", (self._spec.hidden_size,)), self._spec.rms_norm_eps)

    def _attention(self, prefix: str) -> Attention:
        spec, reader = self._spec, self._reader
        shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.sliding_window)
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        qkv = read_fused_linear(reader, names, shape.qkv_sizes, spec.hidden_size, spec.attention_bias)
        out = read_linear(
            reader, f"{prefix}.o_proj", spec.hidden_size, shape.qkv_sizes[0], spec.attention_output_bias
        )
        return Attention(shape, qkv, out, self._rotary, self._backend)

    def _mlp(self, prefix: str) -> LlamaMLP:
        spec, reader = self._spec, self._reader
        hidden, size = spec.hidden_size, spec.intermediate_size
        gated = read_gated_linear(reader, f"{prefix}.gate_proj", f"{prefix}.up_proj", size, hidden, spec.mlp_bias)
        return LlamaMLP(gated, read_linear(reader, f"{prefix}.down_proj", hidden, size, spec.mlp_bias))


class LlamaMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gated: GatedLinear, down: Linear) -> None:
        self._gated = gated
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: the same shape."""
        return self._down(self._gated(x))


class LlamaBlock:
    """Attention, then MLP, each behind a norm and around it a residual connection."""

    def __init__(self, input_norm: RMSNorm, attention: Attention, post_attention_norm: RMSNorm, mlp: LlamaMLP) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._post_attention_norm = post_attention_norm
        self._mlp = mlp

    def __call__(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        metadata: AttentionMetadata,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `stageline.models.family.Block`."""
        normed, residual = self._input_norm(hidden_states, residual)
        attended = self._attention(normed, metadata, cache)
        normed, residual = self._post_attention_norm(attended, residual)
        return self._mlp(normed), residual


FAMILY = LlamaFamily
