"""All stages in this process, one after the other: the same stages in the same order, for debugging and for tests."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.clock import Clock
from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, StagelineError, WorkerLost
from stageline.executor.executor import OnProgress
from stageline.executor.messages import StageLoaded
from stageline.links.wakeup import Wakeup
from stageline.pipeline.item_times import StageItemTimes
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, TokenMasks
from stageline.pipeline.partition import StageLayers
from stageline.pipeline.slowdown import parse_slowdown
from stageline.timeline.recorder import Recorder
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import StageAccount, StageCounters

if TYPE_CHECKING:
    from stageline.worker.measure import ItemTimer
    from stageline.worker.stage import Stage

_LONGEST_WAIT_S = 3600.0
"""What waits longer is called again; a poll takes no number of milliseconds beyond 31 bits."""


class InProcessExecutor:
    """See `stageline.executor.executor.Executor`. A microbatch runs through all stages while it is waited for.

    Nothing is gained by look-ahead here, and no microbatch may have pending rows.
    """

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
        self._timers: list[ItemTimer] = []
        self._accounts = [StageAccount(part.stage_index) for part in partition]
        self._is_allocated = False
        self._on_progress: OnProgress = _nobody_listens
        self._is_counters_asked = False
        self._spans_question: tuple[float, int | None] | None = None
        self._launched: deque[Microbatch] = deque()
        self._masks: list[TokenMasks] = []
        self._before_sampling: Callable[[], None] = lambda: None
        self._loss: StagelineError | None = None
        self._slowdown = parse_slowdown(environment.inject_slowdown(), len(partition))

    def load(self, on_progress: OnProgress | None = None) -> list[StageLoaded]:
        from stageline.worker.build import build_stage

        self._on_progress = on_progress or self._on_progress
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
                on_progress=lambda read, total, index=index: self._on_progress(index, read, total),  # type: ignore[misc]
                slowdown=self._slowdown.stages[index],
            )
            self._stages.append(stage)
            reports.append(report)
        self._on_progress = _nobody_listens
        return reports

    def allocate(self, limits: MicrobatchLimits, epoch: int = 0, first_microbatch: int = 0) -> None:
        for stage in self._stages:
            stage.allocate_kv(limits)
        if not self._is_allocated:
            for account in self._accounts:
                account.start(self._clock.now_s())
        self._is_allocated = True

    def repartition(self, stages: tuple[StageLayers, ...]) -> list[StageLoaded]:
        from stageline.worker.build import change_layers

        self._check_alive()
        self._partition, self._timers = stages, []
        for stage in self._stages:
            stage.release_kv()
        return [
            change_layers(self._checkpoint, stage, part, self._config.quantization)
            for stage, part in zip(self._stages, stages, strict=True)
        ]

    def launch(self, microbatch: Microbatch) -> None:
        self._check_alive()
        self._launched.append(microbatch)

    def send_masks(self, masks: TokenMasks) -> None:
        self._check_alive()
        self._masks.append(masks)

    def before_sampling(self, send_masks: Callable[[], None]) -> None:
        self._before_sampling = send_masks

    def _add_masks(self, microbatch: Microbatch) -> None:
        """Those of later microbatches wait until these are prepared."""
        self._before_sampling()
        for masks in self._masks:
            if masks.number <= microbatch.number:
                self._stages[-1].add_masks(masks)
        self._masks = [masks for masks in self._masks if masks.number > microbatch.number]

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
        for stage, part, account in zip(self._stages, self._partition, self._accounts, strict=True):
            start_s = self._clock.now_s()
            account.enter("busy", start_s)
            try:
                output = stage.run(stage.prepare(microbatch), output, partial(self._add_masks, microbatch))
            except Exception as error:
                self._loss = _loss_of(part.stage_index, error)
                raise self._loss from error
            end_s = self._clock.now_s()
            account.enter("idle", end_s)
            account.computed(microbatch.num_rows, microbatch.num_decode_rows, microbatch.num_tokens, end_s - start_s)
            elapsed_s.append(end_s - start_s)
        assert isinstance(output, MicrobatchResult)
        return output.after(sum(elapsed_s), max(elapsed_s))

    def _wait_for_a_wake(self, until_s: float | None) -> None:
        patience_s = _LONGEST_WAIT_S if until_s is None else until_s - self._clock.now_s()
        self._poller.poll(math.ceil(min(max(0.0, patience_s), _LONGEST_WAIT_S) * 1000))
        self.wakeup.heard()

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise self._loss

    @property
    def partition(self) -> tuple[StageLayers, ...]:
        return self._partition

    def collect_item_times(self, goes_on: bool = True) -> list[StageItemTimes]:
        from stageline.worker.measure import ItemTimer

        timers, self._timers = self._timers, []
        for stage, part in zip(self._stages, self._partition, strict=True):
            timer = ItemTimer(
                part.stage_index, part.layers, part.is_first, part.is_last, stage.device, self._clock, stage.stretch
            )
            stage.time_items(timer if goes_on else None)
            self._timers.append(timer)
        timed = timers or self._timers
        self._timers = self._timers if goes_on else []
        return [timer.times() for timer in timed]

    def ask_for_spans(self, since_s: float, most_per_stage: int | None = None) -> None:
        if self._spans_question is None:
            self._spans_question = (since_s, most_per_stage)
            self.wakeup.ring()

    def take_spans(self) -> list[Span] | None:
        if self._spans_question is None:
            return None
        since_s, most = self._spans_question
        self._spans_question = None
        return self._recorder.spans(since_s, None if most is None else most * len(self._partition))

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        return self._recorder.spans(since_s)

    def ask_for_counters(self) -> None:
        self._is_counters_asked = True
        # They are there: whoever waits need not wait.
        self.wakeup.ring()

    def take_counters(self) -> list[StageCounters] | None:
        if not self._is_counters_asked:
            return None
        self._is_counters_asked = False
        return [account.snapshot(self._clock.now_s()) for account in self._accounts]

    def close(self) -> None:
        self._stages.clear()
        self._launched.clear()
        self.wakeup.close()
        if self._loss is None:
            self._loss = StagelineError("the engine was closed")


def _nobody_listens(_stage_index: int, _num_bytes_read: int, _num_bytes_total: int) -> None:
    pass


def _loss_of(stage_index: int, error: Exception) -> StagelineError:
    if isinstance(error, ConfigError):
        return ConfigError(f"stage {stage_index}: {error}")
    return WorkerLost(stage_index, f"{type(error).__name__}: {error}")
