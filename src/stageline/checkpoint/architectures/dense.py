"""Architectures without experts: one short function for each."""

from __future__ import annotations

from msgspec.structs import replace

from stageline.checkpoint.architectures.common import (
    Reader,
    activation,
    plain_spec,
    rope_spec,
    rope_values,
    with_windows,
)
from stageline.checkpoint.fields import Fields
from stageline.checkpoint.model_spec import ModelSpec

GEMMA3_WINDOW_PATTERN = 6
PHI3_LONGROPE = ("su", "yarn")
_NO_ROPE: dict[str, object] = {"rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None}


def _llama(fields: Fields) -> ModelSpec:
    has_bias = fields.boolean("attention_bias", False)
    return replace(
        plain_spec(fields, "llama"),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _mistral(fields: Fields) -> ModelSpec:
    spec = plain_spec(fields, "llama")
    return with_windows(spec, fields, fields.optional_integer("sliding_window"), [True] * spec.num_layers)


def _qwen2(fields: Fields) -> ModelSpec:
    """Biases on q, k and v only; windows, if at all, on the layers from `max_window_layers` on."""
    return _with_qwen_windows(replace(plain_spec(fields, "llama"), attention_bias=True), fields)


def _qwen3(fields: Fields) -> ModelSpec:
    has_bias = fields.boolean("attention_bias", False)
    spec = replace(plain_spec(fields, "qwen3"), attention_bias=has_bias, attention_output_bias=has_bias)
    return _with_qwen_windows(spec, fields)


def _with_qwen_windows(spec: ModelSpec, fields: Fields) -> ModelSpec:
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", default=0, lowest=0)
    return with_windows(spec, fields, window, [index >= first for index in range(spec.num_layers)])


def _gemma2(fields: Fields) -> ModelSpec:
    """Even layers have a window, and scores a cap. (Gemma 3's configs name a cap that nobody computes.)"""
    cap = _optional_number(fields, "attn_logit_softcapping")
    spec = replace(_gemma(fields, "gemma2"), rope=rope_spec(fields), attention_cap=cap)
    window = fields.integer("sliding_window")
    return with_windows(spec, fields, window, [index % 2 == 0 for index in range(spec.num_layers)])


def _gemma3(fields: Fields) -> ModelSpec:
    """All but every sixth layer have a window, and frequencies of their own."""
    full = rope_spec(fields, 1_000_000.0, rope_values(fields, "full_attention"))
    values = rope_values(fields, "sliding_attention")
    if fields.has("rope_parameters"):
        local = rope_spec(fields, 10_000.0, values)
    else:
        local_theta = fields.number("rope_local_base_freq", default=10_000.0)
        local = rope_spec(fields, values=Fields({"rope_theta": local_theta}, values.source))
    spec = replace(_gemma(fields, "gemma3"), rope=full, window_rope=local)
    window = fields.integer("sliding_window")
    pattern = fields.integer("sliding_window_pattern", default=GEMMA3_WINDOW_PATTERN)
    return with_windows(spec, fields, window, [(index + 1) % pattern != 0 for index in range(spec.num_layers)])


def _gemma(fields: Fields, family: str) -> ModelSpec:
    """What both have: a scaled embedding, tied; norms that multiply by 1 + weight; scaled scores, capped logits."""
    act = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    spec = plain_spec(_with(fields, hidden_act="silu", rope_parameters=None, rope_scaling=None), family)
    has_bias = fields.boolean("attention_bias", False)
    return replace(
        spec,
        activation=activation(fields, act, ("gelu_tanh",)),
        attention_bias=has_bias,
        attention_output_bias=has_bias,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logit_cap=_optional_number(fields, "final_logit_softcapping"),
        embedding_scale=spec.hidden_size**0.5,
        weights_norms_from_one=True,
    )


def _phi3(fields: Fields) -> ModelSpec:
    """Phi 3, 3.5 and 4: q, k, v in one matrix, gate and up in another; LongRoPE has had two other names."""
    values = rope_values(fields)
    if (values.raw("rope_type") or values.raw("type")) in PHI3_LONGROPE:
        values = _with(values, rope_type="longrope")
    rope = rope_spec(fields, values=values, can_be_partial=True)
    spec = replace(plain_spec(_with(fields, **_NO_ROPE), "phi3"), rope=rope)
    window = fields.optional_integer("sliding_window")
    return with_windows(spec, fields, window, [True] * spec.num_layers)


def _glm4(fields: Fields) -> ModelSpec:
    """Gate and up in one matrix, norms before and behind, pairs of neighbours rotate in half of each head."""
    return replace(
        plain_spec(_with(fields, **_NO_ROPE), "glm4"),
        rope=replace(rope_spec(fields, can_be_partial=True), pairs_neighbours=True),
        attention_bias=fields.boolean("attention_bias", False),
    )


def _olmo2(fields: Fields) -> ModelSpec:
    has_bias = fields.boolean("attention_bias", False)
    return replace(plain_spec(fields, "olmo2"), attention_bias=has_bias, attention_output_bias=has_bias)


def _granite(fields: Fields) -> ModelSpec:
    """Llama with factors in four places."""
    return replace(
        _llama(fields),
        attention_scale=fields.number("attention_multiplier", default=1.0),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logit_scale=1 / fields.number("logits_scaling", default=1.0),
    )


def _smollm3(fields: Fields) -> ModelSpec:
    """Llama without rotary embedding on some layers; windows, if at all, on those."""
    spec = _llama(fields)
    rotates = fields.raw("no_rope_layers")  # 1 where a layer does rotate
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval")
        rotates = [int((index + 1) % interval != 0) for index in range(spec.num_layers)]
    if not isinstance(rotates, list) or len(rotates) != spec.num_layers or any(flag not in (0, 1) for flag in rotates):
        raise fields.error("no_rope_layers", f"a list of {spec.num_layers} zeros and ones")
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window", False) else None
    spec = with_windows(spec, fields, window, [not flag for flag in rotates])
    return replace(spec, unrotated_layers=tuple(index for index, flag in enumerate(rotates) if not flag))


def _with(fields: Fields, **values: object) -> Fields:
    return Fields({**fields.values, **values}, fields.source)


def _optional_number(fields: Fields, key: str) -> float | None:
    return fields.number(key) if fields.has(key) else None


READERS: dict[str, Reader] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Phi3ForCausalLM": _phi3,
    "Glm4ForCausalLM": _glm4,
    "Olmo2ForCausalLM": _olmo2,
    "GraniteForCausalLM": _granite,
    "SmolLM3ForCausalLM": _smollm3,
}
