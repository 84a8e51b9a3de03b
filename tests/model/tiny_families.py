"""A tiny seeded checkpoint of each dense family, written by `transformers`: what `config.json` says beside the sizes.

One idea: sizes are such that nothing agrees by accident: heads that are no quotient of the hidden size, windows shorter
than the sequences, scales and caps that matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import BOS_TOKEN_ID, EOS_TOKEN_ID, LLAMA3_ROPE, TINY_VOCAB_SIZE, write_tiny_tokenizer

NUM_LAYERS = 4
WINDOW = 9
_FULL_THEN_SLIDING = ["full_attention", "sliding_attention"] * (NUM_LAYERS // 2)
_SLIDING_THEN_FULL = _FULL_THEN_SLIDING[::-1]
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class TinyFamily:
    """Args:
    model_type: `transformers`' name.
    shown_as: what the list of supported models calls it.
    config: values of config.json that differ from `SIZES`.
    """

    model_type: str
    shown_as: str
    config: dict[str, Any] = field(default_factory=dict)

    def changed(self, config: dict[str, Any]) -> TinyFamily:
        return replace(self, config={**self.config, **config})

    def write(self, directory: Path) -> Path:
        """Write the checkpoint into `directory` and return it."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(self.model_type, **{**SIZES, **self.config})
        generator = torch.Generator().manual_seed(1)
        with torch.random.fork_rng():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in [*model.named_parameters(), *model.named_buffers()]:
                if "inv_freq" not in name:
                    weight.copy_(_random_weight(name, weight, generator))
        model.eval().save_pretrained(directory)
        write_tiny_tokenizer(directory)
        return directory


SIZES: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": TINY_VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_parameters": _PLAIN_ROPE,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
}

FAMILIES: dict[str, TinyFamily] = {
    "llama": TinyFamily("llama", "Llama 2, 3", {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}),
    "mistral": TinyFamily("mistral", "Mistral", {"sliding_window": WINDOW}),
    "qwen2": TinyFamily("qwen2", "Qwen2, Qwen2.5", {"tie_word_embeddings": True}),
    "qwen2 windows": TinyFamily(
        "qwen2", "Qwen2, Qwen2.5", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "qwen3": TinyFamily("qwen3", "Qwen3", {"attention_bias": True}),
    "gemma2": TinyFamily(
        "gemma2",
        "Gemma 2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": TinyFamily(
        "gemma3_text",
        "Gemma 3",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 40,
            "layer_types": [*_SLIDING_THEN_FULL],
            "attn_logit_softcapping": 2.0,  # named, but not computed
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": _PLAIN_ROPE,
            },
        },
    ),
    "phi3": TinyFamily(
        "phi3",
        "Phi-3, Phi-4",
        {
            "hidden_size": 96,
            "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5},
            "sliding_window": WINDOW,
        },
    ),
    "phi3 longrope": TinyFamily(
        "phi3",
        "Phi-3, Phi-4",
        {
            "hidden_size": 96,
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [1.0 + 0.5 * i for i in range(8)],
            },
        },
    ),
    "glm4": TinyFamily(
        "glm4",
        "GLM-4",
        {"attention_bias": True, "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": TinyFamily("olmo2", "OLMo 2"),
    "granite": TinyFamily(
        "granite",
        "Granite 3",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": TinyFamily(
        "smollm3",
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
}


def _random_weight(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scaled so that every layer matters and the largest logit stands clear of the second."""
    noise = torch.randn(weight.shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed" in name:
        return noise
    return noise * 1.5 / weight.shape[-1] ** 0.5
