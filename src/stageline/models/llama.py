"""Llama and the models that differ from it by facts of their spec only: Llama 2 and 3, SmolLM2 and 3, Mistral, Qwen2,
Granite 3. Windows, biases, layers without rotation, scales and caps are read from the spec here, once for all families.

Other families build on this one and replace what they have otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.checkpoint.tensor_shards import vocabulary_of
from stageline.layers.attention import Attention, AttentionShape
from stageline.layers.embedding import LMHead, TokenEmbedding
from stageline.layers.linear import GatedLinear, Linear
from stageline.layers.norm import QueryKeyNorm, RMSNorm
from stageline.layers.quantized_linear import QuantizedEmbedding
from stageline.layers.residual import scale_
from stageline.layers.rotary import Rotary
from stageline.layers.shared_vocabulary import SharedEmbedding, SharedProjection
from stageline.models.family import Block, Embedding, WeightReader
from stageline.models.read_linear import read_embedding, read_fused_linear, read_gated_linear, read_linear
from stageline.parallel.tensor_parallel import ALONE, TensorParallel

_EMBEDDING_NAME = "model.embed_tokens.weight"

MLP = Callable[[torch.Tensor], torch.Tensor]
"""From [tokens, hidden] to the same shape."""

SelfAttention = Callable[[torch.Tensor, AttentionMetadata, LayerCache], torch.Tensor]
"""The same, with a microbatch's metadata and the layer's cache."""

Sublayer = TypeVar("Sublayer", bound=Callable[..., torch.Tensor])


class LlamaFamily:
    """Builds Llama's parts; see `stageline.models.family`."""

    def __init__(
        self,
        spec: ModelSpec,
        reader: WeightReader,
        backend: AttentionBackend,
        max_model_len: int,
        ranks: TensorParallel = ALONE,
    ) -> None:
        self.spec = spec
        self.ranks = ranks
        self.reader = reader
        self.backend = backend
        self._max_model_len = max_model_len
        self._rotaries: dict[RopeSpec, Rotary] = {}
        self._embedding: TokenEmbedding | QuantizedEmbedding | None = None
        self._vocabulary = vocabulary_of(spec.vocab_size, ranks.rank, ranks.size)

    def embedding(self) -> Embedding:
        own = self._own_embedding()
        return own if self.ranks.size == 1 else SharedEmbedding(own, self._vocabulary, self.ranks)

    def _own_embedding(self) -> TokenEmbedding | QuantizedEmbedding:
        if self._embedding is None:
            spec, num_tokens = self.spec, len(self._vocabulary)
            self._embedding = read_embedding(
                self.reader, _EMBEDDING_NAME, num_tokens, spec.hidden_size, spec.embedding_scale
            )
        return self._embedding

    def whole(self, sublayer: Sublayer) -> Sublayer:
        """An attention or MLP of which every rank has a part, with the sum over ranks behind it."""
        if self.ranks.size == 1:
            return sublayer
        all_reduce = self.ranks.all_reduce
        return cast("Sublayer", lambda *inputs: all_reduce(sublayer(*inputs)))

    def block(self, layer_index: int) -> Block:
        prefix = f"model.layers.{layer_index}"
        return LlamaBlock(
            input_norm=self.norm(f"{prefix}.input_layernorm"),
            attention=self.whole(self.attention(layer_index)),
            post_attention_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.whole(self.mlp(layer_index)),
            residual_scale=self.spec.residual_scale,
        )

    def head(self) -> LMHead:
        spec = self.spec
        if spec.tie_word_embeddings:
            projection = self._own_embedding().as_projection()
        else:
            projection = read_linear(self.reader, "lm_head", len(self._vocabulary), spec.hidden_size)
        if self.ranks.size > 1:
            projection = SharedProjection(projection, self._vocabulary, spec.vocab_size, self.ranks)
        return LMHead(self.norm("model.norm"), projection, spec.logit_scale, spec.logit_cap)

    def norm(self, name: str) -> RMSNorm:
        """A norm of hidden states."""
        return RMSNorm(self.norm_weight(name, self.spec.hidden_size), self.spec.rms_norm_eps)

    def norm_weight(self, name: str, size: int) -> torch.Tensor:
        """What a norm multiplies by, [size]."""
        weight = self.reader.read(f"{name}.weight", (size,))
        return weight + 1 if self.spec.weights_norms_from_one else weight

    def attention(self, layer_index: int) -> SelfAttention:
        spec, prefix = self.spec, f"model.layers.{layer_index}.self_attn"
        shape = AttentionShape(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.window_of(layer_index),
            spec.attention_scale,
            spec.attention_cap,
        )
        size = shape.qkv_sizes[0]
        out = read_linear(self.reader, f"{prefix}.o_proj", spec.hidden_size, size, spec.attention_output_bias)
        rotary = self._rotary(spec.rope_of(layer_index))
        norm = self.query_key_norm(prefix, shape)
        sinks = self.reader.read_float32(f"{prefix}.sinks", (spec.num_heads,)) if spec.has_sinks else None
        return Attention(shape, self.qkv(prefix, shape), out, rotary, self.backend, norm, sinks)

    def qkv(self, prefix: str, shape: AttentionShape) -> Linear:
        """The projections to queries, keys and values, side by side."""
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        return read_fused_linear(self.reader, names, shape.qkv_sizes, self.spec.hidden_size, self.spec.attention_bias)

    def query_key_norm(self, prefix: str, shape: AttentionShape) -> QueryKeyNorm | None:
        """The norm of queries and keys in front of their rotation, if the family has one."""
        return None

    def mlp(self, layer_index: int) -> MLP:
        spec, prefix = self.spec, f"model.layers.{layer_index}.mlp"
        hidden, size = spec.hidden_size, spec.intermediate_size
        down = read_linear(self.reader, f"{prefix}.down_proj", hidden, size, spec.mlp_bias)
        return LlamaMLP(self.gated(prefix), down)

    def gated(self, prefix: str) -> GatedLinear:
        """The first half of the MLP."""
        spec = self.spec
        return read_gated_linear(
            self.reader,
            f"{prefix}.gate_proj",
            f"{prefix}.up_proj",
            spec.intermediate_size,
            spec.hidden_size,
            spec.mlp_bias,
            spec.activation,
        )

    def _rotary(self, rope: RopeSpec | None) -> Rotary | None:
        """One table of positions for all layers that rotate alike."""
        if rope is None:
            return None
        if rope not in self._rotaries:
            self._rotaries[rope] = Rotary(rope, self.spec.head_dim, self._max_model_len, self.reader.device)
        return self._rotaries[rope]


class LlamaMLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, gated: GatedLinear, down: Linear) -> None:
        self._gated = gated
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: the same shape."""
        return self._down(self._gated(x))


class LlamaBlock:
    """Attention, then MLP, each behind a norm and around it a residual connection.

    Args:
        residual_scale: what both are multiplied by before they are added to the residual stream.
    """

    def __init__(
        self,
        input_norm: RMSNorm,
        attention: SelfAttention,
        post_attention_norm: RMSNorm,
        mlp: MLP,
        residual_scale: float = 1.0,
    ) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._post_attention_norm = post_attention_norm
        self._mlp = mlp
        self._residual_scale = residual_scale

    def __call__(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        metadata: AttentionMetadata,
        cache: LayerCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `stageline.models.family.Block`."""
        normed, residual = self._input_norm(hidden_states, residual)
        attended = scale_(self._attention(normed, metadata, cache), self._residual_scale)
        normed, residual = self._post_attention_norm(attended, residual)
        return scale_(self._mlp(normed), self._residual_scale), residual


FAMILY = LlamaFamily
