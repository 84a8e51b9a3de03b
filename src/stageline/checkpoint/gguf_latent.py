"""Latent attention in GGUF files: DeepSeek-V2 and V3, and models of their kind.

One idea: newer files say the sizes of a head under names of their own, because the usual ones tell of the compressed
row that all heads share; and they hold what brings that row to keys and to values in two tensors, the first transposed.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from stageline.checkpoint.fields import Fields
from stageline.checkpoint.model_spec import MlaSpec, ModelSpec, RopeSpec

LATENT_PARTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}


def deepseek2(fields: Fields, spec: ModelSpec) -> ModelSpec:
    """Args: spec: with the rotating numbers of a head as `head_dim`. Raises: CheckpointError."""
    attention = "deepseek2.attention"
    is_split = fields.has(f"{attention}.key_length_mla")
    ending = "_mla" if is_split else ""
    head_dim = fields.integer(f"{attention}.key_length{ending}")
    mla = MlaSpec(
        q_lora_rank=fields.integer(f"{attention}.q_lora_rank", default=0, lowest=0) or None,
        kv_lora_rank=fields.integer(f"{attention}.kv_lora_rank"),
        qk_nope_head_dim=head_dim - spec.head_dim,
        qk_rope_head_dim=spec.head_dim,
        v_head_dim=fields.integer(f"{attention}.value_length{ending}"),
        is_split=is_split,
    )
    if mla.qk_nope_head_dim < 1:
        raise fields.error(f"{attention}.key_length{ending}", f"above {spec.head_dim}, the numbers that rotate")
    rope, stretch = _rope(fields, spec.rope)
    return replace(
        spec,
        num_kv_heads=spec.num_heads,
        head_dim=head_dim,
        rope=replace(rope, rotary_dim=mla.qk_rope_head_dim, pairs_neighbours=True),
        attention_scale=head_dim**-0.5 * stretch,
        mla=mla,
    )


def _rope(fields: Fields, rope: RopeSpec) -> tuple[RopeSpec, float]:
    """What these models have otherwise where YaRN stretches positions: scores are multiplied instead of queries and
    keys, by as much as both would be by a part of the logarithm of the factor.
    """
    key = "deepseek2.rope.scaling.yarn_log_multiplier"
    if rope.kind != "yarn" or not fields.raw(key) or rope.factor <= 1:
        return rope, 1.0
    return replace(rope, magnitude=1.0), (1.0 + fields.number(key) * math.log(rope.factor)) ** 2
