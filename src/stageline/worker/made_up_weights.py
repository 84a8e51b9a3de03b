"""Weights that mean nothing, for stages that are only timed: a product takes as long with any numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LARGEST_WEIGHT = 0.05


class MadeUpWeights:
    """See `stageline.models.family.WeightReader`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.read_float32(name, shape).to(self.dtype)

    def read_float32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device).uniform_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT)

    def read_part(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        return self.read(name, shape[1:])

    def read_transposed_part(
        self, name: str, shape: tuple[int, int, int], index: int, runs: Sequence[slice]
    ) -> list[torch.Tensor]:
        transposed = self.read(name, (shape[2], shape[1]))
        return [transposed[rows] for rows in runs]

    def read_matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        return self.read(name, shape)
