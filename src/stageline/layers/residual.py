"""Additions to the residual stream that no norm takes along: of rows, and of rows scaled by a model's factor."""

from __future__ import annotations

import torch

from stageline import kernels


def add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """x, residual: [rows, size], not changed. Returns: their sum."""
    library = kernels.library(x.device, x.dtype)
    return x + residual if library is None else library.add(x, residual)


def scale_(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x: [rows, size], multiplied in place unless the factor is 1. Returns: x."""
    if factor == 1.0:
        return x
    library = kernels.library(x.device, x.dtype)
    return x.mul_(factor) if library is None else library.scale_(x, factor)
