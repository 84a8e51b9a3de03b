"""A GGUF file says the same as the directory that it was made from: the same logits, architecture by architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.gguf_architectures import ARCHITECTURES
from stageline.weights.reader import CheckpointReader
from tests.model.chain import CPU, PROMPTS, Chain, cut, logits_in_mixed_batches
from tests.model.gguf_expert_files import MODELS
from tests.model.gguf_names import BLOCK_PARTS, TOP
from tests.model.tiny_families import FAMILIES, WINDOW

_GEMMA_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True)
class Conversion:
    """What llama.cpp's converter does with a family.

    Args:
        changes: to the config of the tiny family, for what this format cannot say.
        metadata: further values, behind the architecture's name.
        parts: names of a block's tensors where they are not the usual ones.
        norm_offset: what is added to weights of norms.
    """

    family: str
    changes: dict[str, Any]
    metadata: dict[str, float]
    parts: dict[str, str]
    norm_offset: float = 0.0


CONVERSIONS = {
    "qwen3": Conversion("qwen3", {"attention_bias": False}, {}, {}),
    "gemma2": Conversion(
        "gemma2",
        {"query_pre_attn_scalar": 16},
        {"attention.sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        _GEMMA_PARTS,
        norm_offset=1.0,
    ),
    "gemma3": Conversion(
        "gemma3",
        {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 4},
        {"attention.sliding_window": WINDOW, "rope.freq_base_swa": 10000.0},
        _GEMMA_PARTS,
        norm_offset=1.0,
    ),
}


def stored_name(name: str, parts: dict[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{({**BLOCK_PARTS, **parts})[part]}.{kind}"


def convert(directory: Path, path: Path, architecture: str, conversion: Conversion) -> Path:
    checkpoint = open_checkpoint(str(directory))
    spec = checkpoint.spec
    writer = gguf.GGUFWriter(str(path), architecture)
    sizes = {
        "block_count": spec.num_layers,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "context_length": spec.max_position_embeddings,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
    }
    numbers = {"attention.layer_norm_rms_epsilon": spec.rms_norm_eps, "rope.freq_base": spec.rope.theta}
    for key, value in {**sizes, **numbers, **conversion.metadata}.items():
        write = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        write(f"{architecture}.{key}", value)  # type: ignore[arg-type]
    with CheckpointReader(checkpoint, torch.float32, CPU) as reader:
        for name, entry in checkpoint.tensors.items():
            tensor = reader.read(name, entry.shape)
            if "norm" in name:
                tensor = tensor + conversion.norm_offset
            writer.add_tensor(stored_name(name, conversion.parts), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    def write(architecture: str) -> tuple[Path, Path]:
        """The directory and the file made from it."""
        conversion = CONVERSIONS[architecture]
        directory = FAMILIES[conversion.family].changed(conversion.changes).write(tmp_path / "directory")
        return directory, convert(directory, tmp_path / "model.gguf", architecture, conversion)

    return write


@pytest.mark.parametrize("architecture", CONVERSIONS)
def test_logits_are_those_of_the_directory(
    architecture: str, written: Callable[[str], tuple[Path, Path]]
) -> None:
    directory, path = written(architecture)
    spec, other = open_checkpoint(str(path)).spec, open_checkpoint(str(directory)).spec
    assert [spec.window_of(layer) for layer in range(4)] == [other.window_of(layer) for layer in range(4)]
    expected, found = (logits_in_mixed_batches(Chain(model, cut(1, 3))) for model in (directory, path))
    for number in PROMPTS:
        torch.testing.assert_close(found[number], expected[number], rtol=1e-5, atol=1e-5)


def test_every_architecture_is_compared_somewhere() -> None:
    """llama by SmolLM2 and qwen2 by what test_checkpoint_gguf.py writes; those with experts by test_gguf_experts.py."""
    with_experts = {name.partition(" ")[0] for name in MODELS}
    assert set(CONVERSIONS) | with_experts | {"llama", "qwen2"} == set(ARCHITECTURES)
    assert {name for name, kind in ARCHITECTURES.items() if kind.experts is not None} == with_experts
