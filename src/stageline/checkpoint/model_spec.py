"""The shape of a decoder-only model, as facts that do not depend on where they were read."""

from __future__ import annotations

import msgspec


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary position embedding.

    Args:
        theta: base of the frequencies.
        kind: "default", "linear" (positions divided by `factor`), "llama3" (frequency bands, Llama 3.1 and later),
            "longrope" (Phi: a divisor per frequency) or "yarn" (a ramp from kept to divided frequencies).
        beta_fast, beta_slow: "yarn": rotations within the original length from which on frequencies are kept, and up to
            which they are divided by `factor`.
        rounds_ramp: "yarn": the ramp begins and ends at whole frequencies.
        rotary_dim: the leading numbers of a head that rotate; 0 for all.
        frequency_divisors: [rotary_dim / 2] divisors; those of a GGUF file (`rope_freqs.weight`) override `kind`. With
            "longrope", the divisors of a model that serves more than `original_max_position_embeddings` tokens.
        short_divisors: "longrope" up to that length.
        pairs_neighbours: whether files hold queries and keys with the two numbers of a rotated pair side by side.
        magnitude: cosines and sines are multiplied by this.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_divisors: tuple[float, ...] = ()
    short_divisors: tuple[float, ...] = ()
    magnitude: float = 1.0
    rotary_dim: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds_ramp: bool = True
    pairs_neighbours: bool = False


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of a layer's MLP.

    Args:
        intermediate_size: of one routed expert.
        num_experts_per_token: how many experts compute each token.
        normalizes_weights: whether the chosen experts' weights are scaled to sum to one.
        scoring: "softmax" or "sigmoid" over the router's logits.
        num_groups, num_groups_per_token: experts are chosen from the best groups only; 1 and 1 is no grouping.
        group_score_experts: how many of a group's best experts are added up to its score.
        weight_factor: all chosen experts' weights are multiplied by this.
        has_selection_bias: whether a bias takes part in choosing experts, but not in weighting them.
        shared_intermediate_size: of an MLP that computes every token besides; 0 is none.
        has_shared_gate: whether a sigmoid gate weights that MLP's output.
        dense_layers: indices of layers that have an ordinary MLP of the model's `intermediate_size`.
        has_bias: router, gate, up and down have biases.
        is_packed: whether files hold all experts' matrices in one tensor, transposed, with gate and up in turn.
        activation: "silu", or "clamped_swiglu" (gpt-oss): with gate at most `swiglu_limit` and up within ± that,
            gate * sigmoid(swiglu_alpha * gate) * (up + 1).
        is_dealt: whether ranks that share the layer have whole experts, equally many each, as the operator may ask;
            otherwise each has a part of every expert.
        own_experts: of a rank that was dealt some, the first and the one behind the last; None for all.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalizes_weights: bool = True
    scoring: str = "softmax"
    num_groups: int = 1
    num_groups_per_token: int = 1
    weight_factor: float = 1.0
    has_selection_bias: bool = False
    shared_intermediate_size: int = 0
    has_shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    group_score_experts: int = 1
    has_bias: bool = False
    is_packed: bool = False
    activation: str = "silu"
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    is_dealt: bool = False
    own_experts: tuple[int, int] | None = None

    @property
    def own(self) -> range:
        """The experts whose weights are there."""
        return range(self.num_experts) if self.own_experts is None else range(*self.own_experts)


class MlaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: the cache keeps one compressed row per token, shared by all heads.

    Args:
        q_lora_rank: rank that queries pass through; None if they are projected at once.
        kv_lora_rank: numbers of the compressed row, to which `qk_rope_head_dim` rotated ones are added.
        qk_nope_head_dim: numbers of a head's query and key that are not rotated.
        is_split: whether files hold what makes keys and values of the row in two tensors, the first transposed.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    is_split: bool = False

    @property
    def row_size(self) -> int:
        """Numbers that the cache keeps of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only transformer.

    Args:
        family: key of `stageline.models.registry`, such as "llama".
        dtype: the checkpoint's own: "float32", "bfloat16" or "float16".
        sliding_window: tokens a token attends to (itself included), or None for all before it.
        layer_windows: that for each layer where layers differ; empty if `sliding_window` holds for all.
        window_rope: of layers with a window, where it is another than `rope`.
        unrotated_layers: indices of layers without rotary embedding.
        activation: of the gated MLP: "silu" or "gelu_tanh".
        attention_scale: what products of queries and keys are multiplied by; None for 1 / sqrt(head_dim).
        attention_cap, logit_cap: attention scores and logits are bent to stay within ± this (cap * tanh(x / cap)).
        embedding_scale, residual_scale, logit_scale: factors on the embedding's rows, on what a sublayer adds to the
            residual stream, and on the logits.
        weights_norms_from_one: norms multiply by 1 + weight. False for a file whose weights have the 1 in them.
        has_sinks: each head has a score that no key stands behind and that takes part in its softmax.
        moe: mixture of experts, None for a dense model.
        mla: latent attention, None for ordinary heads.
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
    layer_windows: tuple[int | None, ...] = ()
    window_rope: RopeSpec | None = None
    unrotated_layers: tuple[int, ...] = ()
    activation: str = "silu"
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    weights_norms_from_one: bool = False
    has_sinks: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def window_of(self, layer_index: int) -> int | None:
        """Tokens that a token of this layer attends to, itself included; None for all before it."""
        return self.layer_windows[layer_index] if self.layer_windows else self.sliding_window

    def rope_of(self, layer_index: int) -> RopeSpec | None:
        """How positions rotate this layer's queries and keys; None if they do not."""
        if layer_index in self.unrotated_layers:
            return None
        has_window = self.window_of(layer_index) is not None
        return self.window_rope if has_window and self.window_rope is not None else self.rope

    def has_experts(self, layer_index: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.moe is not None and layer_index not in self.moe.dense_layers
