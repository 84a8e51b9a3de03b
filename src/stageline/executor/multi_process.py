"""One process per stage on this host: starts them, sends every microbatch to all of them, watches them.

The engine waits in one place for everything that can happen: a message from a stage, the end of a process, a stage that
no longer answers pings. Nothing is sent or woken while no work is in flight.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
import weakref
from collections import deque
from typing import TypeVar

import zmq

from stageline.clock import Clock
from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, StagelineError, WorkerLost
from stageline.executor.executor import OnProgress
from stageline.executor.messages import (
    Allocate,
    Allocated,
    CollectSpans,
    Failed,
    FromWorker,
    Loading,
    Ping,
    Pong,
    Spans,
    StageLoaded,
    Stop,
    WorkerConfig,
)
from stageline.executor.worker_process import WorkerProcess
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult
from stageline.pipeline.partition import StageLayers
from stageline.timeline.span import Span

_Answer = TypeVar("_Answer", StageLoaded, Allocated, Spans, MicrobatchResult)

_LAST_WORDS_S = 0.5
"""How long an ended process's last message may take to arrive."""

_GOODBYE_S = 2.0
"""How long a process that was asked to stop may take."""


class MultiProcessExecutor:
    """See `stageline.executor.executor.Executor`.

    Args:
        model: path of the checkpoint.
        stages: the partition.
        max_model_len: longest request in tokens.
    """

    def __init__(
        self, config: EngineConfig, model: str, stages: tuple[StageLayers, ...], max_model_len: int, clock: Clock
    ) -> None:
        self._config = config
        self._clock = clock
        self._loss: StagelineError | None = None
        self._results: deque[MicrobatchResult] = deque()
        self._watch = _Watch(config.heartbeat_timeout_s, config.load_timeout_s, len(stages), clock.now_s())
        self._running = _Running()
        self._finalizer = weakref.finalize(self, self._running.end, 0.0)
        try:
            self._start(model, stages, max_model_len)
        except BaseException:
            self._finalizer()
            raise

    def _start(self, model: str, stages: tuple[StageLayers, ...], max_model_len: int) -> None:
        running, num_stages = self._running, len(stages)
        address = [f"ipc://{running.folder}/s{index}" for index in range(num_stages)]
        self._incoming = running.links.receiver(f"ipc://{running.folder}/engine")
        self._control = [running.links.sender(f"{prefix}.control") for prefix in address]
        self._pings = [running.links.sender(f"{prefix}.ping") for prefix in address]
        self._decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        self._poller = zmq.Poller()
        self._poller.register(self._incoming, zmq.POLLIN)
        cores = cores_per_stage(num_stages, self._config.threads_per_stage) if self._config.bind_cores else None
        for stage, prefix in zip(stages, address, strict=True):
            worker = WorkerProcess(
                WorkerConfig(
                    model=model,
                    stage_index=stage.stage_index,
                    num_stages=num_stages,
                    first_layer=stage.layers.start,
                    end_layer=stage.layers.stop,
                    dtype=self._config.dtype,
                    device=self._config.device,
                    max_model_len=max_model_len,
                    num_threads=self._config.threads_per_stage,
                    cores=cores[stage.stage_index] if cores else [],
                    log_level=environment.log_level(),
                    engine_address=f"ipc://{running.folder}/engine",
                    control_address=f"{prefix}.control",
                    ping_address=f"{prefix}.ping",
                    input_address=None if stage.is_first else f"{prefix}.input",
                    output_address=None if stage.is_last else f"{address[stage.stage_index + 1]}.input",
                )
            )
            running.workers.append(worker)
            self._poller.register(worker.exit_fd, zmq.POLLIN)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the stages, in order."""
        return [worker.pid for worker in self._running.workers]

    def load(self, on_progress: OnProgress | None = None) -> list[StageLoaded]:
        reports: dict[int, StageLoaded] = {}
        while len(reports) < len(self._control):
            message = self._receive()
            if isinstance(message, Loading):
                self._watch.is_up(message.stage_index)
                if on_progress is not None:
                    on_progress(message.stage_index, message.num_bytes_read, message.num_bytes_total)
            elif isinstance(message, StageLoaded):
                reports[message.stage_index] = message
        return [reports[index] for index in sorted(reports)]

    def allocate(self, limits: MicrobatchLimits) -> None:
        self._send_to_all(encode_message(Allocate(limits)))
        self._gather(Allocated)

    def launch(self, microbatch: Microbatch) -> None:
        self._send_to_all(encode_message(microbatch))

    def wait(self) -> MicrobatchResult:
        if self._results:
            return self._results.popleft()
        while True:
            message = self._receive()
            if isinstance(message, MicrobatchResult):
                return message

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        self._send_to_all(encode_message(CollectSpans(since_s)))
        return [span for answer in self._gather(Spans) for span in answer.spans]

    def close(self) -> None:
        if self._finalizer.detach() is None:
            return
        if self._loss is None:
            for socket in self._control:
                socket.send(encode_message(Stop()))
            self._loss = StagelineError("the engine was closed")
            self._running.end(_GOODBYE_S)
        else:
            self._running.end(0.0)

    def _gather(self, kind: type[_Answer]) -> list[_Answer]:
        """One answer from every stage; results that come meanwhile are kept for `wait`."""
        answers: list[_Answer] = []
        while len(answers) < len(self._control):
            message = self._receive()
            if isinstance(message, MicrobatchResult):
                self._results.append(message)
            elif isinstance(message, kind):
                answers.append(message)
        return answers

    def _send_to_all(self, frame: bytes) -> None:
        self._check_alive()
        for socket in self._control:
            socket.send(frame)

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise self._loss

    # ---- the one place that waits ----

    def _receive(self) -> FromWorker:
        """The next message of any stage. Raises: WorkerLost, ConfigError."""
        self._check_alive()
        try:
            while True:
                if not self._incoming.poll(0):
                    self._wait_for_anything()
                if self._incoming.poll(0):
                    message = self._decoder.decode(self._incoming.recv())
                    if isinstance(message, Failed):
                        raise _loss_of(message)
                    if not isinstance(message, MicrobatchResult):
                        self._watch.heard_of(message.stage_index, self._clock.now_s())
                    if not isinstance(message, Pong):
                        return message
        except StagelineError as error:
            self._loss = error
            self._end_after_loss()
            raise

    def _wait_for_anything(self) -> None:
        """Wait for a message; meanwhile notice ended and silent stages."""
        now_s = self._clock.now_s()
        silent = self._watch.overdue(now_s)
        if silent is not None:
            raise WorkerLost(silent, self._watch.describe_silence(silent, now_s))
        for stage_index in self._watch.due_pings(now_s):
            self._pings[stage_index].send(encode_message(Ping()))
        ready = dict(self._poller.poll(_milliseconds(self._watch.patience_s(now_s))))
        if self._incoming in ready:
            return
        for worker in self._running.workers:
            if worker.exit_fd in ready:
                self._raise_loss_of_ended(worker)

    def _raise_loss_of_ended(self, ended: WorkerProcess) -> None:
        """A process ended: its own last words say why, or else the way it ended does."""
        deadline_s = self._clock.now_s() + _LAST_WORDS_S
        while (left_s := deadline_s - self._clock.now_s()) > 0 and self._incoming.poll(_milliseconds(left_s)):
            message = self._decoder.decode(self._incoming.recv())
            if isinstance(message, Failed):
                raise _loss_of(message)
        raise WorkerLost(ended.stage_index, ended.describe_exit())

    def _end_after_loss(self) -> None:
        """End all stages at once: with one of them gone the others wait for input that never comes."""
        if self._finalizer.detach() is not None:
            self._running.end(0.0)


class _Running:
    """What has to be ended, also when the executor is garbage or the interpreter leaves."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="stageline-")
        self.links = Links()
        self.workers: list[WorkerProcess] = []

    def end(self, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        for worker in self.workers:
            worker.end(max(0.0, deadline_s - time.monotonic()))
        self.workers.clear()
        self.links.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class _Watch:
    """Who has been silent for how long. Time counts only while the engine waits for an answer and asks for signs of life.

    A stage that is still starting up cannot answer pings; until its first message it has the loading time.
    """

    def __init__(self, heartbeat_timeout_s: float, load_timeout_s: float, num_stages: int, now_s: float) -> None:
        self._timeout_s = heartbeat_timeout_s
        self._load_timeout_s = load_timeout_s
        self._interval_s = heartbeat_timeout_s / 4
        self._starting_since_s: list[float | None] = [now_s] * num_stages
        self._first_unanswered_s: list[float | None] = [None] * num_stages
        self._last_ping_s = now_s

    def is_up(self, stage_index: int) -> None:
        self._starting_since_s[stage_index] = None

    def heard_of(self, stage_index: int, now_s: float) -> None:
        self._first_unanswered_s[stage_index] = None
        if self._starting_since_s[stage_index] is not None:
            self._starting_since_s[stage_index] = now_s

    def overdue(self, now_s: float) -> int | None:
        """A stage that has been silent for too long."""
        limits = ((self._starting_since_s, self._load_timeout_s), (self._first_unanswered_s, self._timeout_s))
        for since_s, timeout_s in limits:
            for stage_index, start_s in enumerate(since_s):
                if start_s is not None and now_s - start_s >= timeout_s:
                    return stage_index
        return None

    def describe_silence(self, stage_index: int, now_s: float) -> str:
        if (since_s := self._starting_since_s[stage_index]) is not None:
            return f"it did not come up within {now_s - since_s:.1f} s (--load-timeout-s {self._load_timeout_s:g})"
        since_s = self._first_unanswered_s[stage_index] or now_s
        return f"no sign of life for {now_s - since_s:.1f} s (--heartbeat-timeout-s {self._timeout_s:g})"

    def due_pings(self, now_s: float) -> list[int]:
        """Stages to ping now; each ping starts the stage's clock unless it runs already."""
        if now_s - self._last_ping_s < self._interval_s:
            return []
        self._last_ping_s = now_s
        up = [index for index, since_s in enumerate(self._starting_since_s) if since_s is None]
        for stage_index in up:
            if self._first_unanswered_s[stage_index] is None:
                self._first_unanswered_s[stage_index] = now_s
        return up

    def patience_s(self, now_s: float) -> float:
        """How long to wait before looking again."""
        return max(0.001, self._last_ping_s + self._interval_s - now_s)


def cores_per_stage(num_stages: int, threads_per_stage: int) -> list[list[int]] | None:
    """CPU cores for each stage, none shared; None if there are not enough, or the system does not bind."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    available = sorted(os.sched_getaffinity(0))
    if num_stages * threads_per_stage > len(available):
        return None
    return [available[index * threads_per_stage :][:threads_per_stage] for index in range(num_stages)]


def _milliseconds(duration_s: float) -> int:
    return math.ceil(duration_s * 1000)


def _loss_of(message: Failed) -> StagelineError:
    if message.is_config_error:
        return ConfigError(f"stage {message.stage_index}: {message.message}")
    return WorkerLost(message.stage_index, message.message, message.traceback)
