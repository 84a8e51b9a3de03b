"""Tiny seeded random checkpoints, written with `transformers`, which is also the reference that answers for them.

One idea: a `TinyModel` says what is special about a model (heads, biases, tying, RoPE, window); `write` makes the
directory a user would have: config, weights (one file or shards), tokenizer with a chat template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NUM_SPECIAL_TOKENS = 4
TINY_VOCAB_SIZE = 256 + NUM_SPECIAL_TOKENS
BOS_TOKEN_ID, EOS_TOKEN_ID = 256, 257
SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.0}


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A model small enough to run in milliseconds.

    Args:
        architecture: "llama", "mistral" or "qwen2".
        hidden_size: a multiple of num_heads; head_dim need not be their quotient.
        attention_bias: q, k, v and (Llama only) o have biases; Qwen2 always has them on q, k and v.
        rope_scaling: as in config.json, such as LLAMA3_ROPE; None for plain RoPE.
        sliding_window: Mistral's.
        num_shards: more than 1 gives a sharded checkpoint with an index of about that many files.
    """

    architecture: str = "llama"
    num_layers: int = 4
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    vocab_size: int = TINY_VOCAB_SIZE
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int | None = None
    max_position_embeddings: int = 512
    dtype: str = "float32"
    num_shards: int = 1
    seed: int = 0

    def write(self, directory: Path) -> Path:
        """Write the checkpoint into `directory` (made if missing) and return it."""
        model = self.build()
        directory.mkdir(parents=True, exist_ok=True)
        num_bytes = sum(weight.numel() * weight.element_size() for weight in model.state_dict().values())
        shard_bytes = num_bytes if self.num_shards == 1 else -(-num_bytes // self.num_shards)
        model.save_pretrained(directory, max_shard_size=max(shard_bytes, 1) + 1)
        write_tiny_tokenizer(directory)
        return directory

    def build(self) -> Any:
        """The `transformers` model in the checkpoint's dtype, on the CPU, seeded."""
        from transformers import AutoModelForCausalLM

        generator = torch.Generator().manual_seed(self.seed)
        with torch.random.fork_rng():
            model = AutoModelForCausalLM.from_config(self._config(), dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(_random_weight(name, weight, generator))
        return model.to(getattr(torch, self.dtype)).eval()

    def _config(self) -> Any:
        from transformers import AutoConfig

        special: dict[str, Any] = {}
        if self.architecture == "llama":
            special = {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        if self.architecture == "mistral":
            special = {"sliding_window": self.sliding_window}
        return AutoConfig.for_model(
            self.architecture,
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            tie_word_embeddings=self.tie_word_embeddings,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_theta": self.rope_theta, **(self.rope_scaling or {"rope_type": "default"})},
            bos_token_id=BOS_TOKEN_ID,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=None,
            **special,
        )


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


def write_tiny_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: token ids 0 to 255 are bytes (in GPT-2's order), then SPECIAL_TOKENS."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def load_reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as `transformers` runs it, with its plain ("eager") attention."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Returns: float32 logits [tokens, vocab] of the whole sequence in one pass."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@torch.inference_mode()
def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The greedy continuation, ignoring end-of-sequence; every step recomputes the whole sequence, with no cache."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]
