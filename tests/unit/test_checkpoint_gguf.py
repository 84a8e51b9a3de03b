"""GGUF files: what is understood, and how damage is refused."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.checkpoint import Checkpoint, generation_defaults, open_checkpoint, stage_file_bytes
from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.gguf_container import read_gguf
from stageline.checkpoint.stage_tensors import stage_tensor_names
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.errors import CheckpointError
from tests.unit.checkpoint_files import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    add_model_tensors,
    finish,
    gguf_name,
    model_writer,
    split_gguf,
    tensor_shapes,
    write_gguf_model,
)
from tests.unit.tokenizer_files import write_byte_level_gguf


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_model(tmp_path_factory.mktemp("gguf") / "model.gguf")


def header(num_tensors: int, num_pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def test_names_and_shapes_become_hugging_face_s(whole_file: Path) -> None:
    checkpoint = open_checkpoint(str(whole_file))
    assert {name: entry.shape for name, entry in checkpoint.tensors.items()} == tensor_shapes()
    assert checkpoint.is_gguf
    spec = checkpoint.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 64, 4, 2, 16)
    assert (spec.vocab_size, spec.rms_norm_eps, spec.tie_word_embeddings, spec.dtype) == (VOCAB, 1e-5, False, "float32")


def test_the_index_agrees_with_the_reader_of_the_gguf_package(whole_file: Path) -> None:
    ours = {tensor.name: tensor for tensor in read_gguf(whole_file).tensors}
    for theirs in gguf.GGUFReader(whole_file).tensors:
        mine = ours.pop(theirs.name)
        assert (mine.offset_bytes, mine.num_bytes, mine.shape) == (
            theirs.data_offset,
            theirs.n_bytes,
            tuple(int(size) for size in theirs.shape[::-1]),
        )
    assert not ours


def test_without_an_output_tensor_the_embedding_is_tied(tmp_path: Path) -> None:
    assert open_checkpoint(str(write_gguf_model(tmp_path / "m.gguf", has_head=False))).spec.tie_word_embeddings


def test_only_the_llama_architecture_interleaves_q_and_k(tmp_path: Path, whole_file: Path) -> None:
    qwen2 = open_checkpoint(str(write_gguf_model(tmp_path / "q.gguf", "qwen2")))
    assert all(entry.rope_permuted_heads == 0 for entry in qwen2.tensors.values())
    heads = {
        name.split("layers.1.")[1]: entry.rope_permuted_heads
        for name, entry in open_checkpoint(str(whole_file)).tensors.items()
        if "layers.1." in name and entry.rope_permuted_heads
    }
    assert heads == {"self_attn.q_proj.weight": HEADS, "self_attn.k_proj.weight": KV_HEADS}


def test_rope_frequencies_become_divisors_and_no_tensor(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    writer = model_writer(tmp_path / "m.gguf")
    writer.add_tensor("rope_freqs.weight", divisors)
    add_model_tensors(writer)
    finish(writer)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert checkpoint.spec.rope.frequency_divisors == tuple(divisors.tolist())
    assert set(checkpoint.tensors) == set(tensor_shapes())


def test_all_ids_that_end_a_turn_are_kept_and_sampling_settings_read(tmp_path: Path) -> None:
    writer = model_writer(tmp_path / "m.gguf")
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(6)
    writer.add_bos_token_id(4)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 7)
    add_model_tensors(writer)
    finish(writer)
    checkpoint = open_checkpoint(str(tmp_path / "m.gguf"))
    assert (checkpoint.spec.eos_token_ids, checkpoint.spec.bos_token_id) == ((5, 6), 4)
    assert (generation_defaults(checkpoint).temperature, generation_defaults(checkpoint).top_k) == (0.5, 7)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.expert_count", 8, "expert_count is 8, but no layer has experts"),
        ("llama.rope.dimension_count", 8, "8 of 16 dimensions"),
        ("llama.rope.scaling.type", "yarn", "'yarn'"),
        ("split.count", 3, "m.gguf is one of 3 files of a model.*m-00001-of-00003.gguf and so on"),
    ],
)
def test_models_that_would_answer_wrongly_are_refused(tmp_path: Path, key: str, value: Any, words: str) -> None:
    writer = model_writer(tmp_path / "m.gguf")
    writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    add_model_tensors(writer)
    finish(writer)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported.*llama, qwen2"):
        open_checkpoint(str(write_gguf_model(tmp_path / "m.gguf", "mamba")))
    with pytest.raises(CheckpointError, match=r"'glm4moe' is not supported in GGUF: GLM-4's mixture"):
        open_checkpoint(str(write_gguf_model(tmp_path / "m.gguf", "glm4moe")))


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    writer = model_writer(tmp_path / "m.gguf")
    add_model_tensors(writer)
    writer.add_tensor("blk.0.attn_q_norm.weight", np.ones(HEAD_DIM, dtype=np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q_norm\.weight"):
        open_checkpoint(str(tmp_path / "m.gguf"))


def test_an_unsupported_type_is_refused_by_name_with_the_list(tmp_path: Path) -> None:
    writer = model_writer(tmp_path / "m.gguf")
    raw = np.zeros((HIDDEN, 66), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)
    finish(writer)
    with pytest.raises(CheckpointError, match=r"type IQ2_XXS, which is not supported; supported are F32, .*Q6_K"):
        open_checkpoint(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGUF", "24 bytes"),
        (header(0, 0, version=1), "version 1"),
        (header(0, 0, version=3 << 24), "big-endian"),
        (header(2**62, 0), "cannot fit"),
        (header(0, 2**62), "cannot fit"),
        (header(0, 1) + struct.pack("<Q", 2**60) + bytes(64), "truncated or damaged"),
        (header(0, 1) + string("key") + struct.pack("<I", 99) + bytes(64), "value type 99"),
        (header(0, 1) + string("key") + struct.pack("<IIQ", 9, 8, 2**61) + bytes(64), "cannot fit"),
        (header(0, 1) + string("key") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(64), "cannot fit"),
        (header(0, 1) + string("key") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "not supported"),
        (header(0, 1) + string("key") + struct.pack("<IIQQ", 9, 8, 2, 2**63) + bytes(64), "truncated or damaged"),
        (header(1, 0) + string("t") + struct.pack("<I", 9) + bytes(64), "9 dimensions"),
        (header(1, 0) + string("t") + struct.pack("<IQIQ", 1, 2**63, 0, 0) + bytes(64), "truncated or damaged"),
        (header(1, 0) + string("t") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(64), "not a multiple of 32"),
    ],
)
def test_absurd_numbers_are_refused_without_allocating_for_them(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(path))


def test_a_file_cut_anywhere_is_refused(whole_file: Path, tmp_path: Path) -> None:
    data = whole_file.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(5, 600, 7), len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(str(path))


def test_a_truncated_file_gives_both_sizes_and_the_tensor(whole_file: Path, tmp_path: Path) -> None:
    data = whole_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[:-1000])
    sizes = f"{len(data)} bytes are needed, the file has {len(data) - 1000}"
    with pytest.raises(CheckpointError, match=f"tensor .*{sizes}"):
        open_checkpoint(str(path))


@settings(max_examples=400, deadline=None)
@given(position=st.integers(0, 2500), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless_but_never_a_crash(
    whole_file: Path, tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    data = bytearray(whole_file.read_bytes())
    data[position] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(data)
    try:
        checkpoint = open_checkpoint(str(path))
    except CheckpointError:
        return
    assert all(entry.offset_bytes + entry.num_bytes <= len(data) for entry in checkpoint.tensors.values())


def _stored(checkpoint: Checkpoint) -> dict[str, bytes]:
    found = {}
    for name, entry in checkpoint.tensors.items():
        with open(entry.file, "rb") as file:
            file.seek(entry.offset_bytes)
            found[name] = file.read(entry.num_bytes)
    return found


@pytest.mark.parametrize("beside", [[], ["config.json"], ["mmproj-model-f16.gguf", "Some.imatrix.gguf"]])
def test_a_folder_with_one_model_is_that_model(tmp_path: Path, beside: list[str]) -> None:
    whole = write_byte_level_gguf(tmp_path / "m.gguf", chat_template="{{ messages[0].content }}")
    for name in beside:
        (tmp_path / name).write_text("{}")
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint == open_checkpoint(str(whole))
    given = load_tokenizer(checkpoint, tokenizer=str(tmp_path))
    assert given.serialized() == load_tokenizer(checkpoint).serialized()


@pytest.mark.parametrize("named", ["first", "last", "folder"])
def test_a_model_in_several_files_is_the_same_model(tmp_path: Path, named: str) -> None:
    """The cache of the hub's own client has links for files; what lies beside a link counts, not beside its target."""
    whole = write_byte_level_gguf(tmp_path / "m.gguf", chat_template="{{ messages[0].content }}")
    folder = tmp_path / "links"
    folder.mkdir()
    for number, part in enumerate(split_gguf(whole, tmp_path / "blobs", 9)):
        target = part.rename(part.with_name(f"blob{number}"))
        (folder / part.name).symlink_to(target)
    parts = sorted(folder.iterdir())
    model = {"first": parts[0], "last": parts[-1], "folder": folder}[named]
    one, several = open_checkpoint(str(whole)), open_checkpoint(str(model))
    assert len(parts) == 4 and {entry.file for entry in several.tensors.values()} == set(map(str, parts))
    assert several.path == str(parts[0]) and several.is_gguf and several.spec == one.spec
    assert _stored(several) == _stored(one) and model_digest(several) == model_digest(one)
    layers = range(1, 3)
    assert stage_file_bytes(several, layers, False, True) == stage_file_bytes(one, layers, False, True)
    names = stage_tensor_names(several, layers, is_first=False, is_last=True)
    assert str(parts[1]) in {several.tensors[name].file for name in names}
    given = load_tokenizer(one, tokenizer=str(parts[-1]))
    for tokenizer in (load_tokenizer(several), given):
        assert tokenizer.serialized() == load_tokenizer(one).serialized()
        assert tokenizer.chat_template_sources == ["{{ messages[0].content }}"]


def test_the_first_file_may_have_metadata_alone_and_frequencies_of_rope_lie_in_any(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    writer = model_writer(tmp_path / "m.gguf")
    add_model_tensors(writer)
    writer.add_tensor("rope_freqs.weight", divisors)
    finish(writer)
    parts = split_gguf(tmp_path / "m.gguf", tmp_path / "parts", 20, is_first_without_tensors=True)
    several = open_checkpoint(str(parts[0]))
    assert several.spec.rope.frequency_divisors == tuple(divisors.tolist())
    assert {entry.file for entry in several.tensors.values()} == set(map(str, parts[1:]))
    assert _stored(several) == _stored(open_checkpoint(str(tmp_path / "m.gguf")))


def test_a_folder_of_several_models_is_not_guessed_from(tmp_path: Path, whole_file: Path) -> None:
    split_gguf(Path(shutil.copy(whole_file, tmp_path / "b.gguf")), tmp_path, 20)
    told = rf"has 2 GGUF models: b-00001-of-00002\.gguf \(2 files\), b\.gguf; give one .* as {tmp_path}/b-00001-of"
    for _ in range(2):
        with pytest.raises(CheckpointError, match=told):
            open_checkpoint(str(tmp_path))
        (tmp_path / "config.json").write_text("{}")


def _other_model(parts: list[Path], folder: Path, *, hidden: int = HIDDEN, has_head: bool = True) -> list[Path]:
    """Files of another model under the same names. Args: hidden: of its layers."""
    writer = model_writer(folder / "model.gguf")
    for name, shape in tensor_shapes(has_head).items():
        sizes = [hidden if size == HIDDEN else size for size in shape]
        writer.add_tensor(gguf_name(name), np.zeros(sizes, dtype=np.float32))
    finish(writer)
    return split_gguf(folder / "model.gguf", folder / "other", -(-len(tensor_shapes(has_head)) // len(parts)))


def _damage(fault: str, parts: list[Path], folder: Path) -> None:
    """To the second of three files, which are of 10 tensors each."""
    if fault == "missing":
        parts[1].unlink()
    elif fault == "all but one missing":
        parts[0].unlink()
        parts[2].unlink()
    elif fault == "truncated":
        parts[1].write_bytes(parts[1].read_bytes()[:-1000])
    elif fault == "another place":
        shutil.copy(parts[2], parts[1])
    elif fault == "twice":
        data = parts[1].read_bytes()
        parts[1].write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    elif fault == "another count":
        four = split_gguf(folder / "model.gguf", folder / "four", 8)
        shutil.copy(four[1], parts[1])
    elif fault == "another size":
        shutil.copy(_other_model(parts, folder / "..", hidden=32)[1], parts[1])
    elif fault == "another model's":
        shutil.copy(_other_model(parts, folder / "..", has_head=False)[1], parts[1])
    elif fault == "fewer tensors":
        for part in parts:
            key = b"split.tensors.count" + struct.pack("<I", 5)
            part.write_bytes(part.read_bytes().replace(key + struct.pack("<i", 30), key + struct.pack("<i", 31)))
    else:
        assert fault == "no part"
        shutil.copy(folder / "model.gguf", parts[1])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", r"parts has 2 of the model's 3 files; missing: model-00002-of-00003\.gguf$"),
        ("all but one missing", r"has 1 of the model's 3 files; missing: model-00001-of-00003\.gguf, model-00003-of"),
        ("truncated", r"2-of-00003\.gguf: truncated or damaged at tensor .*: \d+ bytes are needed, the file has \d+;"),
        ("another place", r"2-of-00003\.gguf: it is file 3 of 3 \(split\.no is 2\), but named file 2$"),
        ("twice", r"2-of-00003\.gguf: tensor blk\.0\.attn_q\.weight is there twice; first it is in model-00001-of-"),
        ("another count", r"2-of-00003\.gguf: it is one of 4 files \(split\.count\), but named one of 3$"),
        ("another size", r"2-of-00003\.gguf: tensor blk.* has shape .*32.*, but .* in model-00001-of.*64.*another m"),
        ("another model's", r"2-of-00003\.gguf: it is of a model of 29 tensors .*, but model-00001-of.* of one of 30$"),
        ("fewer tensors", r"1-of-00003\.gguf: the model has 31 tensors .* its 3 files have 30 \(10 \+ 10 \+ 10\)$"),
        ("no part", r"2-of-00003\.gguf: it is one of 1 files \(split\.count\), but named one of 3$"),
    ],
)
def test_files_that_make_no_whole_model_are_refused_with_names_and_numbers(
    tmp_path: Path, fault: str, words: str
) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    parts = split_gguf(write_gguf_model(folder / "model.gguf"), tmp_path / "parts", 10)
    assert len(parts) == 3 and open_checkpoint(str(parts[2]))
    _damage(fault, parts, folder)
    for model in parts[:1] if fault == "no part" else [part for part in parts if part.exists()]:
        with pytest.raises(CheckpointError, match=words) as told:
            open_checkpoint(str(model))
        assert "\n" not in str(told.value)


def test_smollm2_opens_with_its_published_shape(smollm2_gguf: Path) -> None:
    spec = open_checkpoint(str(smollm2_gguf)).spec
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (30, 576, 9, 3, 64)
    assert (spec.vocab_size, spec.rope.theta, spec.tie_word_embeddings) == (49152, 100000.0, True)
    assert spec.eos_token_ids == (2,)
