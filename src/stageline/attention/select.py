"""Which way of computing attention a device gets."""

from __future__ import annotations

import torch

from stageline.attention.backend import AttentionBackend
from stageline.attention.torch_paged import TorchPagedAttention


def select_backend(device: torch.device) -> AttentionBackend:
    """The fastest backend that runs on `device`."""
    return TorchPagedAttention(device)
