"""The stages' processes on a node that is not the head.

One idea: the head says what a stage is, the node says how it lives here: where the model's files are, which cores it
has, and by which addresses its neighbours on this machine find it. No path comes over a socket.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from stageline.cluster.messages import StartStages
from stageline.config import environment
from stageline.errors import FrameError
from stageline.executor.messages import LinkAccess, WorkerConfig, meeting_file
from stageline.executor.stage_processes import cores_per_stage, rank_inputs, ranks_memory
from stageline.executor.worker_process import WorkerProcess
from stageline.links.child_process import wait_for_ends
from stageline.links.tcp_address import TcpAddress, is_tcp
from stageline.transfer.messages import WeightSource

_MOST_PROCESSES = 256


class LocalStages:
    """Args:
    folder: for ipc sockets.
    """

    def __init__(self, folder: str, access: LinkAccess, binds_cores: bool) -> None:
        self._folder = folder
        self._access = access
        self._binds_cores = binds_cores
        self._workers: list[WorkerProcess] = []
        self.pipeline = 0

    def start(
        self, wanted: StartStages, model: str | WeightSource, head: str, addresses: Sequence[TcpAddress]
    ) -> None:
        """End what runs, and start these.

        Args:
            model: its path here, or where to copy it from.
            head: the head's address, where stages call it.
            addresses: where this node's first stage may get what other machines send.
        Raises: FrameError if they are not a row of stages.
        """
        self.end(0.0)
        check_row(wanted.configs)
        own_input = _own_input(wanted.configs[0], addresses)
        self.pipeline = wanted.pipeline
        threads = wanted.configs[0].num_threads
        cores = cores_per_stage(len(wanted.configs), threads) if self._binds_cores else None
        sizes = {config.stage_index: config.num_ranks for config in wanted.configs}
        places = enumerate(wanted.configs)
        for stage_index, num_ranks in sizes.items():
            # Where ranks of an earlier pipeline met, nobody shall look for them.
            Path(meeting_file(self._folder, stage_index)).unlink(missing_ok=True)
            with ranks_memory(num_ranks) as ranks_fd:
                for place, config in islice(places, num_ranks):
                    own = replace(
                        self._with_neighbours(config, sizes, own_input),
                        model=model if isinstance(model, str) else "",
                        weights=None if isinstance(model, str) else model,
                        socket_folder=self._folder,
                        log_level=environment.log_level(),
                        cores=cores[place] if cores else [],
                        engine_address=head,
                        control_address="",
                        ping_address="",
                        access=self._access,
                        ranks_fd=ranks_fd,
                        device_index=place,
                    )
                    self._workers.append(WorkerProcess(own))

    def _with_neighbours(self, config: WorkerConfig, sizes: Mapping[int, int], own_input: str) -> WorkerConfig:
        """Their addresses: within this node each rank has a way to each of the next stage; from and to other machines
        only first ranks have one.

        Args:
            sizes: how many ranks share each stage of this node, by its index.
        """
        before, after, rank = config.stage_index - 1, config.stage_index + 1, config.rank
        siblings = [self._inputs(config.stage_index, other, 1)[0] for other in range(1, config.num_ranks)]
        if before in sizes:
            inputs = self._inputs(config.stage_index, rank, sizes[before])
        else:
            inputs = [own_input if rank == 0 else siblings[rank - 1]]
        if after in sizes:
            outputs = [self._inputs(after, other, config.num_ranks)[rank] for other in range(sizes[after])]
        else:
            outputs = [] if config.output_address is None or rank else [config.output_address]
        return replace(
            config,
            input_address=inputs[0],
            more_input_addresses=inputs[1:],
            output_address=outputs[0] if outputs else None,
            more_output_addresses=outputs[1:],
            more_token_output_addresses=[],
            sends_whole=after not in sizes,
            hand_on_addresses=[] if before in sizes or rank else siblings,
        )

    def _inputs(self, stage_index: int, rank: int, num_senders: int) -> list[str]:
        return rank_inputs(f"ipc://{self._folder}/s{stage_index}.r{rank}", num_senders)

    def exit_fds(self) -> list[int]:
        """Each ends with its stage."""
        return [worker.exit_fd for worker in self._workers]

    def take_ended(self, ready: Collection[object]) -> list[tuple[int, str]]:
        """Stages whose `exit_fds` are ready, and how they ended, each once."""
        ended = [worker for worker in self._workers if worker.exit_fd in ready]
        self._workers = [worker for worker in self._workers if worker not in ended]
        told = [(worker.stage_index, _how_it_ended(worker)) for worker in ended]
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


def _own_input(first: WorkerConfig, addresses: Sequence[TcpAddress]) -> str:
    """Where the head says that the stage before sends. Raises: FrameError if that is no address of this node."""
    listening = (first.input_address or "").rpartition(";")[2]
    for address in addresses:
        if address.url in (listening, f"tcp://{listening}"):
            return address.url
    raise FrameError(f"stage {first.stage_index} shall listen at {first.input_address}, no address of this node")


def _how_it_ended(worker: WorkerProcess) -> str:
    how = worker.describe_exit()
    return how if worker.num_ranks == 1 else f"rank {worker.rank}: {how}"


def check_row(configs: Sequence[WorkerConfig]) -> None:
    """Raises: FrameError if these stages do not follow one another, each with all its ranks, have neighbours that are
    no TCP addresses, or shall listen where no stage of a node does."""
    if not 1 <= len(configs) <= _MOST_PROCESSES:
        raise FrameError(f"{len(configs)} processes for one node; expected 1 to {_MOST_PROCESSES}")
    expected = (configs[0].stage_index, 0)
    for config in configs:
        stage_index, rank, num_ranks = config.stage_index, config.rank, config.num_ranks
        if (stage_index, rank) != expected or not (0 < stage_index < config.num_stages and rank < num_ranks):
            raise FrameError(
                f"rank {rank} of {num_ranks} of stage {stage_index} of {config.num_stages} behind "
                f"s{configs[0].stage_index}; expected stage, rank {expected}"
            )
        # The next one speaks of its own number of ranks, which has to be the same within a stage.
        expected = (stage_index + 1, 0) if rank == num_ranks - 1 else (stage_index, rank + 1)
        if num_ranks != next(one.num_ranks for one in configs if one.stage_index == stage_index):
            raise FrameError(f"stage {stage_index} has {num_ranks} ranks, says its rank {rank}; its first one differs")
        addresses = (config.output_address, config.token_output_address)
        if any(address is not None and not is_tcp(address) for address in addresses):
            raise FrameError(f"stage {config.stage_index} shall send to {addresses}, which is not over TCP")
        if config.token_input_address is not None:
            # It would be bound, and a file of that name be gone; only the head's own stage 0 has one.
            raise FrameError(f"stage {config.stage_index} shall get tokens at {config.token_input_address}")
        if not config.caller_name.isalnum():
            raise FrameError(f"stage {config.stage_index} shall call itself {config.caller_name!r}")
    if expected[1]:
        raise FrameError(f"stage {expected[0]} has no rank {expected[1]}, and its first one speaks of more")
