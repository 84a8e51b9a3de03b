"""The shape of a decoder-only model, as facts that do not depend on where they were read."""

from __future__ import annotations

import msgspec


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding.

    Args:
        theta: base of the frequencies.
        kind: "default", "linear" (positions divided by `factor`) or "llama3" (frequency bands, Llama 3.1 and later).
        frequency_divisors: [head_dim / 2] divisors given by a GGUF file (`rope_freqs.weight`); overrides `kind`.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_divisors: tuple[float, ...] = ()


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only transformer.

    Args:
        family: key of `stageline.models.registry`, such as "llama".
        dtype: the checkpoint's own: "float32", "bfloat16" or "float16".
        sliding_window: tokens a token attends to (itself included), or None for all before it.
        eos_token_ids: any of them ends a completion.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
