"""A GGUF file with experts answers as `transformers` does, in stages and by ranks; each reads its own experts only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from stageline.checkpoint import Checkpoint, open_checkpoint, stage_file_bytes, stage_weight_bytes
from stageline.checkpoint.checkpoint import TensorEntry
from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.encodings import ENCODINGS
from stageline.checkpoint.stage_tensors import can_stay_quantized, packed_bytes
from stageline.checkpoint.tensor_shards import RankCuts, as_shared
from stageline.errors import CheckpointError
from stageline.kernels.quantized import QuantizedMatrix
from stageline.weights.reader import CheckpointReader
from stageline.weights.shard import ShardedReader
from tests.model.chain import CPU, PROMPTS, Chain, cut, logits_in_mixed_batches
from tests.model.family_reference import CUTS, References, assert_near
from tests.model.gguf_expert_files import MODELS, Types, write_file
from tests.model.ranks_under_test import SharedChain
from tests.unit.checkpoint_files import split_gguf

QUANTIZED = {
    "llama": [Types("Q8_0"), Types("Q4_0"), Types("F16")],
    "qwen2moe": [Types("Q4_0", {"ffn_down": "Q8_0"})],
    "qwen3moe": [Types("Q8_0", {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0"})],
    "deepseek2": [Types("Q8_0", {"attn_k_b": "Q4_0", "attn_q_b": "Q4_1"}), Types("Q8_0", {"attn_q_a": "Q5_1"})],
    "deepseek2 of V2 Lite": [Types("Q8_0", {"attn_q": "Q4_0"})],
    "gpt-oss": [Types("Q8_0", {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "MXFP4"})],
}
EVERY_TYPE = [(name, types) for name, all_types in QUANTIZED.items() for types in all_types]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References({name: model.tiny for name, model in MODELS.items()}, tmp_path_factory)


@pytest.fixture
def written(tmp_path: Path, reference: References) -> Callable[[str, Types], Path]:
    def write(architecture: str, types: Types) -> Path:
        name = f"{types.usual}-{types.as_numbers}.gguf"
        return write_file(reference(architecture).path, tmp_path / name, architecture, types)

    return write


@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_those_of_transformers(
    architecture: str, reference: References, written: Callable[[str, Types], Path]
) -> None:
    expected, path = reference(architecture), written(architecture, Types())
    chain = Chain(path, CUTS[1])
    one_stage = logits_in_mixed_batches(chain)
    two_stages = logits_in_mixed_batches(Chain(path, CUTS[2]))
    for number in PROMPTS:
        assert_near(one_stage[number], expected.logits[number])
        assert torch.equal(two_stages[number], one_stage[number])
    assert chain.num_bytes_read == sum(entry.num_bytes for entry in open_checkpoint(str(path)).tensors.values())
    for deals_experts in (False, True):
        shared = SharedChain(path, cut(1, 3), [1, 2], deals_experts=deals_experts)
        found = logits_in_mixed_batches(shared)
        for number in PROMPTS:
            assert_near(found[number], expected.logits[number])
        opened = as_shared(open_checkpoint(str(path)), deals_experts)
        counted = stage_file_bytes(opened, range(1, 4), False, True, num_ranks=2)
        assert shared.num_bytes_read[1][0] == counted
        assert counted < 0.6 * stage_file_bytes(opened, range(1, 4), False, True)


@pytest.mark.parametrize(("architecture", "types"), EVERY_TYPE)
def test_quantised_files_answer_like_what_their_numbers_stand_for(
    architecture: str, types: Types, written: Callable[[str, Types], Path]
) -> None:
    path = written(architecture, types)
    numbers = written(architecture, Types(types.usual, types.special, as_numbers=True))
    exact = logits_in_mixed_batches(Chain(numbers, cut(4)))
    found = logits_in_mixed_batches(Chain(path, cut(1, 3)))
    assert all(torch.equal(found[number], exact[number]) for number in PROMPTS)
    if types.usual == "F16":
        assert open_checkpoint(str(path)).spec.dtype == "float16"
    if types.usual == "F16":
        return
    # Rounding what is multiplied to eight bits makes some tokens choose another expert, which later ones then see; a
    # wrong matrix would leave none near.
    for ranks, deals_experts in ((1, False), (2, False), (2, True)):
        kept = SharedChain(path, cut(4), [ranks], keeps_quantized=True, deals_experts=deals_experts)
        rounded = logits_in_mixed_batches(kept)
        errors = [(rounded[n] - exact[n]).norm(dim=-1) / exact[n].norm(dim=-1) for n in PROMPTS]
        assert 1e-4 < torch.cat(errors).quantile(0.25) < 0.06, (ranks, deals_experts)


def test_experts_stay_quantised_as_a_whole_and_memory_counts_it(written: Callable[[str, Types], Path]) -> None:
    """One layer's experts cannot stay as they are, because one matrix of each cannot."""
    path = written("qwen2moe", Types("Q8_0", {"ffn_up_exps": "Q5_1"}))
    checkpoint = open_checkpoint(str(path))
    experts = [entry for entry in checkpoint.tensors.values() if ".experts." in entry.name]
    assert len(experts) == 3 * 6 * 3
    assert not any(can_stay_quantized(entry) for entry in experts)
    num_bytes = 0
    with CheckpointReader(checkpoint, torch.bfloat16, CPU, keeps_quantized=True) as reader:
        for name, entry in checkpoint.tensors.items():
            read = reader.read_matrix if len(entry.shape) == 2 else reader.read
            weight = read(name, entry.shape)  # type: ignore[arg-type]
            num_bytes += packed_bytes(entry) if isinstance(weight, QuantizedMatrix) else 2 * weight.numel()
    assert num_bytes == stage_weight_bytes(checkpoint, range(4), True, True, 2, keeps_quantized=True)
    chain = Chain(path, cut(4), torch.bfloat16, keeps_quantized=True)
    assert logits_in_mixed_batches(chain)[0].isfinite().all()


def test_files_with_a_tensor_for_each_expert_are_read_too(
    reference: References, written: Callable[[str, Types], Path]
) -> None:
    path = written("llama", Types(one_by_one=True))
    found = logits_in_mixed_batches(SharedChain(path, cut(4), [2], deals_experts=True))
    for number in PROMPTS:
        assert_near(found[number], reference("llama").logits[number])


@pytest.mark.parametrize("architecture", QUANTIZED)
def test_experts_in_several_files_are_the_same_experts(
    architecture: str, written: Callable[[str, Types], Path], tmp_path: Path
) -> None:
    """Each tensor that becomes an entry for each expert lies in another of the files."""
    path = written(architecture, QUANTIZED[architecture][0])
    one, several = open_checkpoint(str(path)), open_checkpoint(str(split_gguf(path, tmp_path / "parts", 9)[0]))
    assert len({entry.file for entry in several.tensors.values()}) > 2
    assert several.spec == one.spec and model_digest(several) == model_digest(one)
    readers = [CheckpointReader(checkpoint, torch.float32, CPU) for checkpoint in (one, several)]
    with readers[0], readers[1]:
        for name, entry in one.tensors.items():
            assert torch.equal(readers[0].read(name, entry.shape), readers[1].read(name, entry.shape)), name


def test_stacks_of_another_number_of_experts_are_refused(
    written: Callable[[str, Types], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS["qwen3moe"].metadata, "expert_count", 5)
    with pytest.raises(CheckpointError, match=r"ffn_\w+_exps.weight has shape \[6, (64, 96|96, 64)\].* needs 5"):
        open_checkpoint(str(written("qwen3moe", Types())))
    monkeypatch.setitem(MODELS["qwen3moe"].metadata, "expert_count", 6)
    monkeypatch.setitem(MODELS["qwen3moe"].metadata, "expert_feed_forward_length", 80)
    with pytest.raises(CheckpointError, match=r"expert_feed_forward_length is 80, .* experts of 64"):
        open_checkpoint(str(written("qwen3moe", Types())))


def zeros_of(path: Path, spec_of: Path, encoding: str, shape: tuple[int, int], count: int) -> Checkpoint:
    """So many experts' matrices to the layer's inner numbers' side, all zeros."""
    num_bytes = ENCODINGS[encoding].num_bytes(shape[0] * shape[1])
    with path.open("wb") as file:
        file.truncate(num_bytes * count)
    names = [f"model.layers.0.mlp.experts.{index}.down_proj.weight" for index in range(count)]
    entries = [
        TensorEntry(name, str(path), index * num_bytes, num_bytes, shape, encoding, name)
        for index, name in enumerate(names)
    ]
    return Checkpoint(str(path), open_checkpoint(str(spec_of)).spec, {entry.name: entry for entry in entries})


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell what is resident")
def test_many_small_matrices_take_the_memory_that_is_counted(
    tmp_path: Path, written: Callable[[str, Types], Path]
) -> None:
    """What each was read into is used again for the next; malloc would keep it all, which is as much again."""
    shape = (768, 2048)
    checkpoint = zeros_of(tmp_path / "zeros", written("qwen3moe", Types()), "Q4_K", shape, 40)
    counted = sum(packed_bytes(entry) for entry in checkpoint.tensors.values())
    before = resident_bytes()
    with CheckpointReader(checkpoint, torch.bfloat16, CPU, keeps_quantized=True) as reader:
        matrices = [reader.read_matrix(name, shape) for name in checkpoint.tensors]
        assert all(isinstance(matrix, QuantizedMatrix) for matrix in matrices)
        assert resident_bytes() - before < 1.5 * counted


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_rank_keeps_nothing_of_a_matrix_but_its_part(tmp_path: Path, written: Callable[[str, Types], Path]) -> None:
    """Blocks of 256 numbers cross the edge between two ranks, so the whole matrix is read first."""
    checkpoint = zeros_of(tmp_path / "zeros", written("qwen3moe", Types()), "Q4_K", (64, 768), 1)
    moe = checkpoint.spec.moe
    assert moe is not None
    spec = replace(checkpoint.spec, moe=replace(moe, intermediate_size=768))
    with CheckpointReader(checkpoint, torch.bfloat16, CPU, keeps_quantized=True) as whole:
        name = next(iter(checkpoint.tensors))
        ShardedReader(whole, RankCuts(spec, 0, 2)).read_matrix(name, (64, 384))
        free = whole.packed_memory._run.numel()
        part = ShardedReader(whole, RankCuts(spec, 1, 2)).read_matrix(name, (64, 384))
        assert isinstance(part, QuantizedMatrix) and part.shape == (64, 384)
        assert free - whole.packed_memory._run.numel() == part.num_bytes
