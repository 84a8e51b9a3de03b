"""How a stage's rank meets the others: through memory on a CPU, by torch's process groups elsewhere."""

from __future__ import annotations

import torch

from stageline import kernels
from stageline.executor.messages import WorkerConfig, meeting_file
from stageline.parallel.shared_memory import SharedMemoryRanks, map_memory
from stageline.parallel.tensor_parallel import ALONE, TensorParallel


class RanksMeeting:
    """A stage's ranks meet once, however often they are asked for."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._met: TensorParallel | None = None

    def __call__(self, device: torch.device, dtype: torch.dtype) -> TensorParallel:
        """Returns when all are there."""
        self._met = self._met or _meet(self._config, device, dtype)
        return self._met


def _meet(config: WorkerConfig, device: torch.device, dtype: torch.dtype) -> TensorParallel:
    if config.num_ranks == 1:
        return ALONE
    library = kernels.library(device, dtype)
    if library is None or config.ranks_fd < 0:
        from stageline.parallel.process_group import ProcessGroupRanks  # importing it takes a while

        place = meeting_file(config.socket_folder, config.stage_index)
        return ProcessGroupRanks(place, config.rank, config.num_ranks, device)
    return SharedMemoryRanks(library, map_memory(config.ranks_fd, config.num_ranks), config.rank, config.num_ranks)
