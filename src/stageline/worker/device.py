"""The one place that knows devices: which one a stage runs on, its free memory, its dtype, its threads."""

from __future__ import annotations

import math
import resource
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import psutil
import torch

from stageline.errors import ConfigError
from stageline.kernels.huge_pages import zeroed_bytes

_CGROUP = Path("/sys/fs/cgroup")
_CACHE_LINE_BYTES = 64


def resolve_device(asked: str, stage_index: int = 0) -> torch.device:
    """The device of a stage; stages of one host take its GPUs in turn.

    Args:
        asked: "auto" (CUDA if there is any), "cpu" or "cuda".
    Raises: ConfigError if CUDA is asked for and there is none.
    """
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device here; use --device cpu or auto")
    return torch.device("cuda", stage_index % torch.cuda.device_count())


def resolve_dtype(asked: str, checkpoint_dtype: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The compute dtype, and a note for the log if it is not what was asked for (empty if it is).

    Args:
        asked: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
    """
    name = checkpoint_dtype if asked == "auto" else asked
    if name == "float16" and device.type == "cpu":
        return torch.bfloat16, "float16 is slow on a CPU: computing in bfloat16 (--dtype float32 for more precision)"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name], ""


def free_memory_bytes(device: torch.device) -> int:
    """Memory that could be allocated now: the device's, or the host's within this process's and its group's limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = int(psutil.virtual_memory().available)
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        available = max(0, min(available, addresses - psutil.Process().memory_info().vms))
    limit = _read_cgroup("memory.max")
    if not limit.isdigit():
        return available
    used = int(_read_cgroup("memory.current") or 0)
    return max(0, min(available, int(limit) - used + _reclaimable_bytes()))


def _reclaimable_bytes() -> int:
    """The control group's share of the page cache."""
    for line in _read_cgroup("memory.stat").splitlines():
        name, _, count = line.partition(" ")
        if name == "file":
            return int(count)
    return 0


def _read_cgroup(name: str) -> str:
    try:
        return (_CGROUP / name).read_text().strip()
    except OSError:
        return ""


def zeros(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Zeroed tensors. On a CPU they lie one behind the other in large pages, which cost nothing before they are used,
    page by page; `torch.zeros` would touch all of them.

    Raises: MemoryError, or torch's own error, if there is not so much.
    """
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    ends = list(accumulate(-(-size // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES for size in sizes))
    run = zeroed_bytes(ends[-1] if ends else 0)
    parts = [run[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]
    return [part.view(dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]


def synchronise(device: torch.device) -> None:
    """Wait until everything launched on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def set_threads(num_threads: int) -> None:
    """Threads that one operation may use on the CPU, in this process."""
    torch.set_num_threads(num_threads)
