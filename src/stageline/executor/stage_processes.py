"""The processes of a pipeline's stages: where each of them is reached, what it is told, and how all are ended.

One idea: a stage's neighbours are addresses. Within a machine they are ipc sockets in a folder of the pipeline's own;
what comes from another machine arrives at the one port that each machine has for it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass

import zmq
from msgspec.structs import replace

from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.executor.messages import Calibration, LinkAccess, WorkerConfig
from stageline.executor.remote_stages import Channel, RemoteStages
from stageline.executor.worker_process import WorkerProcess
from stageline.links.child_process import wait_for_ends
from stageline.links.sockets import Links, make_ipc_folder
from stageline.pipeline.partition import StageLayers
from stageline.pipeline.slowdown import parse_slowdown


@dataclass(frozen=True)
class StageAsked:
    """What the stages of one pipeline have in common.

    Args:
        model: path of the checkpoint.
    """

    config: EngineConfig
    model: str
    max_model_len: int
    calibration: Calibration | None


class StageProcesses:
    """What has to be ended, also when the executor is garbage or the interpreter leaves.

    Attributes:
        workers: the processes on this machine, in order, the first stage's first.
    """

    def __init__(self, num_stages: int, remote: RemoteStages | None) -> None:
        self._owner_pid = os.getpid()
        self._num_stages = num_stages
        self._remote = remote
        self._num_local = num_stages if remote is None else remote.num_local
        self.folder = make_ipc_folder(f"s{num_stages}.control")
        self.links = Links()
        self.workers: list[WorkerProcess] = []

    def listen(self) -> zmq.Socket[bytes]:
        """What the stages of this machine say. To be called before they are started."""
        return self.links.receiver(self._engine_address)

    def channels(self) -> tuple[list[Channel], list[Channel]]:
        """To each stage's computing thread, and to the one that is never busy."""
        controls: list[Channel] = [self.links.sender(f"{self._ipc(index)}.control") for index in range(self._num_local)]
        responders: list[Channel] = [self.links.sender(f"{self._ipc(index)}.ping") for index in range(self._num_local)]
        if self._remote is not None:
            for index in range(self._num_local, self._num_stages):
                controls.append(self._remote.control(index))
                responders.append(self._remote.responder(index))
        return controls, responders

    def start(self, stages: tuple[StageLayers, ...], asked: StageAsked) -> None:
        """Start all of them."""
        threads = asked.config.threads_per_stage
        cores = cores_per_stage(self._num_local, threads) if asked.config.bind_cores else None
        configs = [self._config_of(stage, asked) for stage in stages]
        for config in configs[: self._num_local]:
            own_cores = cores[config.stage_index] if cores else []
            self.workers.append(WorkerProcess(replace(config, cores=own_cores)))
        if self._remote is not None:
            self._remote.start(configs[self._num_local :])

    def _config_of(self, stage: StageLayers, asked: StageAsked) -> WorkerConfig:
        index, prefix, config = stage.stage_index, self._ipc(stage.stage_index), asked.config
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
            socket_folder=self.folder if is_local else "",
            engine_address=self._engine_address if is_local else "",
            control_address=f"{prefix}.control" if is_local else "",
            ping_address=f"{prefix}.ping" if is_local else "",
            input_address=None if stage.is_first else self._input_of(index),
            output_address=None if stage.is_last else self._input_of(index + 1),
            input_dtype=self._sent_as(config, index),
            output_dtype=self._sent_as(config, index + 1),
            token_input_address=self._token_address(config) if stage.is_first else None,
            token_output_address=self._token_address(config) if stage.is_last else None,
            access=LinkAccess() if self._remote is None or not is_local else self._remote.access,
            calibration=asked.calibration,
            slowdown=slowdown.stages[index],
            input_delay_s=slowdown.input_delay_s(index),
        )

    @property
    def _engine_address(self) -> str:
        return f"ipc://{self.folder}/engine"

    def _ipc(self, stage_index: int) -> str:
        return f"ipc://{self.folder}/s{stage_index}"

    def _input_of(self, stage_index: int) -> str:
        if self._remote is not None and stage_index >= self._num_local:
            return self._remote.input_of(stage_index)
        return f"{self._ipc(stage_index)}.input"

    def _sent_as(self, config: EngineConfig, receiver: int) -> str:
        """How the hidden states for a stage travel: only between machines is it worth making them smaller."""
        crosses = 0 < receiver < self._num_stages and self._machine_of(receiver) != self._machine_of(receiver - 1)
        return config.activation_dtype if crosses else "auto"

    def _machine_of(self, stage_index: int) -> str:
        return "" if self._remote is None else self._remote.machine_of(stage_index)

    def _token_address(self, config: EngineConfig) -> str | None:
        """Where the first stage gets sampled tokens from the last, so that they need not go through the engine."""
        if self._num_stages == 1 or not config.look_ahead:
            return None
        return f"{self._ipc(0)}.tokens" if self._remote is None else self._remote.own_input

    def end(self, patience_s: float) -> None:
        """End the stages, those at once that have not left after `patience_s`. Can be repeated after an interrupt."""
        if os.getpid() != self._owner_pid:
            return  # a process forked off the engine must not end the engine's stages
        if self._remote is not None:
            self._remote.end(patience_s)
        wait_for_ends(self.workers, patience_s)
        for worker in self.workers:
            worker.kill()
        while self.workers:
            self.workers[-1].reap()
            self.workers.pop()
        self.links.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def cores_per_stage(num_stages: int, threads_per_stage: int) -> list[list[int]] | None:
    """CPU cores for each stage, none shared; None if there are not enough, or the system does not bind."""
    available = available_cores()
    if available is None or num_stages * threads_per_stage > len(available):
        return None
    return [available[index * threads_per_stage :][:threads_per_stage] for index in range(num_stages)]


def available_cores() -> list[int] | None:
    """The CPU cores that this process may run on; None if the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
