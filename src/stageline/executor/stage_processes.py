"""The processes of a pipeline's stages: where each of them is reached, what it is told, and how all are ended.

One idea: a stage's neighbours are addresses. Within a machine they are ipc sockets in a folder of the pipeline's own;
what comes from another machine arrives at the one port that each machine has for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq
from msgspec.structs import replace

from stageline.checkpoint.model_spec import ModelSpec
from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.executor.messages import Calibration, LinkAccess, WorkerConfig
from stageline.executor.remote_stages import Channel, RemoteStages
from stageline.executor.worker_process import WorkerProcess
from stageline.links.child_process import wait_for_ends
from stageline.links.ipc_folder import IpcFolder
from stageline.links.sockets import Links
from stageline.pipeline.partition import StageLayers
from stageline.pipeline.rank_layout import RankLayout, StageRank
from stageline.pipeline.rank_memory import shared_bytes
from stageline.pipeline.slowdown import AS_FAST_AS_IT_IS, parse_slowdown


@dataclass(frozen=True)
class StageAsked:
    """What the stages of one pipeline have in common.

    Args:
        model: path of the checkpoint.
        made_up: shape of a model without files.
    """

    config: EngineConfig
    model: str
    max_model_len: int
    calibration: Calibration | None
    made_up: ModelSpec | None = None


class StageProcesses:
    """What has to be ended, also when the executor is garbage or the interpreter leaves.

    Attributes:
        workers: the processes on this machine, in order, the first stage's first.
    """

    def __init__(self, ranks: RankLayout, remote: RemoteStages | None) -> None:
        self._owner_pid = os.getpid()
        self._ranks = ranks
        self._num_stages = num_stages = len(ranks.sizes)
        self._remote = remote
        self._num_local = num_stages if remote is None else remote.num_local
        self._folder = IpcFolder(f"s{num_stages}.r{max(ranks.sizes)}.input{max(ranks.sizes)}")
        self.links = Links()
        self.workers: list[WorkerProcess] = []

    def listen(self) -> zmq.Socket[bytes]:
        """What the stages of this machine say. To be called before they are started."""
        return self.links.receiver(self._engine_address)

    def channels(self) -> tuple[list[Channel], list[Channel]]:
        """To each stage's computing thread, and to the one that is never busy."""
        places = self._ranks.all
        local = [self._ipc(place) for place in places if place.stage_index < self._num_local]
        controls: list[Channel] = [self.links.sender(f"{prefix}.control") for prefix in local]
        responders: list[Channel] = [self.links.sender(f"{prefix}.ping") for prefix in local]
        if self._remote is not None:
            for place in places[len(local) :]:
                controls.append(self._remote.control(place))
                responders.append(self._remote.responder(place))
        return controls, responders

    def start(self, stages: tuple[StageLayers, ...], asked: StageAsked) -> None:
        """Start all of them."""
        threads = asked.config.threads_per_stage
        num_local = sum(self._ranks.sizes[: self._num_local])
        cores = cores_per_stage(num_local, threads) if asked.config.bind_cores else None
        for stage in stages[: self._num_local]:
            with ranks_memory(self._ranks.sizes[stage.stage_index]) as ranks_fd:
                for process in self._ranks.of_stage(stage.stage_index):
                    config = self._config_of(stage, self._ranks.all[process], asked)
                    own_cores = cores[process] if cores else []
                    self.workers.append(WorkerProcess(replace(config, cores=own_cores, ranks_fd=ranks_fd)))
        if self._remote is not None:
            self._remote.start(
                [
                    self._config_of(part, self._ranks.all[process], asked)
                    for part in stages[self._num_local :]
                    for process in self._ranks.of_stage(part.stage_index)
                ]
            )

    def _config_of(self, stage: StageLayers, place: StageRank, asked: StageAsked) -> WorkerConfig:
        index, prefix, config = stage.stage_index, self._ipc(place), asked.config
        outputs, inputs = self._outputs_of(stage, place.rank), self._inputs_of(stage, place.rank)
        token_inputs = self._token_addresses(config)
        token_outputs = token_inputs if stage.is_last and place.rank == 0 else []
        hands_on = stage.is_first and place.rank == 0 and self._remote is not None
        if self._num_stages == 1:
            # The first rank of a single stage has its own tokens.
            token_outputs, token_inputs = token_outputs[1:], ["", *token_inputs[1:]] if token_inputs else []
        elif self._remote is not None:
            token_outputs = token_outputs[:1]
        slowdown = parse_slowdown(environment.inject_slowdown(), self._num_stages)
        is_local = index < self._num_local
        return WorkerConfig(
            model=asked.model if is_local else "",
            stage_index=index,
            num_stages=self._num_stages,
            first_layer=stage.layers.start,
            end_layer=stage.layers.stop,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            max_model_len=asked.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_threads=config.threads_per_stage,
            cores=[],
            log_level=environment.log_level(),
            socket_folder=self._folder.path if is_local else "",
            engine_address=self._engine_address if is_local else "",
            control_address=f"{prefix}.control" if is_local else "",
            ping_address=f"{prefix}.ping" if is_local else "",
            input_address=inputs[0] if inputs else None,
            more_input_addresses=inputs[1:],
            output_address=outputs[0] if outputs else None,
            more_output_addresses=outputs[1:],
            rank=place.rank,
            num_ranks=self._ranks.sizes[index],
            deals_experts=config.enable_expert_parallel,
            device_index=self._ranks.process_of(index, place.rank),
            sends_whole=self._crosses(index + 1),
            hand_on_addresses=token_inputs[1:] if hands_on else [],
            input_dtype=self._sent_as(config, index),
            output_dtype=self._sent_as(config, index + 1),
            token_input_address=(token_inputs[place.rank] or None) if token_inputs and stage.is_first else None,
            token_output_address=token_outputs[0] if token_outputs else None,
            more_token_output_addresses=token_outputs[1:],
            access=LinkAccess() if self._remote is None or not is_local else self._remote.access,
            calibration=asked.calibration,
            made_up=asked.made_up,
            # The others wait for the first rank in every layer; were they slowed too, the stage would be twice.
            slowdown=slowdown.stages[index] if place.rank == 0 else AS_FAST_AS_IT_IS,
            input_delay_s=slowdown.input_delay_s(index),
        )

    @property
    def _engine_address(self) -> str:
        return f"ipc://{self._folder.path}/engine"

    def _ipc(self, place: StageRank) -> str:
        rank = f".r{place.rank}" if place.rank else ""
        return f"ipc://{self._folder.path}/s{place.stage_index}{rank}"

    def _inputs_of(self, stage: StageLayers, rank: int) -> list[str]:
        """Where a rank gets what each rank of the stage before sends. Another machine says itself where, but for what
        arrives over a network."""
        if stage.is_first:
            return []
        if self._remote is not None and stage.stage_index >= self._num_local:
            return [self._remote.input_of(stage.stage_index)] if rank == 0 else []
        return rank_inputs(self._ipc(StageRank(stage.stage_index, rank)), self._ranks.sizes[stage.stage_index - 1])

    def _outputs_of(self, stage: StageLayers, rank: int) -> list[str]:
        """Where it sends its part: to each rank of the next stage. Between machines one rank sends all of it to one."""
        receiver = stage.stage_index + 1
        if stage.is_last:
            return []
        if self._remote is not None and receiver >= self._num_local:
            return [self._remote.input_of(receiver)] if rank == 0 else []
        senders = self._ranks.sizes[stage.stage_index]
        ranks = range(self._ranks.sizes[receiver])
        return [rank_inputs(self._ipc(StageRank(receiver, other)), senders)[rank] for other in ranks]

    def _crosses(self, receiver: int) -> bool:
        """Whether a stage's input comes from another machine."""
        return 0 < receiver < self._num_stages and self._machine_of(receiver) != self._machine_of(receiver - 1)

    def _sent_as(self, config: EngineConfig, receiver: int) -> str:
        """How the hidden states for a stage travel: only between machines is it worth making them smaller."""
        return config.activation_dtype if self._crosses(receiver) else "auto"

    def _machine_of(self, stage_index: int) -> str:
        return "" if self._remote is None else self._remote.machine_of(stage_index)

    def _token_addresses(self, config: EngineConfig) -> list[str]:
        """Where the first stage's ranks get sampled tokens from the last stage, so that they need not go through the
        engine; from another machine only the first rank does, and hands them on."""
        if self._ranks.num_processes == 1 or not config.look_ahead:
            return []
        here = [f"{self._ipc(self._ranks.all[process])}.tokens" for process in self._ranks.of_stage(0)]
        return here if self._remote is None else [self._remote.own_input, *here[1:]]

    def end(self, patience_s: float) -> None:
        """End the stages, those at once that have not left after `patience_s`. Can be repeated after an interrupt."""
        if os.getpid() != self._owner_pid:
            return  # a process forked off the engine must not end the engine's stages
        if self._remote is not None:
            self._remote.end(patience_s)
        wait_for_ends(self.workers, patience_s)
        self.end_processes()
        while self.workers:
            self.workers[-1].reap()
            self.workers.pop()
        self.links.close()

    def end_processes(self) -> None:
        """End the stages here at once, and leave sockets and pipes to the system: a thread that the interpreter does
        not wait for may be using them, and would crash it."""
        if os.getpid() != self._owner_pid:
            return
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.exit_status()
        self._folder.close()


def rank_inputs(prefix: str, num_senders: int) -> list[str]:
    """Where a rank listens for each rank of the stage before. Args: prefix: of the rank's own sockets."""
    return [f"{prefix}.input{sender or ''}" for sender in range(num_senders)]


@contextmanager
def ranks_memory(num_ranks: int) -> Iterator[int]:
    """A file in memory, without a name, for the ranks of one stage to inherit; -1 if there is one rank, or no such file
    on this system."""
    if num_ranks == 1 or not hasattr(os, "memfd_create"):
        yield -1
        return
    fd = os.memfd_create("stageline-ranks")
    try:
        os.ftruncate(fd, shared_bytes(num_ranks))
        yield fd
    finally:
        os.close(fd)


def cores_per_stage(num_stages: int, threads_per_stage: int) -> list[list[int]] | None:
    """CPU cores for each stage, none shared; None if there are not enough, or the system does not bind."""
    available = available_cores()
    if available is None or num_stages * threads_per_stage > len(available):
        return None
    return [available[index * threads_per_stage :][:threads_per_stage] for index in range(num_stages)]


def available_cores() -> list[int] | None:
    """The CPU cores that this process may run on; None if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
