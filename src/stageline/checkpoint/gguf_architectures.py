"""What GGUF files of each architecture have otherwise: names of norms, order of rows, and facts that are not written.

Source: convert_hf_to_gguf.py and src/llama-model.cpp of llama.cpp, for what a converter leaves out or changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from stageline.checkpoint.architectures.experts import SWIGLU_ALPHA, SWIGLU_LIMIT
from stageline.checkpoint.fields import Fields
from stageline.checkpoint.gguf_experts import SELECTION_BIAS, GgufExperts, expert_parts
from stageline.checkpoint.gguf_latent import LATENT_PARTS, deepseek2
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec

_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QUERY_KEY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
_GEMMA3_WINDOW_PATTERN = 6


def _as_it_is(fields: Fields, spec: ModelSpec) -> ModelSpec:
    return spec


@dataclass(frozen=True)
class GgufArchitecture:
    """Args:
    family: as `ModelSpec.family`.
    has_rope_pairs: whether rows of q and k are stored with the two numbers of a rotated pair side by side.
    block_parts: a block's tensor names that mean something else than usual, or nothing in other architectures.
    experts: of files that have a mixture of experts; None if there are no such files.
    is_latent: whether it has latent attention.
    yarn_rounds_ramp: whether the ramp of YaRN begins and ends at whole frequencies; None if YaRN is not supported.
    refine: completes the shape.
    """

    family: str
    has_rope_pairs: bool = False
    block_parts: dict[str, str] = field(default_factory=dict)
    experts: GgufExperts | None = None
    is_latent: bool = False
    yarn_rounds_ramp: bool | None = None
    refine: Callable[[Fields, ModelSpec], ModelSpec] = _as_it_is


def _gemma2(fields: Fields, spec: ModelSpec) -> ModelSpec:
    return replace(
        _gemma(spec, _GEMMA2_27B_LAYERS),
        layer_windows=_windows(fields, "gemma2", [index % 2 == 0 for index in range(spec.num_layers)]),
        attention_cap=fields.number("gemma2.attn_logit_softcapping", default=50.0),
        logit_cap=fields.number("gemma2.final_logit_softcapping", default=30.0),
    )


def _gemma3(fields: Fields, spec: ModelSpec) -> ModelSpec:
    has_window = [(index + 1) % _GEMMA3_WINDOW_PATTERN != 0 for index in range(spec.num_layers)]
    return replace(
        _gemma(spec, _GEMMA3_27B_LAYERS),
        layer_windows=_windows(fields, "gemma3", has_window),
        window_rope=RopeSpec(theta=fields.number("gemma3.rope.freq_base_swa", default=10000.0)),
    )


def _gpt_oss(fields: Fields, spec: ModelSpec) -> ModelSpec:
    has_window = [index % 2 == 0 for index in range(spec.num_layers)]
    return replace(
        spec, has_sinks=True, sliding_window=None, layer_windows=_windows(fields, "gpt-oss", has_window)
    )


def _gemma(spec: ModelSpec, largest_num_layers: int) -> ModelSpec:
    """Norm weights have their 1 in them already. Only the largest model scales by another size than head_dim."""
    is_largest = spec.num_layers == largest_num_layers
    return replace(
        spec,
        activation="gelu_tanh",
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=(spec.hidden_size // spec.num_heads if is_largest else spec.head_dim) ** -0.5,
        sliding_window=None,
    )


def _windows(fields: Fields, architecture: str, has_window: list[bool]) -> tuple[int | None, ...]:
    window = fields.integer(f"{architecture}.attention.sliding_window")
    return tuple(window if has else None for has in has_window)


_QWEN_EXPERTS = expert_parts("mlp", "gate", "gate_proj", "up_proj", "down_proj")
_QWEN_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DEEPSEEK_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    SELECTION_BIAS: "mlp.gate.e_score_correction_bias",
}
_DEEPSEEK = GgufExperts(
    "deepseek", {**_QWEN_EXPERTS, **_DEEPSEEK_SHARED_EXPERTS}, normalizes_weights=False, has_groups=True
)
_MIXTRAL = GgufExperts(
    "mixtral", expert_parts("block_sparse_moe", "gate", gate="w1", up="w3", down="w2"), is_optional=True
)
_QWEN2_MOE = GgufExperts(
    "qwen2_moe", {**_QWEN_EXPERTS, **_QWEN_SHARED_EXPERT}, normalizes_weights=False, has_shared_gate=True
)
_GPT_OSS = GgufExperts(
    "gpt_oss",
    expert_parts("mlp", "router", "gate_proj", "up_proj", "down_proj"),
    has_bias=True,
    activation="clamped_swiglu",
    swiglu_alpha=SWIGLU_ALPHA,
    swiglu_limit=SWIGLU_LIMIT,
)

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", has_rope_pairs=True, experts=_MIXTRAL),
    "qwen2": GgufArchitecture("llama"),
    "qwen3": GgufArchitecture("qwen3", block_parts=_QUERY_KEY_NORMS),
    "gemma2": GgufArchitecture("gemma2", block_parts=_SANDWICH_NORMS, refine=_gemma2),
    "gemma3": GgufArchitecture("gemma3", block_parts={**_SANDWICH_NORMS, **_QUERY_KEY_NORMS}, refine=_gemma3),
    "qwen2moe": GgufArchitecture("qwen2_moe", experts=_QWEN2_MOE),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe", block_parts=_QUERY_KEY_NORMS, experts=GgufExperts("qwen3_moe", _QWEN_EXPERTS)
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        block_parts={"post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"},
        refine=_gpt_oss,
        experts=_GPT_OSS,
        yarn_rounds_ramp=False,
    ),
    "deepseek2": GgufArchitecture(
        "deepseek",
        block_parts=LATENT_PARTS,
        refine=deepseek2,
        experts=_DEEPSEEK,
        is_latent=True,
        yarn_rounds_ramp=True,
    ),
}
"""By the name under `general.architecture`."""

NOT_SUPPORTED = {
    "deepseek": "the first DeepSeek is not supported, DeepSeek-V2 and later are",
    "glm4moe": "GLM-4's mixture of experts is not supported",
}
"""Architectures that one may well ask for, and why they are refused."""
