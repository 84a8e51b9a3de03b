"""The stages' processes on a node that is not the head.

One idea: the head says what a stage is, the node says how it lives here: where the model's files are, which cores it
has, and by which addresses its neighbours on this machine find it. No path comes over a socket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from stageline.cluster.messages import StartStages
from stageline.config import environment
from stageline.errors import FrameError
from stageline.executor.messages import LinkAccess, WorkerConfig
from stageline.executor.stage_processes import cores_per_stage
from stageline.executor.worker_process import WorkerProcess
from stageline.links.child_process import wait_for_ends
from stageline.links.tcp_address import TcpAddress, is_tcp
from stageline.transfer.messages import WeightSource

_MOST_STAGES = 256


class LocalStages:
    """Args:
    folder: for ipc sockets.
    head: the head's address, where stages call it.
    addresses: where this node's first stage may get what other machines send.
    """

    def __init__(
        self, folder: str, head: str, addresses: Sequence[TcpAddress], access: LinkAccess, binds_cores: bool
    ) -> None:
        self._folder = folder
        self._head = head
        self._addresses = addresses
        self._access = access
        self._binds_cores = binds_cores
        self._workers: list[WorkerProcess] = []
        self.pipeline = 0

    def start(self, wanted: StartStages, model: str | WeightSource) -> None:
        """End what runs, and start these.

        Args:
            model: its path here, or where to copy it from.
        Raises: FrameError if they are not a row of stages.
        """
        self.end(0.0)
        check_row(wanted.configs)
        own_input = self._own_input(wanted.configs[0])
        self.pipeline = wanted.pipeline
        threads = wanted.configs[0].num_threads
        cores = cores_per_stage(len(wanted.configs), threads) if self._binds_cores else None
        last = len(wanted.configs) - 1
        for place, config in enumerate(wanted.configs):
            own = replace(
                config,
                model=model if isinstance(model, str) else "",
                weights=None if isinstance(model, str) else model,
                socket_folder=self._folder,
                log_level=environment.log_level(),
                cores=cores[place] if cores else [],
                engine_address=self._head,
                control_address="",
                ping_address="",
                access=self._access,
                input_address=self._ipc(config.stage_index) if place else own_input,
                output_address=config.output_address if place == last else self._ipc(config.stage_index + 1),
            )
            self._workers.append(WorkerProcess(own))

    def _own_input(self, first: WorkerConfig) -> str:
        """Where the head says that the stage before sends. Raises: FrameError if that is no address of this node."""
        listening = (first.input_address or "").rpartition(";")[2]
        for address in self._addresses:
            if address.url in (listening, f"tcp://{listening}"):
                return address.url
        raise FrameError(f"stage {first.stage_index} shall listen at {first.input_address}, no address of this node")

    def _ipc(self, stage_index: int) -> str:
        return f"ipc://{self._folder}/s{stage_index}.input"

    def exit_fds(self) -> list[int]:
        """Each ends with its stage."""
        return [worker.exit_fd for worker in self._workers]

    def take_ended(self, ready: Collection[object]) -> list[tuple[int, str]]:
        """Stages whose `exit_fds` are ready, and how they ended, each once."""
        ended = [worker for worker in self._workers if worker.exit_fd in ready]
        self._workers = [worker for worker in self._workers if worker not in ended]
        told = [(worker.stage_index, worker.describe_exit()) for worker in ended]
        for worker in ended:
            worker.reap()
        return told

    def end(self, patience_s: float) -> None:
        """End all, those at once that have not left after `patience_s`, and wait until they have."""
        wait_for_ends(self._workers, patience_s)
        for worker in self._workers:
            worker.kill()
        while self._workers:
            self._workers[-1].reap()
            self._workers.pop()


def check_row(configs: Sequence[WorkerConfig]) -> None:
    """Raises: FrameError if these stages do not follow one another, or have neighbours that are no TCP addresses."""
    if not 1 <= len(configs) <= _MOST_STAGES:
        raise FrameError(f"{len(configs)} stages for one node; expected 1 to {_MOST_STAGES}")
    first = configs[0].stage_index
    for place, config in enumerate(configs):
        if config.stage_index != first + place or not 0 < config.stage_index < config.num_stages:
            raise FrameError(f"stage {config.stage_index} of {config.num_stages} at place {place} behind s{first}")
        addresses = (config.output_address, config.token_output_address)
        if any(address is not None and not is_tcp(address) for address in addresses):
            raise FrameError(f"stage {config.stage_index} shall send to {addresses}, which is not over TCP")
        if not config.caller_name.isalnum():
            raise FrameError(f"stage {config.stage_index} shall call itself {config.caller_name!r}")
