"""Activations of gated MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stageline import kernels

SILU, GELU_TANH = "silu", "gelu_tanh"
"""As `ModelSpec.activation` spells them."""


def activate_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate_up: [rows, 2 * size], gate first. Returns: activation(gate) * up, [rows, size]; rounded between the two."""
    library = kernels.library(gate_up.device, gate_up.dtype)
    if library is not None:
        return library.silu_and_mul(gate_up) if activation == SILU else library.gelu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == SILU else F.gelu(gate, approximate="tanh")).mul_(up)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 * size], gate first. Returns: silu(gate) * up, [rows, size]; silu is rounded before."""
    return activate_and_mul(gate_up, SILU)
