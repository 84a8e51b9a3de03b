"""Ranks of one machine, on its CPU, joined by memory that they share; see `stageline.kernels.ranks`."""

from __future__ import annotations

import mmap
import os

import torch

from stageline.kernels.cpu import CpuKernels
from stageline.pipeline.rank_memory import shared_bytes


class SharedMemoryRanks:
    """See `stageline.parallel.tensor_parallel.TensorParallel`; for tensors on the CPU in float32 or bfloat16.

    Args:
        memory: uint8, the same for all ranks, from `map_memory` or of one process.
    """

    def __init__(self, library: CpuKernels, memory: torch.Tensor, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = library.ranks.group(memory, rank, size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.all_gather(x)

    def broadcast(self, x: torch.Tensor) -> None:
        self._group.broadcast(x)


def map_memory(fd: int, size: int) -> torch.Tensor:
    """The memory behind a file that is as long as `shared_bytes` asks for, zeroed. Closes `fd`."""
    try:
        return torch.frombuffer(mmap.mmap(fd, shared_bytes(size)), dtype=torch.uint8)
    finally:
        os.close(fd)
