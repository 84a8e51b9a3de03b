"""A chain of stages whose layers are shared by ranks: threads of this process, joined as ranks' processes are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from stageline import kernels
from stageline.attention.select import select_backend
from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.tensor_shards import RankCuts, as_shared, rank_spec
from stageline.models.decoder import DecoderStage
from stageline.parallel.shared_memory import SharedMemoryRanks
from stageline.parallel.tensor_parallel import ALONE, TensorParallel
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.pipeline.rank_memory import shared_bytes
from stageline.weights.reader import CheckpointReader
from stageline.weights.shard import ShardedReader
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from tests.model.chain import CPU
from tests.model.requests_under_test import RequestsUnderTest

DEADLINE_S = 60
Result = TypeVar("Result")


def in_ranks(size: int, work: Callable[[TensorParallel], Result]) -> list[Result]:
    """What `work` returns on each rank. A rank that fails leaves the others waiting, so it is waited for with a
    deadline; the threads are the interpreter's to end."""
    library = kernels.load_kernels("auto")
    if library is None:
        pytest.skip("no compiled kernels")
    memory = torch.zeros(shared_bytes(size) + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :]
    pool = ThreadPoolExecutor(size)
    running = [pool.submit(work, SharedMemoryRanks(library, memory, rank, size)) for rank in range(size)]
    try:
        return [future.result(DEADLINE_S) for future in running]
    finally:
        pool.shutdown(wait=False)


class SharedChain:
    """As `Chain`, with so many ranks for each stage.

    Attributes:
        num_bytes_read: by each rank of each stage.
    """

    def __init__(
        self,
        path: Path,
        cuts: list[range],
        sizes: list[int],
        dtype: torch.dtype = torch.float32,
        keeps_quantized: bool = False,
        deals_experts: bool = False,
    ) -> None:
        self.checkpoint = as_shared(open_checkpoint(str(path)), deals_experts)
        self.spec = self.checkpoint.spec
        self.limits = MicrobatchLimits(64, 16, self.spec.vocab_size, 8, 512, 128)
        self.requests = RequestsUnderTest(self.limits)
        self._dtype, self._keeps_quantized = dtype, keeps_quantized
        self.num_bytes_read: list[list[int]] = []
        self.stages = [self._build(layers, size) for layers, size in zip(cuts, sizes, strict=True)]
        self.buffers = [InputBuffers(self.limits, CPU) for _ in cuts]

    def _build(self, layers: range, size: int) -> list[DecoderStage]:
        read = [0] * size

        @torch.inference_mode()
        def build(ranks: TensorParallel) -> DecoderStage:
            with CheckpointReader(
                self.checkpoint, self._dtype, CPU, keeps_quantized=self._keeps_quantized
            ) as whole:
                reader = ShardedReader(whole, RankCuts(self.spec, ranks.rank, size))
                stage = DecoderStage(self.spec, layers, reader, select_backend(CPU), 128, ranks)
                read[ranks.rank] = whole.num_bytes_read
            spec = rank_spec(self.spec, size)
            stage.use(allocate_kv_tensors(spec, len(layers), 64, 16, self._dtype, CPU), max_tokens=512)
            return stage

        self.num_bytes_read.append(read)
        return [build(ALONE)] if size == 1 else in_ranks(size, build)

    def run(self, rows: dict[int, int]) -> dict[int, torch.Tensor]:
        """Returns: logits of the scheduled tokens, [tokens, vocab] per request; the same on every rank."""
        microbatch = self.requests.microbatch(rows)
        hidden = torch.tensor(microbatch.token_ids)
        for stage, buffers in zip(self.stages, self.buffers, strict=True):
            metadata = buffers.apply_and_build(microbatch)

            @torch.inference_mode()
            def forward(rank: int) -> torch.Tensor:
                output = stage[rank].forward(hidden.clone(), metadata)  # noqa: B023
                return stage[rank].logits(output) if stage[rank].is_last else output.clone()  # noqa: B023

            outputs = _together(len(stage), forward)
            assert all(torch.equal(output, outputs[0]) for output in outputs), "ranks differ"
            hidden = outputs[0]
        return dict(zip(microbatch.request_numbers, hidden.split(microbatch.num_scheduled_tokens), strict=True))


def _together(size: int, work: Callable[[int], Result]) -> list[Result]:
    if size == 1:
        return [work(0)]
    pool = ThreadPoolExecutor(size)
    running = [pool.submit(work, rank) for rank in range(size)]
    try:
        return [future.result(DEADLINE_S) for future in running]
    finally:
        pool.shutdown(wait=False)
