"""One process per stage, here and perhaps on other machines: sends every microbatch to all of them, watches them.

The engine waits in one place for everything that can happen: a message from a stage, the end of a process, a stage that
no longer answers pings. Nothing is sent or woken while no work is in flight.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import zmq

from stageline.checkpoint.model_spec import ModelSpec
from stageline.clock import Clock
from stageline.config.engine_config import EngineConfig
from stageline.errors import FrameError, StagelineError, StageUnfit, WorkerLost
from stageline.executor.blame import Blame
from stageline.executor.clock_offsets import ClockOffsets
from stageline.executor.executor import CalibrationPlan, OnProgress
from stageline.executor.messages import (
    Allocate,
    Allocated,
    AssignLayers,
    Calibration,
    CollectCounters,
    CollectItemTimes,
    CollectSpans,
    Failed,
    FromRank,
    FromStage,
    FromWorker,
    InputClock,
    Loading,
    Ping,
    Pong,
    Spans,
    StageLoaded,
    Stop,
)
from stageline.executor.remote_stages import Channel, RemoteStages
from stageline.executor.stage_processes import StageAsked, StageProcesses
from stageline.executor.watch import Watch
from stageline.executor.worker_process import WorkerProcess
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.wakeup import Wakeup
from stageline.pipeline.item_times import StageItemTimes, times_of_ranks
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, TokenMasks
from stageline.pipeline.partition import StageLayers
from stageline.pipeline.rank_layout import RankLayout
from stageline.pipeline.rank_memory import memory_of_ranks
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import StageCounters

_Answer = TypeVar("_Answer", Allocated, StageItemTimes)
_Found = TypeVar("_Found", StageLoaded, StageItemTimes)

_LAST_WORDS_S = 0.5
"""How long an ended process's last message may take to arrive."""

_GOODBYE_S = 2.0
"""How long a process that was asked to stop may take."""


class MultiProcessExecutor:
    """See `stageline.executor.executor.Executor`.

    Args:
        model: path of the checkpoint.
        stages: the partition; with a calibration what there is of it is their number.
        max_model_len: longest request in tokens.
        calibration: lets the stages time some layers first, and cuts the layers by that.
        remote: the last of the stages, which other machines run.
        wakeup: outlives this executor; None makes one that does not.
        made_up: shape of a model that is only timed, in place of a checkpoint.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: str,
        stages: tuple[StageLayers, ...],
        max_model_len: int,
        clock: Clock,
        calibration: CalibrationPlan | None = None,
        remote: RemoteStages | None = None,
        wakeup: Wakeup | None = None,
        made_up: ModelSpec | None = None,
    ) -> None:
        self._owns_wakeup = wakeup is None
        self.wakeup = wakeup or Wakeup()
        self.partition = stages
        self._calibration = calibration
        self._config = config
        self._clock = clock
        self._loss: StagelineError | None = None
        self._is_loaded = False
        self._results: deque[MicrobatchResult] = deque()
        self._counters: dict[int, StageCounters] = {}
        self._is_counters_asked = False
        self._spans: dict[int, list[Span]] = {}
        sizes = config.ranks_per_stage
        self._ranks = RankLayout(sizes if len(sizes) == len(stages) else sizes * len(stages))
        self._offsets = ClockOffsets(len(stages))
        self._is_spans_asked = False
        self._watch = Watch(config.heartbeat_timeout_s, config.load_timeout_s, self._ranks.num_processes, clock.now_s())
        self._remote = remote
        self._blame = Blame(self._ranks, self._watch, remote)
        self._running = StageProcesses(self._ranks, remote)
        self._finalizer = weakref.finalize(self, self._running.end, 0.0)
        self._finalizer.atexit = False
        self._exit_finalizer = weakref.finalize(self, self._running.end_processes)
        try:
            self._start(model, stages, max_model_len, made_up)
        except BaseException:
            self._finalizer()
            raise

    def _start(
        self, model: str, stages: tuple[StageLayers, ...], max_model_len: int, made_up: ModelSpec | None
    ) -> None:
        self._incoming = self._running.listen()
        self._decoder: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        self._poller = zmq.Poller()
        self._poller.register(self._incoming, zmq.POLLIN)
        if self._remote is not None:
            self._poller.register(self._remote.socket, zmq.POLLIN)
        self._running.start(stages, StageAsked(self._config, model, max_model_len, self._asked_to_time(), made_up))
        self._control, self._pings = self._running.channels()
        for worker in self._running.workers:
            self._poller.register(worker.exit_fd, zmq.POLLIN)
        self._waking_poller = zmq.Poller()
        for source, events in self._poller.sockets:
            self._waking_poller.register(source, events)
        self._waking_poller.register(self.wakeup.fd, zmq.POLLIN)

    def _asked_to_time(self) -> Calibration | None:
        if self._calibration is None:
            return None
        return Calibration(self._calibration.planned, list(self._calibration.layers), self._config.block_size)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the stages' ranks, in order."""
        return [worker.pid for worker in self._running.workers]

    def load(self, on_progress: OnProgress | None = None) -> list[StageLoaded]:
        if self._calibration is not None:
            self._calibrate(self._calibration)
        reports = self._gather_reports(on_progress)
        self._is_loaded = True
        return reports

    def _gather_reports(self, on_progress: OnProgress | None = None) -> list[StageLoaded]:
        """From every stage, in order, while it loads; its first rank's progress is the stage's."""
        reports: dict[int, StageLoaded] = {}
        while len(reports) < self._ranks.num_processes:
            message = self._receive(Loading, StageLoaded)
            if isinstance(message, StageLoaded):
                process = self._ranks.process_of(message.stage_index, message.rank)
                self._watch.loaded(process)
                reports[process] = self._in_its_machine(message)
            elif isinstance(message, Loading):
                self._watch.progressed(self._ranks.process_of(message.stage_index, message.rank))
                if on_progress is not None and message.rank == 0:
                    on_progress(message.stage_index, message.num_bytes_read, message.num_bytes_total)
        stages = range(len(self._ranks.sizes))
        return [together([reports[process] for process in self._ranks.of_stage(index)]) for index in stages]

    def _in_its_machine(self, report: _Found) -> _Found:
        """Memory of two machines is not one pool, whatever they call it."""
        if self._remote is None or not (machine := self._remote.machine_of(report.stage_index)):
            return report
        return msgspec.structs.replace(report, memory_pool=f"{report.memory_pool} of {machine}")

    def _calibrate(self, plan: CalibrationPlan) -> None:
        times = [self._in_its_machine(one) for one in self._gather(StageItemTimes, self._ranks.num_processes)]
        stages = range(len(self._ranks.sizes))
        self._assign(plan.choose([times_of_ranks([times[one] for one in self._ranks.of_stage(i)]) for i in stages]))

    def _assign(self, stages: tuple[StageLayers, ...]) -> None:
        self.partition = stages
        for part in stages:
            for process in self._ranks.of_stage(part.stage_index):
                self._watch.progressed(process)
                self._control[process].send(encode_message(AssignLayers(part.layers.start, part.layers.stop)))

    def repartition(self, stages: tuple[StageLayers, ...]) -> list[StageLoaded]:
        self._check_alive()
        self._assign(stages)
        return self._gather_reports()

    def allocate(self, limits: MicrobatchLimits, epoch: int = 0, first_microbatch: int = 0) -> None:
        self._send_to_all(encode_message(Allocate(limits, epoch, first_microbatch)))
        self._gather(Allocated, self._ranks.num_processes)

    def launch(self, microbatch: Microbatch) -> None:
        self._send_to_all(encode_message(microbatch))

    def send_masks(self, masks: TokenMasks) -> None:
        self._check_alive()
        self._control[self._ranks.leaders[-1]].send(encode_message(masks))

    def before_sampling(self, send_masks: Callable[[], None]) -> None:
        """Only the last stage knows that moment; masks are sent whenever they are known."""

    def wake_on(self, source: zmq.Socket[bytes]) -> None:
        self._waking_poller.register(source, zmq.POLLIN)

    def wait(self, until_s: float | None = None) -> MicrobatchResult | None:
        if self._results:
            return self._results.popleft()
        with self._ending_all_on_a_loss():
            frame: bytes | None = None
            while frame is None:
                # Usually nothing is there yet, and to be told so by an error costs more than to wait for something.
                if self._wait_for_anything(self._waking_poller, until_s):
                    return None
                frame = self._next_frame()
            message = self._take_message(frame)
            if isinstance(message, MicrobatchResult):
                return message
            self._check_is_late(message)
            return None

    def ask_for_spans(self, since_s: float, most_per_stage: int | None = None) -> None:
        if self._is_spans_asked:
            return
        self._check_alive()
        self._is_spans_asked = True
        for stage_index, socket in enumerate(self._first_responders):
            its_since_s = since_s + self._offsets.ahead_s(stage_index)
            socket.send(encode_message(CollectSpans(its_since_s, most_per_stage)))

    def take_spans(self) -> list[Span] | None:
        if len(self._spans) < len(self._ranks.sizes):
            return None
        spans = [span for index in sorted(self._spans) for span in self._spans[index]]
        self._spans.clear()
        self._is_spans_asked = False
        return spans

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        if self._is_spans_asked:
            self._wait_for_spans()  # the answer to a question whose asker was interrupted
        self.ask_for_spans(since_s)
        return self._wait_for_spans()

    def _wait_for_spans(self) -> list[Span]:
        while (spans := self.take_spans()) is None:
            message = self._receive(Spans, MicrobatchResult)
            if isinstance(message, MicrobatchResult):
                self._results.append(message)
        return spans

    def collect_item_times(self, goes_on: bool = True) -> list[StageItemTimes]:
        self._check_alive()
        for process in self._ranks.leaders:
            self._control[process].send(encode_message(CollectItemTimes(goes_on)))
        return self._gather(StageItemTimes)

    def ask_for_counters(self) -> None:
        if self._is_counters_asked:
            return
        self._check_alive()
        self._is_counters_asked = True
        self._ask_responders(encode_message(CollectCounters()))

    def _ask_responders(self, frame: bytes) -> None:
        """Asked like a ping: the thread that answers is not the one that computes."""
        for socket in self._first_responders:
            socket.send(frame)

    @property
    def _first_responders(self) -> list[Channel]:
        """Of each stage's first rank, which knows what the others know."""
        return [self._pings[process] for process in self._ranks.leaders]

    def take_counters(self) -> list[StageCounters] | None:
        if len(self._counters) < len(self._ranks.sizes):
            return None
        counters = [self._counters[index] for index in sorted(self._counters)]
        self._counters.clear()
        self._is_counters_asked = False
        return counters

    def close(self) -> None:
        if not self._finalizer.alive:
            return
        patience_s = 0.0
        # A stage that is lost, or still loading, would not listen.
        if self._loss is None and self._is_loaded:
            self._send_to_all(encode_message(Stop()))
            patience_s = _GOODBYE_S
        self._loss = self._loss or StagelineError("the engine was closed")
        self._end(patience_s)

    def _end(self, patience_s: float) -> None:
        self._running.end(patience_s)
        self._finalizer.detach()
        self._exit_finalizer.detach()
        if self._owns_wakeup:
            self.wakeup.close()

    def _gather(self, kind: type[_Answer], count: int | None = None) -> list[_Answer]:
        """One answer from every stage, or so many, in order; results that come meanwhile are kept for `wait`."""
        answers: dict[int, _Answer] = {}
        while len(answers) < (count or len(self._ranks.sizes)):
            message = self._receive(kind, MicrobatchResult)
            if isinstance(message, MicrobatchResult):
                self._results.append(message)
            elif isinstance(message, kind):
                answers[self._process_of(message)] = message
        return [answers[index] for index in sorted(answers)]

    def _send_to_all(self, frame: bytes) -> None:
        self._check_alive()
        for socket in self._control:
            socket.send(frame)

    def _check_alive(self) -> None:
        if self._loss is not None:
            raise self._loss.with_traceback(None)

    # ---- the one place that waits ----

    def _receive(self, *wanted: type[FromWorker]) -> FromWorker:
        """The next message of a wanted kind. Raises: WorkerLost, ConfigError, FrameError; the stages are ended then."""
        with self._ending_all_on_a_loss():
            while True:
                while (frame := self._next_frame()) is None:
                    self._wait_for_anything(self._poller)
                message = self._take_message(frame)
                if isinstance(message, wanted):
                    return message
                self._check_is_late(message)

    def _check_is_late(self, message: FromWorker) -> None:
        """Spans may answer a question whose asker was interrupted, and of a broken link it is found out what it means.
        Raises: FrameError for a message of another kind."""
        if not isinstance(message, Pong | Spans | StageItemTimes | StageCounters | Failed):
            raise FrameError(f"a message {type(message).__name__} that nobody asked for")

    @contextmanager
    def _ending_all_on_a_loss(self) -> Iterator[None]:
        self._check_alive()
        try:
            yield
        except StagelineError as error:
            self._loss = error
            # With one stage gone the others wait for input that never comes.
            self._end(0.0)
            raise

    def _next_frame(self) -> bytes | None:
        """A message that is there; None if there is none. Raises: WorkerLost if another machine says so."""
        try:
            return self._incoming.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None if self._remote is None else self._remote.receive()

    def _take_message(self, frame: bytes) -> FromWorker:
        message = self._decoder.decode(frame)
        if not isinstance(message, MicrobatchResult):
            self._watch.heard_of(self._process_of(message))
        if isinstance(message, StageCounters):
            self._counters[message.stage_index] = message
        elif isinstance(message, Spans):
            self._spans[message.stage_index] = self._offsets.in_engine_time(message.stage_index, message.spans)
        elif isinstance(message, Pong):
            self._heard_pong(message)
        if isinstance(message, Failed):
            self._heard_failed(message)
        return message

    def _process_of(self, message: FromStage) -> int:
        """Who said it. Raises: FrameError if there is no such process."""
        rank = message.rank if isinstance(message, FromRank) else 0
        if not self._ranks.has(message.stage_index, rank):
            raise FrameError(f"a message of stage {message.stage_index}; there are {len(self._ranks.sizes)}")
        return self._ranks.process_of(message.stage_index, rank)

    def _heard_pong(self, pong: Pong) -> None:
        if (loss := self._blame.answered(self._process_of(pong), pong.asked_s)) is not None:
            raise loss
        if pong.rank > 0:
            return
        self._offsets.heard(pong.stage_index, pong.asked_s, pong.told_s, self._clock.now_s())
        for stage_index, ahead_s in self._offsets.news_of_inputs():
            self._first_responders[stage_index].send(encode_message(InputClock(ahead_s)))

    def _wait_for_anything(self, poller: zmq.Poller, until_s: float | None = None) -> bool:
        """Wait for a message; meanwhile notice ended and silent stages. Returns: whether to wait no more."""
        now_s = self._clock.now_s()
        self._watch.look(now_s)
        self._ask_for_signs_of_life()
        patience_s = self._watch.patience_s()
        for due_s in (until_s, self._blame.next_look_s(), None if self._remote is None else self._remote.due_s()):
            if due_s is not None:
                patience_s = min(patience_s, max(0.0, due_s - now_s))
        ready = dict(poller.poll(_milliseconds(patience_s)))
        now_s = self._clock.now_s()
        self._watch.look(now_s)
        if self._incoming in ready or (self._remote is not None and self._remote.socket in ready):
            return False
        if ended := [worker for worker in self._running.workers if worker.exit_fd in ready]:
            # Who misses another one may have left, too, by now.
            self._raise_loss_of_ended(next((worker for worker in ended if worker.was_killed()), ended[0]))
        if (loss := self._blame.look(now_s)) is not None:
            raise loss
        if (silence := self._watch.silence()) is not None:
            raise self._blame.silent(*silence)
        if self.wakeup.fd in ready:
            self.wakeup.heard()
        return bool(ready) or (until_s is not None and now_s >= until_s)

    def _ask_for_signs_of_life(self) -> None:
        for process in self._watch.stages_to_ask():
            if self._watch.can_answer(process):
                self._pings[process].send(encode_message(Ping(self._clock.now_s())))
            elif process >= len(self._running.workers) or not self._running.workers[process].is_stopped():
                self._watch.heard_of(process)

    def _raise_loss_of_ended(self, ended: WorkerProcess) -> None:
        """A process ended: its own last words say why, or else the way it ended does."""
        patience_s = 0.0 if ended.was_killed() else _LAST_WORDS_S
        deadline_s = time.monotonic() + patience_s
        while self._incoming.poll(_milliseconds(max(0.0, deadline_s - time.monotonic()))):
            self._take_message(self._incoming.recv())
        process = self._ranks.process_of(ended.stage_index, ended.rank)
        if (loss := self._blame.word_of(process)) is not None:
            raise loss
        raise WorkerLost(ended.stage_index, self._blame.reason_of(process, ended.describe_exit()))

    def _heard_failed(self, message: Failed) -> None:
        """Raises: the loss it tells of, unless that is still to be found out."""
        reason = self._blame.reason_of(self._process_of(message), message.message)
        if message.is_config_error:
            raise StageUnfit(message.stage_index, reason)
        if message.link_to is None or not self._ranks.has(message.link_to, 0):
            raise WorkerLost(message.stage_index, reason, message.traceback)
        now_s = self._clock.now_s()
        if (suspect := self._blame.begin(message, now_s)) is not None:
            self._pings[suspect].send(encode_message(Ping(now_s)))


def _milliseconds(duration_s: float) -> int:
    return math.ceil(duration_s * 1000)


def together(reports: Sequence[StageLoaded]) -> StageLoaded:
    """What a stage's ranks found as one report: of memory, all of theirs."""
    pool, free_bytes = memory_of_ranks(
        [report.memory_pool for report in reports], [report.free_bytes for report in reports]
    )
    return msgspec.structs.replace(
        reports[0],
        weight_bytes=sum(report.weight_bytes for report in reports),
        free_bytes=free_bytes,
        memory_pool=pool,
        num_ranks=len(reports),
    )
