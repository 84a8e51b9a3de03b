"""Recorded blocks compute what the blocks themselves do, bit for bit; what cannot be recorded runs as it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stageline import kernels
from stageline.attention.select import select_backend
from stageline.checkpoint import open_checkpoint
from stageline.kernels.cpu import CpuKernels
from stageline.kernels.program import Argument, CannotRecord, Recording, result
from stageline.models.decoder import DecoderStage
from stageline.models.recorded_blocks import RecordedBlocks
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.weights.reader import CheckpointReader
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from tests.model.kernel_variants import load_or_skip
from tests.model.requests_under_test import RequestsUnderTest
from tests.tiny_models import TinyModel

CPU = torch.device("cpu")
MAX_TOKENS = 96
NUM_LAYERS = 3
# Several requests at once, prompts and decodes, one token and as many as there may be.
MICROBATCHES = [{0: 7}, {0: 1, 1: 40}, {0: 1, 1: 1, 2: 94}, {2: 1}, {0: 1, 1: 1, 2: 1}, {3: 96}, {0: 33, 3: 1}]
MODELS = {
    "llama": TinyModel(num_layers=NUM_LAYERS, dtype="bfloat16"),
    "biases": TinyModel(num_layers=NUM_LAYERS, dtype="bfloat16", attention_bias=True, mlp_bias=True),
    "window": TinyModel(num_layers=NUM_LAYERS, dtype="bfloat16", architecture="mistral", sliding_window=20),
    "odd heads": TinyModel(num_layers=NUM_LAYERS, dtype="bfloat16", num_heads=2, num_kv_heads=1, head_dim=10),
}


def make_stage(path: Path, dtype: torch.dtype) -> tuple[DecoderStage, RequestsUnderTest, InputBuffers]:
    spec = open_checkpoint(str(path)).spec
    limits = MicrobatchLimits(64, 16, spec.vocab_size, 8, MAX_TOKENS, 512)
    with CheckpointReader(open_checkpoint(str(path)), dtype, CPU) as reader:
        stage = DecoderStage(spec, range(1, NUM_LAYERS), reader, select_backend(CPU), 512)
    stage.use(allocate_kv_tensors(spec, NUM_LAYERS - 1, 64, 16, dtype, CPU), MAX_TOKENS)
    requests = RequestsUnderTest(limits)
    for number in range(4):
        requests.add(number, list(range(200)))
    return stage, requests, InputBuffers(limits, CPU)


@torch.inference_mode()
def outputs(path: Path, without_recording: bool) -> list[torch.Tensor]:
    stage, requests, buffers = make_stage(path, torch.bfloat16)
    assert stage._recorded is not None
    if without_recording:
        stage._recorded = None
    generator = torch.Generator().manual_seed(1)
    found = []
    for rows in MICROBATCHES:
        microbatch = requests.microbatch(rows)
        hidden = torch.randn(microbatch.num_tokens, 64, generator=generator).bfloat16()
        found.append(stage.forward(hidden, buffers.apply_and_build(microbatch)).clone())
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_recorded_blocks_give_the_blocks_own_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_threads: int
) -> None:
    for variant in ("avx512", "avx2"):
        load_or_skip(variant)
        path = MODELS[name].write(tmp_path / variant)
        monkeypatch.setenv("STAGELINE_KERNELS", variant)
        kernels.library.cache_clear()
        torch.set_num_threads(num_threads)
        try:
            recorded, written = outputs(path, False), outputs(path, True)
        finally:
            torch.set_num_threads(1)
            kernels.library.cache_clear()
        assert all(torch.equal(one, other) for one, other in zip(recorded, written, strict=True))


def test_recorded_blocks_tell_when_each_block_is_done(tmp_path: Path) -> None:
    stage, requests, buffers = make_stage(MODELS["llama"].write(tmp_path), torch.bfloat16)
    assert stage._recorded is not None
    hidden, told = torch.ones(4, 64).bfloat16(), []
    with torch.inference_mode():
        metadata = buffers.apply_and_build(requests.microbatch({0: 4}))
        at_once = stage.forward(hidden, metadata)
        piece_by_piece = stage.forward(hidden, metadata, lambda: told.append(None))
    assert torch.equal(at_once, piece_by_piece) and len(told) == 1 + NUM_LAYERS - 1


def test_what_torch_computes_is_not_recorded(tmp_path: Path) -> None:
    """In float32 linear layers are torch's."""
    stage, _, _ = make_stage(MODELS["llama"].write(tmp_path), torch.float32)
    assert stage._recorded is None


def test_an_output_is_not_overwritten_by_the_next_microbatch(tmp_path: Path) -> None:
    stage, requests, buffers = make_stage(MODELS["llama"].write(tmp_path), torch.bfloat16)
    with torch.inference_mode():
        first = stage.forward(torch.ones(8, 64).bfloat16(), buffers.apply_and_build(requests.microbatch({0: 8})))
        kept = first.clone()
        stage.forward(-torch.ones(8, 64).bfloat16(), buffers.apply_and_build(requests.microbatch({1: 8})))
    assert torch.equal(first, kept)


def test_a_released_cache_is_not_held(tmp_path: Path) -> None:
    stage, _, _ = make_stage(MODELS["llama"].write(tmp_path), torch.bfloat16)
    assert isinstance(stage._recorded, RecordedBlocks)
    stage.release()
    assert stage._recorded is None and not stage._caches


@pytest.fixture
def library() -> CpuKernels:
    found = kernels.library(CPU, torch.bfloat16)
    if found is None:
        pytest.skip("there is no C++ compiler here")
    return found


def record(run: Callable[[torch.Tensor], object]) -> Recording:
    x = torch.randn(5, 32).bfloat16()
    recording = Recording({Argument.NUM_TOKENS: 5}, [x])
    with torch.inference_mode(), recording.active():
        run(x)
    return recording


def test_a_number_of_rows_that_is_not_the_microbatch_s_cannot_be_recorded(library: CpuKernels) -> None:
    with pytest.raises(CannotRecord, match="tokens of the microbatch"):
        record(lambda x: library.silu_and_mul(x[:3]))


def test_a_part_of_an_input_cannot_be_recorded(library: CpuKernels) -> None:
    x = torch.randn(6, 32).bfloat16()
    recording = Recording({Argument.NUM_TOKENS: 5}, [x])
    with recording.active(), pytest.raises(CannotRecord, match="part of an input"):
        library.silu_and_mul(x[1:])


def test_a_kernel_that_cannot_be_called_by_words_cannot_be_recorded(library: CpuKernels) -> None:
    with pytest.raises(CannotRecord, match="argmax"):
        record(lambda x: library._argmax(x.data_ptr(), None, 5, 32, 1))


def test_nothing_is_recorded_after_a_recording_that_failed(library: CpuKernels) -> None:
    with pytest.raises(CannotRecord):
        record(lambda x: x + x)
    x = torch.randn(2, 8).bfloat16()
    assert torch.equal(library.silu_and_mul(x), library.silu_and_mul(x.clone()))


def test_memory_is_used_again_when_nothing_lies_in_it_and_not_before() -> None:
    addresses = []

    def run(x: torch.Tensor) -> None:
        kept = result((5, 8), torch.bfloat16)
        view = result((5, 8), torch.bfloat16).view(10, 4)[2:]
        addresses.append(view.data_ptr())
        other = result((5, 8), torch.bfloat16)
        assert len({kept.data_ptr(), view.untyped_storage().data_ptr(), other.data_ptr()}) == 3
        del view
        assert result((5, 8), torch.bfloat16).data_ptr() == addresses[0] - 2 * 4 * 2

    record(run)


def test_a_program_of_many_layers_needs_no_more_memory_than_one_of_few(library: CpuKernels) -> None:
    def num_runs(num_layers: int) -> int:
        def run(x: torch.Tensor) -> None:
            for _ in range(num_layers):
                x = library.silu_and_mul(torch.as_strided(library.silu_and_mul(x), (5, 16), (16, 1)))
                x = result((5, 32), torch.bfloat16)

        return len(record(run).memory._all)

    assert num_runs(3) == num_runs(30) > 1
