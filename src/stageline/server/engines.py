"""The engines' processes of one server, seen by its supervisor: one, or several equal ones that share the machine.

One idea: all that differs between one replica and several is a list. Of several, one that is lost is started again, as
long as it serves in between; its place, and what it is called, stay the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from stageline.config.cluster_config import ClusterConfig
from stageline.engine.engine_process import EngineProcess
from stageline.engine.messages import EngineFailed, EngineLink, EngineReady, PipelineDown, ToOwner
from stageline.engine.replica_places import Replicas
from stageline.engine.revival import Revival
from stageline.errors import EngineLost, StagelineError
from stageline.executor.messages import LinkAccess

_GOODBYE_S = 5.0
"""An engine gives its own stages a while before it ends them."""


class _Engine:
    """One that was started, and what it told."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.is_ready = False
        self.last_words: StagelineError | None = None


class Engines:
    """Args:
    num_clients: API processes.
    warms_up, cluster, access: see `EngineProcess`.
    on_word: called with a replica's index, and what it told.
    on_end: called with a replica's index when its process has ended.
    """

    def __init__(
        self,
        replicas: Replicas,
        num_clients: int,
        warms_up: bool,
        cluster: ClusterConfig,
        access: LinkAccess,
        on_word: Callable[[int, ToOwner], None],
        on_end: Callable[[int], None],
    ) -> None:
        self._replicas = replicas
        self._num_clients = num_clients
        self._warms_up = warms_up
        self._cluster = cluster
        self._access = access
        self._on_word = on_word
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._engines: dict[int, _Engine] = {}
        self._revivals = [Revival(True) for _ in replicas.places]

    def __len__(self) -> int:
        """How many replicas there should be."""
        return len(self._replicas.places)

    @property
    def num_running(self) -> int:
        return len(self._engines)

    def start(self, index: int) -> None:
        """Raises: ConfigError if there is no place for its sockets."""
        process = EngineProcess(
            self._replicas.engine,
            self._replicas.engine.model,
            self._num_clients,
            warms_up=self._warms_up,
            cluster=self._cluster,
            access=self._access,
            revives=True,
            place=self._replicas.places[index],
        )
        self._engines[index] = _Engine(process)
        self._loop.add_reader(process.exit_fd, self._read, index)

    def link(self, index: int, client_index: int) -> EngineLink:
        return self._engines[index].process.links[client_index]

    def _read(self, index: int) -> None:
        engine = self._engines[index]
        messages = engine.process.read()
        if messages is None:
            self._on_end(index)
            return
        for message in messages:
            match message:
                case EngineReady():
                    engine.is_ready = True
                    self._revivals[index].began_to_serve(time.monotonic())
                case PipelineDown():
                    engine.is_ready = False
                case EngineFailed():
                    engine.last_words = message.error.as_error()
            self._on_word(index, message)

    def take_end(self, index: int) -> StagelineError:
        """Clear up what one that has ended leaves. Returns: why it did."""
        engine = self._engines.pop(index)
        self._loop.remove_reader(engine.process.exit_fd)
        how = engine.process.describe_exit()
        engine.process.end(0.0)
        return engine.last_words or EngineLost(f"the engine was lost: {how}")

    def may_start_again(self, index: int, loss: StagelineError) -> bool:
        """To be asked once for each end."""
        return self._revivals[index].allows(loss, False, time.monotonic())

    def end(self) -> None:
        """End all that run, and wait until they have. May be interrupted and called again."""
        for engine in self._engines.values():
            self._loop.remove_reader(engine.process.exit_fd)
            engine.process.tell_to_stop()
        for index, engine in list(self._engines.items()):
            # While it loads it does not listen; its stages leave with it.
            engine.process.end(_GOODBYE_S if engine.is_ready else 0.0)
            del self._engines[index]
