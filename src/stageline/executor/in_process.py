"""All stages in this process, one after the other: the same stages in the same order, for debugging and for tests."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import zmq

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.clock import Clock
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, StagelineError, WorkerLost
from stageline.executor.executor import OnProgress
from stageline.executor.messages import StageLoaded
from stageline.links.wakeup import Wakeup
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult
from stageline.pipeline.partition import StageLayers
from stageline.timeline.recorder import Recorder
from stageline.timeline.span import Span

if TYPE_CHECKING:
    from stageline.worker.stage import Stage


class InProcessExecutor:
    """See `stageline.executor.executor.Executor`. A microbatch runs through all stages while it is waited for."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        partition: tuple[StageLayers, ...],
        max_model_len: int,
        clock: Clock,
    ) -> None:
        self.wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self.wakeup.fd, zmq.POLLIN)
        self._config = config
        self._checkpoint = checkpoint
        self._partition = partition
        self._max_model_len = max_model_len
        self._clock = clock
        self._recorder = Recorder()
        self._stages: list[Stage] = []
        self._launched: deque[Microbatch] = deque()
        self._loss: StagelineError | None = None

    def load(self, on_progress: OnProgress | None = None) -> list[StageLoaded]:
        from stageline.worker.build import build_stage

        reports = []
        for part in self._partition:
            index = part.stage_index
            stage, report = build_stage(
                self._checkpoint,
                part,
                dtype=self._config.dtype,
                device=self._config.device,
                quantization=self._config.quantization,
                max_model_len=self._max_model_len,
                clock=self._clock,
                recorder=self._recorder,
                on_progress=lambda read, total, index=index: on_progress and on_progress(index, read, total),  # type: ignore[misc]
            )
            self._stages.append(stage)
            reports.append(report)
        return reports

    def allocate(self, limits: MicrobatchLimits) -> None:
        for stage in self._stages:
            stage.allocate_kv(limits)

    def launch(self, microbatch: Microbatch) -> None:
        self._check_alive()
        self._launched.append(microbatch)

    def wake_on(self, source: zmq.Socket[bytes]) -> None:
        self._poller.register(source, zmq.POLLIN)

    def wait(self, until_s: float | None = None) -> MicrobatchResult | None:
        self._check_alive()
        if not self._launched:
            self._wait_for_a_wake(until_s)
            return None
        microbatch = self._launched.popleft()
        output: Any = None
        elapsed_s = []
        for stage, part in zip(self._stages, self._partition, strict=True):
            start_s = self._clock.now_s()
            try:
                output = stage.run(stage.prepare(microbatch), output)
            except Exception as error:
                self._loss = _loss_of(part.stage_index, error)
                raise self._loss from error
            elapsed_s.append(self._clock.now_s() - start_s)
        assert isinstance(output, MicrobatchResult)
        return output.after(sum(elapsed_s), max(elapsed_s))

    def _wait_for_a_wake(self, until_s: float | None) -> None:
        patience_s = None if until_s is None else max(0.0, until_s - self._clock.now_s())
        self._poller.poll(None if patience_s is None else math.ceil(patience_s * 1000))
        self.wakeup.heard()

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise self._loss

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        return self._recorder.spans(since_s)

    def close(self) -> None:
        self._stages.clear()
        self._launched.clear()
        self.wakeup.close()
        if self._loss is None:
            self._loss = StagelineError("the engine was closed")


def _loss_of(stage_index: int, error: Exception) -> StagelineError:
    if isinstance(error, ConfigError):
        return ConfigError(f"stage {stage_index}: {error}")
    return WorkerLost(stage_index, f"{type(error).__name__}: {error}")
