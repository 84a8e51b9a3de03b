"""The reader gives the checkpoint's numbers, reads no other bytes, and says what is wrong with which file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline.checkpoint import Checkpoint, open_checkpoint, stage_file_bytes, stage_tensor_names
from stageline.errors import CheckpointError
from stageline.weights.reader import RUN_ELEMENTS, CheckpointReader, undo_rope_interleaving
from tests.tiny_models import TinyModel
from tests.unit.checkpoint_files import split_gguf, write_gguf_model

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
TINY = TinyModel()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(TINY.write(tmp_path_factory.mktemp("tiny"))))


def read_all(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with CheckpointReader(checkpoint, dtype, CPU) as reader:
        return {name: reader.read(name, entry.shape) for name, entry in checkpoint.tensors.items()}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_equal_those_transformers_wrote(
    tmp_path: Path, num_shards: int, stored: str, compute: torch.dtype
) -> None:
    tiny = replace(TINY, dtype=stored, num_shards=num_shards)
    expected = tiny.build().state_dict()
    checkpoint = open_checkpoint(str(tiny.write(tmp_path)))
    assert len({entry.file for entry in checkpoint.tensors.values()}) >= num_shards
    found = read_all(checkpoint, compute)
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.dtype == compute
        assert torch.equal(tensor, expected[name].to(compute)), name


def test_a_stage_needs_only_those_of_a_split_models_files_that_have_its_layers(tmp_path: Path) -> None:
    one = open_checkpoint(str(write_gguf_model(tmp_path / "m.gguf")))
    parts = split_gguf(tmp_path / "m.gguf", tmp_path / "parts", 6)
    several = open_checkpoint(str(tmp_path / "parts"))
    names = stage_tensor_names(several, range(1, 2), is_first=False, is_last=False)
    needed = {several.tensors[name].file for name in names}
    assert len(parts) == 5 and len(needed) == 2
    for part in parts:
        if str(part) not in needed:
            part.unlink()
    expected = read_all(one, torch.float32)
    with CheckpointReader(several, torch.float32, CPU) as reader:
        for name in names:
            assert torch.equal(reader.read(name, several.tensors[name].shape), expected[name]), name
        assert reader.num_bytes_read == stage_file_bytes(one, range(1, 2), is_first=False, is_last=False)


@given(num_heads=st.integers(1, 5), half=st.integers(1, 6), columns=st.integers(0, 3))
def test_undoing_the_interleaving_of_rope_restores_the_rows(num_heads: int, half: int, columns: int) -> None:
    shape = (num_heads * half * 2, columns) if columns else (num_heads * half * 2,)
    original = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    # What llama.cpp's converter does to q and k (LlamaModel.permute in convert_hf_to_gguf.py).
    stored = original.reshape(num_heads, 2, half, *shape[1:]).swapaxes(1, 2).reshape(shape)
    assert np.array_equal(undo_rope_interleaving(torch.from_numpy(stored.copy()), num_heads).numpy(), original)


def test_a_missing_tensor_names_itself_the_file_and_its_neighbours(checkpoint: Checkpoint) -> None:
    tensors = {name: entry for name, entry in checkpoint.tensors.items() if name != Q_PROJ}
    words = rf"{Q_PROJ} is missing in .*model\.safetensors; there is .*2\.self_attn\.q_proj"
    with CheckpointReader(msgspec.structs.replace(checkpoint, tensors=tensors), torch.float32, CPU) as reader:
        with pytest.raises(CheckpointError, match=words):
            reader.read(Q_PROJ, (64, 64))
        assert reader.num_bytes_read == 0


def test_a_misshapen_tensor_gives_both_shapes(checkpoint: Checkpoint) -> None:
    with (
        CheckpointReader(checkpoint, torch.float32, CPU) as reader,
        pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {Q_PROJ} has shape \[64, 64\].*\[32, 64\]"),
    ):
        reader.read(Q_PROJ, (32, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_cut_after_it_was_indexed_gives_both_sizes(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(str(TINY.write(tmp_path)))
    name, entry = max(checkpoint.tensors.items(), key=lambda item: item[1].offset_bytes)
    end = entry.offset_bytes + entry.num_bytes
    os.truncate(entry.file, end - 4)
    with (
        CheckpointReader(checkpoint, dtype, CPU) as reader,
        pytest.raises(CheckpointError, match=rf"truncated: tensor {name} needs .* up to byte {end}, .* has {end - 4}"),
    ):
        reader.read(name, entry.shape)


def test_an_encoding_that_cannot_be_read_is_refused_by_name(checkpoint: Checkpoint) -> None:
    tensors = {Q_PROJ: msgspec.structs.replace(checkpoint.tensors[Q_PROJ], encoding="F64")}
    with (
        CheckpointReader(msgspec.structs.replace(checkpoint, tensors=tensors), torch.float32, CPU) as reader,
        pytest.raises(CheckpointError, match="type F64, which is not supported; supported are F32"),
    ):
        reader.read(Q_PROJ, (64, 64))


def test_progress_is_reported_as_it_is_read(checkpoint: Checkpoint) -> None:
    seen: list[int] = []
    with CheckpointReader(checkpoint, torch.bfloat16, CPU, seen.append) as reader:
        reader.read(Q_PROJ, (64, 64))
        assert sum(seen) == reader.num_bytes_read == 64 * 64 * 4


def test_closing_leaves_no_file_open(checkpoint: Checkpoint) -> None:
    before = os.listdir("/proc/self/fd")
    with CheckpointReader(checkpoint, torch.float32, CPU) as reader:
        reader.read(Q_PROJ, (64, 64))
        assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_tensor_longer_than_a_run_is_whole(tmp_path: Path) -> None:
    tiny = replace(TINY, num_layers=1, vocab_size=5003)
    embedding = tiny.build().state_dict()["model.embed_tokens.weight"]
    assert embedding.numel() > RUN_ELEMENTS and embedding.numel() % RUN_ELEMENTS
    found = read_all(open_checkpoint(str(tiny.write(tmp_path))), torch.bfloat16)
    assert torch.equal(found["model.embed_tokens.weight"], embedding.bfloat16())


def bytes_read_by_this_process() -> int:
    """The operating system's count of bytes that read calls have returned to this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize(("layers", "is_first"), [(range(15), True), (range(15, 30), False)])
def test_a_stage_of_two_reads_its_own_bytes_of_smollm2_and_no_others(
    smollm2_gguf: Path, layers: range, is_first: bool
) -> None:
    checkpoint = open_checkpoint(str(smollm2_gguf))
    names = stage_tensor_names(checkpoint, layers, is_first, not is_first)
    with CheckpointReader(checkpoint, torch.bfloat16, CPU) as reader:
        reader.read("model.norm.weight", (checkpoint.spec.hidden_size,))
        warm_bytes, before = reader.num_bytes_read, bytes_read_by_this_process()
        for name in names:
            reader.read(name, checkpoint.tensors[name].shape)
        by_the_system = bytes_read_by_this_process() - before
        by_the_reader = reader.num_bytes_read - warm_bytes
    assert by_the_reader == stage_file_bytes(checkpoint, layers, is_first, not is_first)
    # Reading the counter itself is the only other read.
    assert by_the_reader <= by_the_system <= by_the_reader + 1024
    embedding_bytes = checkpoint.tensors["model.embed_tokens.weight"].num_bytes
    layer_bytes = smollm2_gguf.stat().st_size - embedding_bytes
    assert 0.45 < (by_the_reader - embedding_bytes) / layer_bytes < 0.5
