"""Who is looked at: what was asked for on this machine, and what was found out about it on the way.

One idea: every check reads this and returns findings; what a later one needs of an earlier one is handed over by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.stage_tensors import stage_file_bytes
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.config.serve_config import ServeConfig
from stageline.pipeline.partition import stages_of


@dataclass(frozen=True)
class Asked:
    """Flags as they were typed, of which none was checked.

    Args:
        has_model: MODEL was given; without it, what needs one is left out.
    """

    engine: EngineConfig
    cluster: ClusterConfig
    serve: ServeConfig
    has_model: bool

    @property
    def is_head(self) -> bool:
        """This machine serves the API, alone or with others."""
        return not self.cluster.headless

    @property
    def own_rank(self) -> int:
        """Of this machine; the head is 0."""
        return 0 if self.is_head else self.cluster.node_rank


@dataclass(frozen=True)
class Model:
    """What a start would run.

    Args:
        layer_counts: [stages]; of a choice by measured times, the default one.
    """

    checkpoint: Checkpoint
    max_model_len: int
    layer_counts: tuple[int, ...]

    def file_bytes(self, stages: range) -> int:
        """What these stages need of the model's files."""
        parts = stages_of(self.layer_counts)[stages.start : stages.stop]
        return sum(stage_file_bytes(self.checkpoint, part.layers, part.is_first, part.is_last) for part in parts)
