"""Cutting a model into stages changes nothing: its logits are `transformers`' for any depth, chunking and batch mix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stageline.attention.select import select_backend
from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.checkpoint import TensorEntry
from stageline.errors import CheckpointError
from stageline.models.decoder import DecoderStage
from stageline.models.registry import family_names, load_family
from stageline.weights.reader import CheckpointReader
from tests.model.chain import CPU, PROMPTS, Chain, cut, logits_in_mixed_batches, sequence
from tests.tiny_models import LINEAR_ROPE, LLAMA3_ROPE, TinyModel, load_reference, reference_logits

VARIANTS = {
    "llama": TinyModel(),
    "tied": TinyModel(tie_word_embeddings=True),
    "mha": TinyModel(num_kv_heads=4),
    "mqa": TinyModel(num_kv_heads=1),
    "odd heads": TinyModel(hidden_size=96, num_heads=6, num_kv_heads=3, head_dim=20),
    "biases": TinyModel(attention_bias=True, mlp_bias=True),
    "llama3 rope": TinyModel(rope_scaling=LLAMA3_ROPE, rope_theta=500000.0, max_position_embeddings=256),
    "linear rope": TinyModel(rope_scaling=LINEAR_ROPE),
    "sharded": TinyModel(num_shards=3),
    "mistral": TinyModel(architecture="mistral"),
    "mistral window": TinyModel(architecture="mistral", sliding_window=9),
    "qwen2": TinyModel(architecture="qwen2", tie_word_embeddings=True),
}


CUTS = {1: cut(4), 2: cut(1, 3), 3: cut(1, 2, 1)}


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    written: dict[str, Path] = {}

    def write(variant: str) -> Path:
        if variant not in written:
            written[variant] = VARIANTS[variant].write(tmp_path_factory.mktemp(variant.replace(" ", "-")))
        return written[variant]

    return write


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_for_every_depth(variant: str, checkpoint_path: Callable[[str], Path]) -> None:
    path = checkpoint_path(variant)
    reference = load_reference(path)
    expected = {number: reference_logits(reference, sequence(number, length)) for number, length in PROMPTS.items()}
    first_depth: dict[int, torch.Tensor] | None = None
    for num_stages, cuts in CUTS.items():
        found = logits_in_mixed_batches(Chain(path, cuts))
        first_depth = first_depth or found
        for number in PROMPTS:
            scale = expected[number].abs().max().item()
            torch.testing.assert_close(found[number], expected[number], rtol=1e-4, atol=1e-5 * scale)
            assert torch.equal(found[number].argmax(-1), expected[number].argmax(-1))
            assert torch.equal(found[number], first_depth[number]), f"{num_stages} stages differ from one"


def test_bfloat16_logits_stay_near_float32_ones_and_do_not_depend_on_depth(
    checkpoint_path: Callable[[str], Path],
) -> None:
    path = checkpoint_path("llama")
    exact = logits_in_mixed_batches(Chain(path, CUTS[1]))
    rounded = logits_in_mixed_batches(Chain(path, CUTS[1], torch.bfloat16))
    cut = logits_in_mixed_batches(Chain(path, CUTS[3], torch.bfloat16))
    for number in PROMPTS:
        error = (rounded[number] - exact[number]).norm() / exact[number].norm()
        assert error < 0.03
        assert torch.equal(rounded[number], cut[number])


def test_bfloat16_is_as_near_to_float32_as_transformers_is(checkpoint_path: Callable[[str], Path]) -> None:
    path = checkpoint_path("llama")
    tokens = sequence(0, 50)
    exact = reference_logits(load_reference(path), tokens)
    theirs = reference_logits(load_reference(path, torch.bfloat16), tokens)
    chain = Chain(path, CUTS[1], torch.bfloat16)
    chain.requests.add(0, tokens)
    ours = chain.run({0: 50})[0]
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


def test_a_stage_reads_its_own_tensors_only(checkpoint_path: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(checkpoint_path("tied")))
    read: list[str] = []

    class NotingReader(CheckpointReader):
        def entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
            read.append(name)
            return super().entry(name, shape)

    with NotingReader(checkpoint, torch.float32, CPU) as reader:
        DecoderStage(checkpoint.spec, range(1, 3), reader, select_backend(CPU), 64)
        middle = set(read)
        read.clear()
        DecoderStage(checkpoint.spec, range(4), reader, select_backend(CPU), 64)
    assert {name.split(".")[2] for name in middle} == {"1", "2"}
    assert sorted(read) == sorted(checkpoint.tensors), "a single stage reads every tensor once, a tied one too"


def test_a_stage_of_a_checkpoint_without_its_tensor_names_it(checkpoint_path: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(str(checkpoint_path("llama")))
    with CheckpointReader(checkpoint, torch.float32, CPU) as reader:
        del checkpoint.tensors["model.layers.2.mlp.up_proj.weight"]
        with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
            DecoderStage(checkpoint.spec, range(4), reader, select_backend(CPU), 64)


def test_every_family_loads_and_an_unknown_one_is_refused_with_the_list() -> None:
    for name in family_names():
        assert callable(load_family(name))
    with pytest.raises(CheckpointError, match=r"gpt2.*llama"):
        load_family("gpt2")
