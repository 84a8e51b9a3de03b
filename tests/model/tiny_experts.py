"""A tiny seeded checkpoint of each family with experts; see `tiny_families`."""

from __future__ import annotations

from typing import Any

from tests.model.tiny_families import WINDOW, TinyFamily

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 36,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}

EXPERT_FAMILIES: dict[str, TinyFamily] = {
    "mixtral": TinyFamily("mixtral", "Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2 moe": TinyFamily(
        "qwen2_moe", "Qwen2-MoE", {**_QWEN, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}
    ),
    "qwen3 moe": TinyFamily("qwen3_moe", "Qwen3-MoE", {**_QWEN, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "deepseek v2": TinyFamily("deepseek_v2", "DeepSeek-V2", {**_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek v2 lite": TinyFamily(
        "deepseek_v2",
        "DeepSeek-V2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek v3": TinyFamily(
        "deepseek_v3",
        "DeepSeek-V3, R1",
        {
            **_LATENT,
            "q_lora_rank": 20,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "gpt-oss": TinyFamily(
        "gpt_oss",
        "gpt-oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": WINDOW,
            "swiglu_limit": 1.5,
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
}
