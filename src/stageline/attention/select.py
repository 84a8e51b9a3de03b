"""Which way of computing attention a device gets."""

from __future__ import annotations

import torch

from stageline import kernels
from stageline.attention.backend import AttentionBackend
from stageline.attention.cpu_kernels import CpuKernelAttention
from stageline.attention.torch_paged import TorchPagedAttention


def select_backend(device: torch.device) -> AttentionBackend:
    """The fastest backend that runs on `device`. On a CPU caches are bfloat16 or float32: float16 is not used there."""
    library = kernels.library(device, torch.bfloat16)
    return TorchPagedAttention(device) if library is None else CpuKernelAttention(library)
