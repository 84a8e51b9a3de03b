"""Which process is which rank of which stage. One idea: processes count on from stage to stage, ranks within one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class StageRank:
    """One of the ranks that share a stage's layers."""

    stage_index: int
    rank: int


class RankLayout:
    """The processes of one pipeline.

    Args:
        sizes: how many ranks share each stage's layers.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.leaders = [0, *accumulate(self.sizes)][:-1]
        """The process that is each stage's first rank."""
        self.all = [StageRank(stage, rank) for stage, size in enumerate(self.sizes) for rank in range(size)]

    @property
    def num_processes(self) -> int:
        return len(self.all)

    def has(self, stage_index: int, rank: int) -> bool:
        return 0 <= stage_index < len(self.sizes) and 0 <= rank < self.sizes[stage_index]

    def process_of(self, stage_index: int, rank: int) -> int:
        return self.leaders[stage_index] + rank

    def of_stage(self, stage_index: int) -> range:
        """The processes that share a stage."""
        return range(self.leaders[stage_index], self.leaders[stage_index] + self.sizes[stage_index])

    def reason_of(self, process: int, reason: str) -> str:
        """Why a stage is lost, if it is by this process."""
        place = self.all[process]
        return reason if self.sizes[place.stage_index] == 1 else f"rank {place.rank}: {reason}"
