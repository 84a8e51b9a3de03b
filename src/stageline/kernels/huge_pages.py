"""Memory for packed weights and for the KV cache, in pages of 2 MiB where the system has them.

One idea: decoding streams every weight and every request's cache once per step, and with pages of 4 KiB finding the
next page costs a quarter of the bandwidth. One matrix is often smaller than a large page, so matrices lie one behind
the other in large runs.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys

import torch

_HUGE_PAGE_BYTES = 2**21
_RUN_BYTES = 2**26
_ALIGNMENT_BYTES = 64


class HugePages:
    """Hands out memory that lives as long as a tensor in it. Untouched memory costs nothing."""

    def __init__(self) -> None:
        self._run = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor on the CPU, aligned to cache lines."""
        num_bytes = math.prod(shape) * dtype.itemsize
        reserved = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if reserved > self._run.numel():
            self._run = zeroed_bytes(max(reserved, _RUN_BYTES))
        data, self._run = self._run[:num_bytes], self._run[reserved:]
        return data.view(dtype).view(shape)


def zeroed_bytes(num_bytes: int) -> torch.Tensor:
    """Zeroed memory that begins at a large page. The tensor keeps the mapping alive; untouched pages cost nothing.

    Returns: uint8 [num_bytes].
    Raises: MemoryError if the system refuses.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot map {num_bytes:,} bytes: {error}") from error
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a system built without large pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(mapping, dtype=torch.uint8)
    first = -data.data_ptr() % _HUGE_PAGE_BYTES
    return data[first : first + num_bytes]
