"""The executor of simulations: no processes and no tensors, only when each stage would compute what.

One idea: the scheduler and the engine's loop are the real ones; their clock is a virtual one, which this executor moves
on to the next thing that happens. So a plan and a run leave the same kind of spans, and are read by the same analysis.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import zmq

from stageline.clock import VirtualClock
from stageline.errors import InternalError
from stageline.executor.executor import OnProgress
from stageline.executor.messages import StageLoaded
from stageline.executor.simulated_cores import StagesOnOneHost
from stageline.executor.simulated_stages import Passage, SimulatedPipeline, SimulatedStages, StagesOfTheirOwn
from stageline.links.wakeup import Wakeup
from stageline.pipeline.item_times import StageItemTimes
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, TokenMasks, check_microbatch
from stageline.pipeline.partition import StageLayers
from stageline.timeline.recorder import DEFAULT_CAPACITY
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import StageAccount, StageCounters

_SPANS_PER_STAGE = 3
_A_TOKEN = 1


class SimulatedExecutor:
    """See `stageline.executor.executor.Executor`. Generated tokens are made up, and never end a request.

    Args:
        partition: what the stages are said to hold; one entry per simulated stage.
        clock: moved on by `launch` and `wait`, and by nobody else while something is in flight.
    """

    def __init__(
        self, pipeline: SimulatedPipeline, partition: tuple[StageLayers, ...], clock: VirtualClock
    ) -> None:
        if len(partition) != pipeline.num_stages:
            raise InternalError(f"a partition for {len(partition)} stages, but {pipeline.num_stages} are simulated")
        self.wakeup = Wakeup()
        self.partition = partition
        self._pipeline = pipeline
        self._clock = clock
        self._stages: SimulatedStages = (
            StagesOfTheirOwn(pipeline) if pipeline.host is None else StagesOnOneHost(pipeline, pipeline.host)
        )
        self._limits: MicrobatchLimits | None = None
        self._launched: dict[int, Microbatch] = {}
        self._passed: deque[Passage] = deque(maxlen=DEFAULT_CAPACITY // _SPANS_PER_STAGE)
        self._news_s = 0.0
        self._busy_s = [0.0] * pipeline.num_stages
        self.num_microbatches = 0
        self._spans_question: tuple[float, int | None] | None = None
        self._is_counters_asked = False

    def load(self, on_progress: OnProgress | None = None) -> list[StageLoaded]:
        return [StageLoaded(part.stage_index, 0, 0, f"s{part.stage_index}", "simulated") for part in self.partition]

    def repartition(self, stages: tuple[StageLayers, ...]) -> list[StageLoaded]:
        raise InternalError("simulated stages take the times they were given, whatever layers they hold")

    def allocate(self, limits: MicrobatchLimits, epoch: int = 0, first_microbatch: int = 0) -> None:
        self._limits = limits

    def launch(self, microbatch: Microbatch) -> None:
        if self._limits is not None:
            check_microbatch(microbatch, self._limits)
        pipeline = self._pipeline
        self._work(pipeline.launch_s + pipeline.launch_row_s * microbatch.num_rows)
        passage = Passage(
            microbatch.number,
            microbatch.num_tokens,
            microbatch.num_rows,
            microbatch.oldest if microbatch.pending_rows else -1,
            pipeline.stage_times(microbatch),
        )
        self._launched[microbatch.number] = microbatch
        self._stages.launch(passage, self._clock.now_s())

    def _work(self, work_s: float) -> None:
        if work_s > 0:
            self._clock.advance_to(self._stages.engine_works(self._clock.now_s(), work_s))

    def send_masks(self, masks: TokenMasks) -> None:
        raise InternalError("simulated requests have no grammars")

    def before_sampling(self, send_masks: Callable[[], None]) -> None:
        """No masks are ever known."""

    def wake_on(self, source: zmq.Socket[bytes]) -> None:
        """Nobody sends anything into a simulation."""

    def wait(self, until_s: float | None = None) -> MicrobatchResult | None:
        """Go on to the next result, or to that time. Raises: InternalError if it would wait for ever."""
        news_s, self._news_s = self._news_s, 0.0
        self._work(news_s)
        now_s = self._clock.now_s()
        passage = self._stages.next_result(math.inf if until_s is None else max(until_s, now_s))
        if passage is None:
            if until_s is None:
                raise InternalError("a simulation waits, but nothing is in flight")
            self._clock.advance_to(until_s)
            return None
        self._clock.advance_to(passage.result_s)
        microbatch, pipeline = self._launched.pop(passage.number), self._pipeline
        num_tokens = len(microbatch.sampling_rows)
        self._work(pipeline.result_s + pipeline.result_row_s * num_tokens)
        self._news_s = pipeline.news_s + pipeline.news_row_s * num_tokens
        self._passed.append(passage)
        self.num_microbatches += 1
        times_s = [end_s - start_s for start_s, end_s in zip(passage.starts_s, passage.ends_s, strict=True)]
        self._busy_s = [busy_s + time_s for busy_s, time_s in zip(self._busy_s, times_s, strict=True)]
        return MicrobatchResult(
            microbatch.epoch, microbatch.number, [_A_TOKEN] * num_tokens, [], [], sum(times_s), max(times_s)
        )

    # ---- what is told of it ----

    def ask_for_spans(self, since_s: float, most_per_stage: int | None = None) -> None:
        self._spans_question = (since_s, most_per_stage)

    def take_spans(self) -> list[Span] | None:
        if self._spans_question is None:
            return None
        (since_s, most), self._spans_question = self._spans_question, None
        num_newest = len(self._passed) if most is None else -(-most // _SPANS_PER_STAGE)
        return self._spans_of(list(self._passed)[-num_newest:] if num_newest else [], since_s)

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        """Of the microbatches whose results came, as far as a ring of a stage would remember them."""
        return self._spans_of(self._passed, since_s)

    def _spans_of(self, passages: list[Passage] | deque[Passage], since_s: float) -> list[Span]:
        pipeline, last = self._pipeline, self._pipeline.num_stages - 1
        spans: list[Span] = []
        for passage in passages:
            if passage.result_s <= since_s:
                continue
            number, tokens, rows = passage.number, passage.num_tokens, passage.num_rows
            for stage, start_s in enumerate(passage.starts_s):
                end_s = passage.ends_s[stage]
                spans.append(Span(stage, number, "receive_wait", passage.waits_s[stage], start_s, tokens, rows))
                spans.append(Span(stage, number, "forward", start_s, end_s, tokens, rows))
                send_s = pipeline.send_s
                if stage == last:
                    spans.append(Span(stage, number, "sample", end_s, end_s, tokens, rows))
                    end_s, send_s = end_s + pipeline.hand_on_s, pipeline.result_send_s
                spans.append(Span(stage, number, "send", end_s, end_s + send_s, tokens, rows))
        return spans

    def collect_item_times(self, goes_on: bool = True) -> list[StageItemTimes]:
        """Nothing is measured."""
        return [
            StageItemTimes(part.stage_index, 0, 0, [], [], None, None, 0, f"s{part.stage_index}")
            for part in self.partition
        ]

    def ask_for_counters(self) -> None:
        self._is_counters_asked = True

    def take_counters(self) -> list[StageCounters] | None:
        """Busy and idle times alone."""
        if not self._is_counters_asked:
            return None
        self._is_counters_asked = False
        counters = []
        for part, busy_s in zip(self.partition, self._busy_s, strict=True):
            account = StageAccount(part.stage_index)
            account.start(0.0)
            account.enter("busy", 0.0)
            account.enter("idle", busy_s)
            counters.append(account.snapshot(self._clock.now_s()))
        return counters

    @property
    def busy_s(self) -> tuple[float, ...]:
        """[stages] time computed since the start."""
        return tuple(self._busy_s)

    def close(self) -> None:
        self._launched.clear()
        self.wakeup.close()
