"""Architectures with mixtures of experts: one short function for each."""

from __future__ import annotations

import math

from msgspec.structs import replace

from stageline.checkpoint.architectures.common import (
    Reader,
    plain_spec,
    rope_spec,
    rope_values,
    with_windows,
)
from stageline.checkpoint.fields import Fields
from stageline.checkpoint.model_spec import MlaSpec, ModelSpec, MoeSpec
from stageline.errors import CheckpointError

# What transformers assumes where a config does not mention it.
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
LARGEST_NUM_EXPERTS = 1024


def _mixtral(fields: Fields) -> ModelSpec:
    """Llama with experts in every layer."""
    spec = plain_spec(fields, "mixtral")
    moe = MoeSpec(
        num_experts=_num_experts(fields, "num_local_experts", "num_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok", default=2),
        intermediate_size=spec.intermediate_size,
    )
    spec = with_windows(spec, fields, fields.optional_integer("sliding_window"), [True] * spec.num_layers)
    return with_experts(spec, fields, moe)


def _qwen2_moe(fields: Fields) -> ModelSpec:
    """Qwen2 with experts, and a gated MLP that all tokens share."""
    spec = replace(plain_spec(fields, "qwen2_moe"), attention_bias=fields.boolean("qkv_bias", True))
    moe = replace(
        _qwen_experts(fields, spec.num_layers),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
    )
    has_windows = fields.boolean("use_sliding_window", False)
    window = fields.optional_integer("sliding_window") if has_windows else None
    num_with_window = fields.integer("max_window_layers", default=spec.num_layers, lowest=0)
    kinds = [index % 2 == 0 and index < num_with_window for index in range(spec.num_layers)]
    return with_experts(with_windows(spec, fields, window, kinds), fields, moe)


def _qwen3_moe(fields: Fields) -> ModelSpec:
    """Qwen3 with experts."""
    has_bias = fields.boolean("attention_bias", False)
    spec = replace(plain_spec(fields, "qwen3_moe"), attention_bias=has_bias, attention_output_bias=has_bias)
    has_windows = fields.boolean("use_sliding_window", False)
    window = fields.optional_integer("sliding_window") if has_windows else None
    spec = with_windows(spec, fields, window, [True] * spec.num_layers)
    return with_experts(spec, fields, _qwen_experts(fields, spec.num_layers))


def _qwen_experts(fields: Fields, num_layers: int) -> MoeSpec:
    step = fields.integer("decoder_sparse_step", default=1)
    named = fields.raw("mlp_only_layers") or []
    if not isinstance(named, list) or any(not isinstance(index, int) for index in named):
        raise fields.error("mlp_only_layers", "a list of layer indices")
    return MoeSpec(
        num_experts=_num_experts(fields, "num_experts", "num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        normalizes_weights=fields.boolean("norm_topk_prob", False),
        dense_layers=tuple(index for index in range(num_layers) if index in named or (index + 1) % step),
    )


def _deepseek_v2(fields: Fields) -> ModelSpec:
    """Latent attention; experts are scored by softmax, and chosen from the groups with the best single experts."""
    method = fields.string("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"{fields.source}: topk_method {method!r} is not supported; supported are greedy and group_limited_greedy"
        )
    _refuse_other_value(fields, "scoring_func", "softmax")
    for key in ("norm_topk_prob", "mlp_bias"):
        if fields.boolean(key, False):
            raise CheckpointError(f"{fields.source}: {key} true is not supported for DeepSeek-V2, only false")
    is_grouped = method == "group_limited_greedy"
    moe = replace(
        _deepseek_experts(fields),
        normalizes_weights=False,
        num_groups=fields.integer("n_group") if is_grouped else 1,
        num_groups_per_token=fields.integer("topk_group") if is_grouped else 1,
    )
    return with_experts(_latent_attention(fields, "deepseek"), fields, moe)


def _deepseek_v3(fields: Fields) -> ModelSpec:
    """As V2, but scored by sigmoid, with a bias for choosing; a group's score is the sum of its two best."""
    _refuse_other_value(fields, "scoring_func", "sigmoid")
    _refuse_other_value(fields, "topk_method", "noaux_tc")
    moe = replace(
        _deepseek_experts(fields),
        normalizes_weights=fields.boolean("norm_topk_prob", True),
        scoring="sigmoid",
        num_groups=fields.integer("n_group", default=8),
        num_groups_per_token=fields.integer("topk_group", default=4),
        group_score_experts=2,
        has_selection_bias=True,
    )
    return with_experts(_latent_attention(fields, "deepseek"), fields, moe)


def _deepseek_experts(fields: Fields) -> MoeSpec:
    size = fields.integer("moe_intermediate_size")
    num_layers = fields.integer("num_hidden_layers")
    first = fields.integer("first_k_dense_replace", default=0, lowest=0)
    step = fields.integer("moe_layer_freq", default=1)
    return MoeSpec(
        num_experts=_num_experts(fields, "n_routed_experts", "num_local_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok"),
        intermediate_size=size,
        weight_factor=fields.number("routed_scaling_factor", default=1.0),
        shared_intermediate_size=size * fields.integer("n_shared_experts", default=0, lowest=0),
        dense_layers=tuple(index for index in range(num_layers) if index < first or index % step),
    )


def _latent_attention(fields: Fields, family: str) -> ModelSpec:
    mla = MlaSpec(
        q_lora_rank=fields.optional_integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
    )
    if mla.qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    num_heads = fields.integer("num_attention_heads")
    as_heads = {**fields.values, "head_dim": head_dim, "num_key_value_heads": num_heads}
    spec = plain_spec(Fields(as_heads, fields.source), family)
    has_bias = fields.boolean("attention_bias", False)
    return replace(
        spec,
        rope=replace(
            spec.rope,
            rotary_dim=mla.qk_rope_head_dim,
            pairs_neighbours=fields.boolean("rope_interleave", True),
        ),
        attention_scale=head_dim**-0.5 * _score_magnitude(rope_values(fields)),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mla=mla,
    )


def _score_magnitude(rope: Fields) -> float:
    """What DeepSeek multiplies attention scores by where YaRN stretches positions."""
    all_dim = rope.raw("mscale_all_dim")
    if not isinstance(all_dim, int | float) or not all_dim or not rope.has("factor"):
        return 1.0
    factor = rope.number("factor")
    return (0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def _gpt_oss(fields: Fields) -> ModelSpec:
    """Sinks in attention, every other layer with a window; experts with biases and a clamped activation."""
    has_rope = fields.has("rope_parameters") or fields.has("rope_scaling")
    values = rope_values(fields) if has_rope else Fields(GPT_OSS_ROPE, fields.source)
    has_bias = fields.boolean("attention_bias", False)
    without_rope = Fields({**fields.values, "rope_parameters": None, "rope_scaling": None}, fields.source)
    spec = replace(
        plain_spec(without_rope, "gpt_oss"),
        rope=rope_spec(fields, values=values),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        has_sinks=True,
    )
    moe = MoeSpec(
        num_experts=_num_experts(fields, "num_local_experts", "num_experts"),
        num_experts_per_token=fields.integer("num_experts_per_tok", default=fields.integer("experts_per_token", 4)),
        intermediate_size=spec.intermediate_size,
        has_bias=True,
        is_packed=True,
        activation="clamped_swiglu",
        swiglu_alpha=fields.number("swiglu_alpha", default=SWIGLU_ALPHA),
        swiglu_limit=fields.number("swiglu_limit", default=SWIGLU_LIMIT),
    )
    window = fields.integer("sliding_window")
    spec = with_windows(spec, fields, window, [index % 2 == 0 for index in range(spec.num_layers)])
    return with_experts(spec, fields, moe)


def _num_experts(fields: Fields, *keys: str) -> int:
    """The first of these keys that is there; `transformers` renamed some."""
    return fields.integer(next((key for key in keys if fields.has(key)), keys[0]))


def _refuse_other_value(fields: Fields, key: str, supported: str) -> None:
    if fields.has(key) and fields.raw(key) != supported:
        raise CheckpointError(
            f"{fields.source}: {key} {fields.raw(key)!r} is not supported for this architecture; supported is "
            f"{supported}"
        )


def with_experts(spec: ModelSpec, fields: Fields, moe: MoeSpec) -> ModelSpec:
    """Raises: CheckpointError if the numbers of experts and groups do not fit together."""
    if moe.num_experts > LARGEST_NUM_EXPERTS:
        raise CheckpointError(
            f"{fields.source}: {moe.num_experts} experts; at most {LARGEST_NUM_EXPERTS} are supported"
        )
    if moe.num_experts % moe.num_groups or moe.num_groups_per_token > moe.num_groups:
        raise CheckpointError(
            f"{fields.source}: {moe.num_experts} experts in {moe.num_groups} groups, of which "
            f"{moe.num_groups_per_token} are chosen: groups must be of equal size, and not more chosen than there are"
        )
    per_group = moe.num_experts // moe.num_groups
    if moe.num_experts_per_token > per_group * moe.num_groups_per_token or moe.group_score_experts > per_group:
        raise CheckpointError(
            f"{fields.source}: {moe.num_experts_per_token} experts per token cannot be chosen from "
            f"{moe.num_groups_per_token} groups of {per_group}"
        )
    return replace(spec, moe=moe)


READERS: dict[str, Reader] = {
    "MixtralForCausalLM": _mixtral,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "GptOssForCausalLM": _gpt_oss,
}
