"""Where a stage's process finds the model: on this machine, or copied to it as far as this stage needs it.

One idea: a copy is opened and read like the original; only that what is to be read has to come first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import zmq

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.open import open_checkpoint
from stageline.checkpoint.stage_tensors import stage_tensor_names
from stageline.checkpoint.tensor_shards import as_shared
from stageline.errors import CheckpointError
from stageline.executor.messages import Loading, WorkerConfig
from stageline.links.frames import encode_message
from stageline.transfer.client import ModelCopy

logger = logging.getLogger(__name__)


class ModelFiles:
    """Args: engine: hears of progress while weights come from another machine."""

    def __init__(self, config: WorkerConfig, engine: zmq.Socket[bytes]) -> None:
        self._config = config
        self._engine = engine
        self._copy = None if config.weights is None else ModelCopy(config.weights, config.access.security())

    def open(self) -> Checkpoint:
        """Raises: CheckpointError."""
        checkpoint = open_checkpoint(self._config.model) if self._copy is None else self._copy.open()
        return as_shared(checkpoint, self._config.deals_experts)

    def open_with(self, layers: Iterable[int], tells_progress: bool = True) -> Checkpoint:
        """As `open`, and the tensors of these layers and of the stage's ends are there.

        Args:
            tells_progress: while they come; the engine expects it while stages load.
        """
        if self._copy is None:
            return self.open()
        try:
            return self._copied(self._copy, layers, tells_progress)
        except CheckpointError as error:
            # The engine hears of it too, but who can mend it may sit here.
            logger.error("%s", error)
            raise

    def _copied(self, copy: ModelCopy, layers: Iterable[int], tells_progress: bool) -> Checkpoint:
        checkpoint = self.open()
        index, last = self._config.stage_index, self._config.num_stages - 1
        names = {
            name
            for layer in layers
            for name in stage_tensor_names(checkpoint, range(layer, layer + 1), index == 0, index == last)
        }
        copy.fetch(names, self._tell if tells_progress else None)
        return checkpoint

    def _tell(self, num_bytes: int, num_bytes_total: int) -> None:
        config = self._config
        self._engine.send(encode_message(Loading(config.stage_index, num_bytes, num_bytes_total, config.rank)))
