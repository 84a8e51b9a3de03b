"""Activations of gated MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stageline import kernels


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 * size], gate first. Returns: silu(gate) * up, [rows, size]; silu is rounded before."""
    library = kernels.library(gate_up.device, gate_up.dtype)
    if library is not None:
        return library.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
