"""The engine's process, seen from the one who starts it: a child with sockets for any number of clients.

Its owner reads what it tells (progress, readiness, last words) from `exit_fd`, which ends when the engine does.
"""

from __future__ import annotations

import os
import weakref

import msgspec

from stageline.config import environment
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.engine.messages import Drain, EngineLink, EngineProcessConfig, ReplicaPlace, Stop, ToOwner
from stageline.executor.messages import LinkAccess
from stageline.links.child_process import ChildProcess, wait_for_ends
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.ipc_folder import IpcFolder


class EngineProcess:
    """A started engine. It ends with this object, and with this process.

    Args:
        model_path: of the checkpoint (`open_checkpoint(config.model).path`).
        num_clients: processes that will attach to it, one `EngineLink` each.
        warms_up: it is ready only after requests of several sizes.
        cluster, access, revives, place: see `EngineProcessConfig`.
    Raises: ConfigError if there is no place for its sockets.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: str,
        num_clients: int,
        warms_up: bool = False,
        cluster: ClusterConfig | None = None,
        access: LinkAccess | None = None,
        revives: bool = False,
        place: ReplicaPlace | None = None,
    ) -> None:
        folder = IpcFolder(f"client{num_clients}")
        body = EngineProcessConfig(
            engine=config,
            model_path=model_path,
            log_level=environment.log_level(),
            folder=folder.path,
            num_clients=num_clients,
            warms_up=warms_up,
            cluster=cluster,
            access=access or LinkAccess(),
            revives=revives,
            place=place,
        )
        try:
            self._child = ChildProcess("stageline.engine.process", msgspec.msgpack.encode(body))
        except BaseException:
            folder.close()
            raise
        self._finalizer = weakref.finalize(self, _end, self._child, folder, os.getpid())
        self._decoder: MessageDecoder[ToOwner] = MessageDecoder(ToOwner)
        self.links = [
            EngineLink(folder=folder.path, client_index=index, engine_pid=self._child.pid)
            for index in range(num_clients)
        ]

    @property
    def exit_fd(self) -> int:
        """Readable when the engine tells something, and when it has ended."""
        return self._child.exit_fd

    @property
    def pid(self) -> int:
        return self._child.pid

    def read(self) -> list[ToOwner] | None:
        """What it told; waits if it told nothing. Returns: None when it has ended."""
        bodies = self._child.read_messages()
        return None if bodies is None else [self._decoder.decode(body) for body in bodies]

    def drain(self) -> None:
        """Let it take no more requests; it tells `Drained` when none is left."""
        self._child.send(encode_message(Drain()))

    def describe_exit(self) -> str:
        """How it ended, in words; once it has."""
        return self._child.describe_exit()

    def exit_status(self) -> int:
        """Once it has ended; negative if a signal ended it."""
        return self._child.exit_status()

    def tell_to_stop(self) -> None:
        """So that several leave at the same time, before each is waited for."""
        if self._finalizer.alive:
            self._child.send(encode_message(Stop()))

    def end(self, patience_s: float) -> None:
        """Tell it to stop, end it if it has not left after `patience_s`, and wait until it has. May be called twice."""
        if self._finalizer.alive:
            self._child.send(encode_message(Stop()))
            wait_for_ends([self._child], patience_s)
            self._finalizer()


def _end(child: ChildProcess, folder: IpcFolder, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a process forked off the owner must not end the owner's engine
    child.kill()
    child.reap()
    folder.close()
