"""Ranks joined by torch's own process groups: NCCL where stages compute on CUDA, gloo where there are no CPU kernels.

One idea: they find one another by a file in the pipeline's own folder, so no port is open before they talk.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from stageline.parallel.rank_gone import telling_of_a_lost_rank

_PATIENCE = timedelta(days=1)
"""Whoever watches the ranks notices a lost one, and ends the others; torch's own limit would end idle ones."""


class ProcessGroupRanks:
    """See `stageline.parallel.tensor_parallel.TensorParallel`.

    Args:
        meeting_file: a path where nothing is yet, the same for all ranks; it is theirs from now on.
        device: this rank's. Ranks on CUDA have a device each.
    """

    def __init__(self, meeting_file: str, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._group = _join(meeting_file, rank, size, device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        with telling_of_a_lost_rank():
            self._group.allreduce([total]).wait()
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with telling_of_a_lost_rank():
            self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.stack(parts)

    def broadcast(self, x: torch.Tensor) -> None:
        with telling_of_a_lost_rank():
            self._group.broadcast(x, 0).wait()


def _join(meeting_file: str, rank: int, size: int, device: torch.device) -> Any:
    """torch's group; its classes are not typed."""
    group: Any = distributed_c10d
    store = dist.FileStore(meeting_file, size)  # type: ignore[attr-defined]
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = group.ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        return group.ProcessGroupNCCL(store, rank, size, options)
    options = group.ProcessGroupGloo._Options()
    options._devices = [group.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _PATIENCE
    return group.ProcessGroupGloo(store, rank, size, options)
