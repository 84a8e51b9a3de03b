"""The one loop, the same for one stage and for sixty-four, in one process or many, real or simulated.

    keep launching microbatches while the window has room and the scheduler has something ready;
    then wait for one event and handle it.

Nothing polls, nothing sleeps, no empty microbatch is ever sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import zmq

from stageline.clock import Clock
from stageline.engine.balancer import Balancer, Notice
from stageline.engine.events import EventLog, StageShares
from stageline.engine.stats import EngineFacts, EngineStats, ProcessUsage, SchedulerStats, StatsCollector
from stageline.errors import ConfigError, InternalError, WorkerLost
from stageline.executor.executor import Executor
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.outputs import FinishReason
from stageline.pipeline.in_flight import InFlight
from stageline.pipeline.item_times import StageItemTimes
from stageline.request import EngineRequest, RequestUpdate
from stageline.scheduler.scheduler import Scheduler
from stageline.timeline.recorder import Recorder
from stageline.timeline.request_journeys import RequestTrace
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import StageCounters

_MOST_TRACES = 32
"""Of requests that ended, and of ones that run."""


class EngineCore:
    """Drives one pipeline. The only one who talks to its scheduler and its executor.

    Args:
        balancer: may cut the layers otherwise; None leaves them as they are.
    """

    def __init__(
        self, executor: Executor, scheduler: Scheduler, clock: Clock, balancer: Balancer | None = None
    ) -> None:
        self.recorder = Recorder()
        self._executor = executor
        self._scheduler = scheduler
        self._in_flight = InFlight(scheduler.most_in_flight)
        self._clock = clock
        self._in_flight_since_s: float | None = None
        self._launched_s: dict[int, float] = {}
        self._early_ends: list[RequestUpdate] = []
        executor.before_sampling(self._send_masks)
        self._stats = StatsCollector(scheduler.limits.max_model_len, clock.now_s())
        self._events = EventLog()
        self._shares = StageShares()
        self._num_preemptions = 0
        self._balancer = balancer
        self._counters: list[StageCounters] | None = None
        self._traces: deque[RequestTrace] = deque(maxlen=_MOST_TRACES)

    @property
    def has_work(self) -> bool:
        """Something is unfinished or still in the pipeline."""
        return bool(self._scheduler.num_unfinished or len(self._in_flight) or self._early_ends)

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self._scheduler.num_unfinished

    def add(self, request: EngineRequest) -> None:
        """Raises: RequestError if the request can never be served."""
        self._scheduler.add(request)
        self._stats.added(request)

    def refused(self) -> None:
        """Count a request that found no room."""
        self._stats.refused()
        self._events.add(self._clock.now_s(), "refusal", "a request was refused: the queue is full")

    def abort(self, request_id: str, finish_reason: FinishReason = "abort") -> RequestUpdate | None:
        """End a request.

        Args:
            finish_reason: how it counts; "stop" if a stop string ended it.
        Returns: its last update, or None if it had ended.
        """
        update = self._scheduler.abort(request_id, self._clock.now_s())
        if update is not None:
            self._stats.ended(update, finish_reason)
            if finish_reason == "abort":
                self._events.add(self._clock.now_s(), "abort", f"request {request_id} was aborted")
        return update

    def wake_on(self, source: zmq.Socket[bytes]) -> None:
        """Let a step end when there is something to receive from this socket."""
        self._executor.wake_on(source)

    def wake(self) -> None:
        """Let a step end now; from any thread."""
        self._executor.wakeup.ring()

    def start_over(self, kv: KVCacheManager) -> tuple[int, int]:
        """The stages are gone, with what was in flight; others with an empty KV cache take their place, see `go_on`.

        Returns: the epoch, and the number of the first microbatch that they may get.
        """
        self._in_flight = InFlight(self._scheduler.most_in_flight)
        self._launched_s.clear()
        self._in_flight_since_s = None
        self._counters = None
        epoch_and_first = self._scheduler.start_over(kv)
        self._end_early(self._scheduler.end_misfits(self._clock.now_s()))
        return epoch_and_first

    def go_on(self, executor: Executor, balancer: Balancer) -> None:
        """With these stages; what was running is computed again, and goes on where it was."""
        self._executor = executor
        self._balancer = balancer
        executor.before_sampling(self._send_masks)

    def stalled_s(self, now_s: float) -> float:
        """How long something has been in flight without a result; any thread may ask."""
        since_s = self._in_flight_since_s
        return 0.0 if since_s is None else max(0.0, now_s - since_s)

    def step(self, waits_for_work: bool = False, until_s: float | None = None) -> list[RequestUpdate]:
        """Fill the window, wait for one event, apply it if it is a result, and fill the window again.

        Args:
            waits_for_work: wait also when nothing is in flight, for whatever `Executor.wait` waits for; otherwise
                return at once then.
            until_s: wait no longer than this, on the engine's clock.
        Raises: WorkerLost if a stage is gone; the pipeline is closed then.
        """
        self._move_the_cut()
        self._fill_window()
        if len(self._in_flight) == 0 and not self._scheduler.is_waiting_for_masks:
            if self._early_ends:
                return self._take_ends()
            if self._scheduler.num_unfinished:
                raise InternalError(
                    f"nothing is in flight and nothing can be scheduled, with {self._scheduler.num_waiting} requests "
                    f"waiting and {self._scheduler.num_running} running"
                )
            if not waits_for_work:
                return []
        result = self._executor.wait(until_s)
        if result is None:
            self._fill_window()
            self._look_at_stages()
            return self._take_ends()
        microbatch = self._in_flight.completed(result)
        now_s = self._clock.now_s()
        self._in_flight_since_s = now_s if len(self._in_flight) else None
        news = self._scheduler.completed(microbatch, result, now_s)
        # The stages get their next work before anybody counts the news, sends them, or turns them into text.
        self._fill_window()
        updates = [one.update(now_s) for one in news]
        self._traces.extend(one.request.trace for one in news if one.finish_reason is not None)
        self._stats.completed(microbatch, now_s - self._launched_s.pop(microbatch.number), result.computing_s)
        self._stats.updated(updates)
        if self._balancer is not None and self._balancer.is_due(now_s):
            self._executor.ask_for_counters()
        return updates + self._take_ends()

    def _send_masks(self) -> None:
        """Every mask that is known by now, to those who sample; requests that waited for theirs may be scheduled."""
        if not self._scheduler.has_grammars:
            return
        masks, ends = self._scheduler.take_masks(self._clock.now_s())
        for message in masks:
            self._executor.send_masks(message)
        self._end_early(ends)

    def _end_early(self, updates: list[RequestUpdate]) -> None:
        """Count ends that no result brought, and tell them with the next step's news."""
        for update in updates:
            self._stats.ended(update, update.finish_reason or "abort")
        self._early_ends += updates

    def _take_ends(self) -> list[RequestUpdate]:
        ends, self._early_ends = self._early_ends, []
        return ends

    def _fill_window(self) -> None:
        self._send_masks()
        if self._wants_to_move:
            return
        self._in_flight.window = self._scheduler.most_in_flight
        while self._in_flight.has_room:
            start_s = self._clock.now_s()
            microbatch = self._scheduler.schedule(start_s)
            self._note_preemptions(start_s)
            if microbatch is None:
                return
            self._in_flight.launched(microbatch)
            self._executor.launch(microbatch)
            self._send_masks()
            self._stats.launched(microbatch)
            self._launched_s[microbatch.number] = start_s
            if self._in_flight_since_s is None:
                self._in_flight_since_s = start_s
            self.recorder.record(
                Span(
                    stage_index=-1,
                    microbatch=microbatch.number,
                    kind="schedule",
                    start_s=start_s,
                    end_s=self._clock.now_s(),
                    num_tokens=microbatch.num_tokens,
                    num_rows=microbatch.num_rows,
                )
            )

    @property
    def _wants_to_move(self) -> bool:
        """Nothing is launched before the layers are cut otherwise, which is done once nothing is in flight."""
        return self._balancer is not None and self._balancer.wants_to_move

    def _move_the_cut(self) -> None:
        """If that is wanted. Only when a step begins: a stage may be lost meanwhile, and with it what a result brought
        and nobody has been told yet."""
        if self._balancer is not None and self._wants_to_move and len(self._in_flight) == 0:
            self._tell(self._balancer.move(self._scheduler))

    def cut_otherwise(self, layer_counts: Sequence[int]) -> None:
        """Move layers between the stages as soon as nothing is in flight; requests that run are computed again.

        Raises: ConfigError if the cut does not fit, or this pipeline keeps the one it has.
        """
        if self._balancer is None:
            raise ConfigError("the layers of this pipeline are cut for good")
        self._balancer.ask_to_move(layer_counts)

    def _look_at_stages(self) -> None:
        """The counters that were asked for have come, perhaps. Whoever asked for them gets them later."""
        counters = self._executor.take_counters()
        if counters is None:
            return
        self._counters, now_s = counters, self._clock.now_s()
        for stage_index, text in self._shares.slower(counters):
            self._events.add(now_s, "slow_stage", text, stage_index)
        for notice in [] if self._balancer is None else self._balancer.look(counters, now_s):
            self._tell(notice)

    def _tell(self, notice: Notice) -> None:
        self._events.add(self._clock.now_s(), notice.kind, notice.text)

    def note_loss(self, loss: WorkerLost) -> None:
        """For those who look at the pipeline once it is there again."""
        first_line = loss.reason.partition("\n")[0]
        self._events.add(self._clock.now_s(), "lost", f"s{loss.stage_index} was lost: {first_line}", loss.stage_index)

    def _note_preemptions(self, now_s: float) -> None:
        num_new = self._scheduler.num_preemptions - self._num_preemptions
        if num_new:
            self._num_preemptions += num_new
            what = "a request was" if num_new == 1 else f"{num_new} requests were"
            self._events.add(now_s, "preemption", f"{what} preempted: the KV cache is full; it will be computed again")

    def spans(self, since_s: float = 0.0) -> list[Span]:
        """What all stages and this loop recorded."""
        return self.recorder.spans(since_s) + self._executor.collect_spans(since_s)

    def ask_for_spans(self, since_s: float, most_per_stage: int) -> None:
        """Ask the stages for their spans since then, the newest of them if there are many; does not wait."""
        self._executor.ask_for_spans(since_s, most_per_stage)

    def take_spans(self, since_s: float, most_per_stage: int) -> list[Span] | None:
        """The spans that were asked for, and this loop's own, once; None as long as a stage owes its part."""
        spans = self._executor.take_spans()
        return None if spans is None else self.recorder.spans(since_s, most_per_stage) + spans

    def collect_item_times(self) -> list[StageItemTimes]:
        """See `stageline.executor.executor.Executor.collect_item_times`; nobody else asks from then on."""
        if self._balancer is not None:
            self._balancer.leave_alone()
        return self._executor.collect_item_times()

    def forget_stats(self) -> None:
        """Count from here."""
        self._stats = StatsCollector(self._scheduler.limits.max_model_len, self._clock.now_s())

    def ask_for_stats(self) -> None:
        """Ask the stages for their part of the statistics; does not wait."""
        self._counters = None
        self._executor.ask_for_counters()

    def take_stats(self, facts: EngineFacts) -> EngineStats | None:
        """The statistics that were asked for, once; None as long as a stage owes its part."""
        self._look_at_stages()
        counters, self._counters = self._counters, None
        if counters is None:
            return None
        scheduler, now_s = self._scheduler, self._clock.now_s()
        return self._stats.snapshot(
            now_s,
            ProcessUsage.of_this_process(),
            facts,
            SchedulerStats(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_waiting_tokens=scheduler.num_waiting_tokens,
                num_blocks=scheduler.num_blocks,
                num_used_blocks=scheduler.num_used_blocks,
                num_preemptions=scheduler.num_preemptions,
                num_prefix_queries_tokens=scheduler.num_prefix_queries_tokens,
                num_prefix_hits_tokens=scheduler.num_prefix_hits_tokens,
            ),
            self._in_flight.window,
            self._in_flight.microbatches,
            counters,
            self._events.newest_first(),
            [*self._traces, *scheduler.traces(_MOST_TRACES)],
        )

    def close(self) -> None:
        self._executor.close()
        self._scheduler.close()
