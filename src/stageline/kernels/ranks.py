"""What ranks of one machine compute together, through memory that they share. Checked here, not in C++.

One idea: the sum over ranks is a kernel like any other, so a layer with it can be recorded like any other.
"""

from __future__ import annotations

from ctypes import addressof, c_int64
from typing import Any

import torch

from stageline.kernels.program import Argument, Kernel, result
from stageline.pipeline.rank_memory import SLOT_BYTES, shared_bytes

_POINTER, _SIZE, _FLAG = Argument.POINTER, Argument.SIZE, Argument.FLAG
SIGNATURES: dict[str, list[Argument]] = {
    "all_reduce": [_POINTER] * 3 + [Argument.NUM_TOKENS, _SIZE, _FLAG],
    "all_gather": [_POINTER] * 3 + [_SIZE],
    "broadcast": [_POINTER] * 2 + [_SIZE],
}
RECORDABLE = ("all_reduce",)


class RankKernels:
    """One variant's functions. Args: functions: by name, as in SIGNATURES."""

    def __init__(self, functions: dict[str, Kernel]) -> None:
        self._all_reduce = functions["all_reduce"]
        self._all_gather = functions["all_gather"]
        self._broadcast = functions["broadcast"]

    def group(self, memory: torch.Tensor, rank: int, num_ranks: int) -> RankGroup:
        """memory: uint8, the same for all ranks of the group, of `shared_bytes`."""
        assert memory.dtype == torch.uint8 and memory.numel() >= shared_bytes(num_ranks)
        assert 0 <= rank < num_ranks and memory.data_ptr() % 64 == 0
        return RankGroup(self._all_reduce, self._all_gather, self._broadcast, memory, rank, num_ranks)


class RankGroup:
    """This rank's end of a group. All ranks call the same things in the same order, with the same sizes."""

    def __init__(
        self, all_reduce: Kernel, all_gather: Kernel, broadcast: Kernel, memory: torch.Tensor, rank: int, num_ranks: int
    ) -> None:
        self._all_reduce, self._all_gather, self._broadcast = all_reduce, all_gather, broadcast
        self._memory = memory
        self._num_ranks = num_ranks
        self._group: Any = (c_int64 * 4)(memory.data_ptr(), rank, num_ranks, SLOT_BYTES)
        self._address = addressof(self._group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, size], float32 or bfloat16. Returns: the sum over the ranks, rounded once; bit for bit the same on
        each of them."""
        assert x.is_contiguous() and x.dtype in (torch.float32, torch.bfloat16)
        rows, size = x.shape
        total = result((rows, size), x.dtype)
        is_bf16 = x.dtype == torch.bfloat16
        self._all_reduce(self._address, x.data_ptr(), total.data_ptr(), rows, size, is_bf16)
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns: [ranks, *x.shape], what each of them gave."""
        x = x.contiguous()
        out = torch.empty((self._num_ranks, *x.shape), dtype=x.dtype)
        self._all_gather(self._address, x.data_ptr(), out.data_ptr(), x.nbytes)
        return out

    def broadcast(self, x: torch.Tensor) -> None:
        """x: contiguous; the first rank's numbers, afterwards everybody's."""
        assert x.is_contiguous()
        self._broadcast(self._address, x.data_ptr(), x.nbytes)
