"""What a rank can do together with the other ranks of its stage, however they are joined.

One idea: every rank calls the same things in the same order, so nothing has a name or a number. A sum has the same bits
on every rank; so have then all activations, and whatever is decided by them.
"""

from __future__ import annotations

from typing import Protocol

import torch


class TensorParallel(Protocol):
    """One rank's end of its group. A rank that dies leaves the others waiting: who watches them ends them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, size], contiguous. Returns: the sum over the ranks."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns: [ranks, *x.shape], what each of them gave."""
        ...

    def broadcast(self, x: torch.Tensor) -> None:
        """x: contiguous; the first rank's numbers, afterwards everybody's."""
        ...


class Alone:
    """A stage of one rank."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def broadcast(self, x: torch.Tensor) -> None:
        pass


ALONE = Alone()


def alone(device: torch.device, dtype: torch.dtype) -> TensorParallel:
    """How a stage of one rank meets the others."""
    return ALONE
