"""What `transformers` assumes of each architecture where its config.json does not mention a key.

One idea: a config.json that `transformers` wrote may leave out what is its default, and a model computed with another
default gives wrong answers. So what is left out is filled in here, once, before a reader looks; a null stays a null.
Sizes that no two models share are left out: a config without them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

_QWEN_WINDOWS: Mapping[str, object] = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA: Mapping[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}

ASSUMED: Mapping[str, Mapping[str, object]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, **_QWEN_WINDOWS},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, **_QWEN_WINDOWS},
    "Gemma2ForCausalLM": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Gemma3ForCausalLM": _GEMMA,
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "Glm4ForCausalLM": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "SmolLM3ForCausalLM": {
        "num_key_value_heads": 4,
        "rope_theta": 2_000_000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "Qwen2MoeForCausalLM": {"num_key_value_heads": 16, **_QWEN_WINDOWS},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "sliding_window": 4096},
    "DeepseekV2ForCausalLM": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "DeepseekV3ForCausalLM": {
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    "GptOssForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "sliding_window": 128,
    },
}
"""By the name under `architectures`; what is not here is assumed alike of all, where it is read."""
