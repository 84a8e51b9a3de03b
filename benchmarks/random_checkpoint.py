"""Writes a checkpoint of random weights in a given shape: a folder that any side of a benchmark can open.

    python benchmarks/random_checkpoint.py FOLDER [--layers 24 --hidden 896 --vocab 151936 ...]

The default shape is Qwen2-0.5B's, as a Llama: its LM head weighs as much as nine layers.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

_SHARD_BYTES = 2**30


@dataclass(frozen=True)
class RandomLlama:
    """A Llama in bfloat16 with its embedding as LM head."""

    num_layers: int = 24
    hidden_size: int = 896
    intermediate_size: int = 4864
    num_heads: int = 14
    num_kv_heads: int = 2
    vocab_size: int = 151_936
    max_position_embeddings: int = 4096
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Write config, weights and a tokenizer, or nothing if the folder has this checkpoint. Returns: the folder."""
        config = json.dumps(self._config(), indent=2)
        if (folder / "config.json").is_file() and (folder / "config.json").read_text() == config:
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        self._write_weights(folder)
        _write_tokenizer(folder)
        # Last: a folder with a config is a whole one.
        (folder / "config.json").write_text(config)
        return folder

    def _config(self) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.hidden_size // self.num_heads,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": 256,
            "eos_token_id": 257,
        }

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        kv = self.num_kv_heads * (hidden // self.num_heads)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
                f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
                f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
                f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
                f"{prefix}.mlp.up_proj.weight": (inner, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, inner),
            }
        return shapes | {"model.norm.weight": (hidden,)}

    def _write_weights(self, folder: Path) -> None:
        """In shards, so that memory holds one of them."""
        generator = torch.Generator().manual_seed(self.seed)
        shards: list[dict[str, torch.Tensor]] = [{}]
        weight_map: dict[str, str] = {}
        written = 0
        for name, shape in self._shapes().items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float32) / shape[-1] ** 0.5
            shards[-1][name] = torch.ones(shape, dtype=torch.bfloat16) if "norm" in name else weight.to(torch.bfloat16)
            weight_map[name] = f"model-{len(shards):05}.safetensors"
            written += shards[-1][name].nbytes
            if written >= _SHARD_BYTES:
                save_file(shards[-1], folder / weight_map[name])
                shards[-1].clear()
                shards.append({})
                written = 0
        if shards[-1]:
            save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors")
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(folder: Path) -> None:
    """Bytes and two special tokens; the other words of the vocabulary have no text."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|bos|>", "<|eos|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    shape = RandomLlama()
    parser.add_argument("--layers", type=int, default=shape.num_layers)
    parser.add_argument("--hidden", type=int, default=shape.hidden_size)
    parser.add_argument("--intermediate", type=int, default=shape.intermediate_size)
    parser.add_argument("--heads", type=int, default=shape.num_heads)
    parser.add_argument("--kv-heads", type=int, default=shape.num_kv_heads)
    parser.add_argument("--vocab", type=int, default=shape.vocab_size)
    args = parser.parse_args()
    model = RandomLlama(args.layers, args.hidden, args.intermediate, args.heads, args.kv_heads, args.vocab)
    print(model.write(args.folder))


if __name__ == "__main__":
    main()
