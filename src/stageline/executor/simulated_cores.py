"""Simulated stages that share a host's cores with one another and with the engine.

One idea: between two events everybody who computes does so at a rate that depends on who else does; so the next event
is found, everybody's remaining work is reduced by what was done until then, and the rates are found anew.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from stageline.executor.simulated_stages import HostCores, Passage, SimulatedPipeline

_NOTHING_S = 1e-12


class _Phase(Enum):
    IDLE = 0
    PREPARING = 1
    BEGINNING = 2
    COMPUTING = 3
    HANDING_ON = 4
    SENDING = 5


@dataclass(eq=False)
class _Stage:
    """What a stage's thread does, and what lies before it.

    Args:
        announced: not prepared yet.
        prepared: waiting to be computed, in order.
        inputs: numbers of microbatches whose input is there.
        since_s: since when it waits for the input of the first of `prepared`.
    """

    index: int
    phase: _Phase = _Phase.IDLE
    left_s: float = 0.0
    passage: Passage | None = None
    announced: deque[Passage] = field(default_factory=deque)
    prepared: deque[Passage] = field(default_factory=deque)
    inputs: set[int] = field(default_factory=set)
    since_s: float = 0.0
    link_free_s: float = 0.0


class StagesOnOneHost:
    """See `stageline.executor.simulated_stages.SimulatedStages`."""

    def __init__(self, pipeline: SimulatedPipeline, host: HostCores) -> None:
        self._pipeline = pipeline
        self._host = host
        self._now_s = 0.0
        self._stages = [_Stage(index) for index in range(pipeline.num_stages)]
        self._engine_left_s = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, int, Passage]] = []
        self._finished: deque[Passage] = deque()
        self._sampling: set[int] = set()
        self._waiting_for_tokens: list[Passage] = []

    # ---- what the executor asks ----

    def engine_works(self, now_s: float, work_s: float) -> float:
        self._run_until(now_s)
        self._engine_left_s = work_s
        while self._engine_left_s > _NOTHING_S:
            self._step(math.inf)
        self._engine_left_s = 0.0
        return self._now_s

    def launch(self, passage: Passage, now_s: float) -> None:
        self._run_until(now_s)
        num_stages = len(self._stages)
        passage.slowdowns = self._host.slowdowns(passage.num_tokens)
        passage.core_share = self._host.core_share(passage.num_tokens)
        passage.waits_s, passage.starts_s, passage.ends_s = ([0.0] * num_stages for _ in range(3))
        self._sampling.add(passage.number)
        if passage.source in self._sampling:
            self._waiting_for_tokens.append(passage)
        else:
            self._stages[0].inputs.add(passage.number)
        self._after(self._pipeline.to_stages_s, _ANNOUNCED, passage)

    def next_result(self, until_s: float) -> Passage | None:
        while not self._finished and self._step(until_s):
            pass
        return self._finished.popleft() if self._finished else None

    # ---- how time passes ----

    def _run_until(self, time_s: float) -> None:
        while self._now_s < time_s and self._step(time_s):
            pass
        self._now_s = max(self._now_s, time_s)

    def _step(self, until_s: float) -> bool:
        """Go on to the next event, or to `until_s` if that comes first. False if nothing will ever happen again."""
        working = [stage for stage in self._stages if stage.phase is not _Phase.IDLE]
        rates = self._rates(working)
        next_s = self._events[0][0] if self._events else math.inf
        for stage, rate in zip(working, rates, strict=True):
            if rate > 0:
                next_s = min(next_s, self._now_s + stage.left_s / rate)
        if self._engine_left_s > _NOTHING_S:
            next_s = min(next_s, self._now_s + self._engine_left_s)
        if next_s > until_s:
            self._spend(working, rates, until_s)
            return False
        if next_s == math.inf:
            return False
        self._spend(working, rates, next_s)
        for stage in working:
            if stage.left_s <= _NOTHING_S:
                self._finish_phase(stage)
        while self._events and self._events[0][0] <= self._now_s:
            _, _, kind, passage = heapq.heappop(self._events)
            self._happen(kind, passage)
        return True

    def _rates(self, working: list[_Stage]) -> list[float]:
        """How much of its work each stage does in a second; the engine does all of its own."""
        cores = max(0, self._host.num_cores - (self._engine_left_s > _NOTHING_S))
        num_computing = min(sum(stage.phase is _Phase.COMPUTING for stage in working), self._host.num_cores)
        if len(working) <= cores:
            return [1.0 / _slowdown(stage, num_computing) for stage in working]
        share = cores / len(working)
        return [share * _core_share(stage) / _slowdown(stage, num_computing) for stage in working]

    def _spend(self, working: list[_Stage], rates: list[float], until_s: float) -> None:
        elapsed_s = max(0.0, until_s - self._now_s)
        for stage, rate in zip(working, rates, strict=True):
            stage.left_s -= elapsed_s * rate
        self._engine_left_s -= min(self._engine_left_s, elapsed_s)
        self._now_s = max(self._now_s, until_s)

    def _after(self, delay_s: float, kind: int, passage: Passage) -> None:
        if delay_s <= 0:
            self._happen(kind, passage)
        else:
            heapq.heappush(self._events, (self._now_s + delay_s, next(self._order), kind, passage))

    # ---- what happens ----

    def _happen(self, kind: int, passage: Passage) -> None:
        if kind == _ANNOUNCED:
            for stage in self._stages:
                stage.announced.append(passage)
                self._find_work(stage)
        elif kind == _RESULT:
            passage.result_s = self._now_s
            self._finished.append(passage)
        elif kind == _TOKENS:
            self._take_tokens(passage.number)
        else:
            self._stages[kind].inputs.add(passage.number)
            self._find_work(self._stages[kind])

    def _take_tokens(self, number: int) -> None:
        self._sampling.discard(number)
        self._stages[0].inputs.update(one.number for one in self._waiting_for_tokens if one.source == number)
        self._waiting_for_tokens = [one for one in self._waiting_for_tokens if one.source != number]
        self._find_work(self._stages[0])

    def _find_work(self, stage: _Stage) -> None:
        """Announcements first, as they come; then the oldest microbatch, if its input is there."""
        if stage.phase is not _Phase.IDLE:
            return
        if stage.announced:
            passage = stage.passage = stage.announced.popleft()
            prepare_s = self._pipeline.prepare_s + self._pipeline.prepare_row_s * passage.num_rows
            self._begin(stage, _Phase.PREPARING, prepare_s)
        elif stage.prepared and stage.prepared[0].number in stage.inputs:
            passage = stage.passage = stage.prepared.popleft()
            stage.inputs.discard(passage.number)
            index = stage.index
            passage.waits_s[index] = min(stage.since_s, self._now_s)
            self._begin(stage, _Phase.BEGINNING, self._pipeline.begin_s)

    def _begin(self, stage: _Stage, phase: _Phase, work_s: float) -> None:
        stage.phase, stage.left_s = phase, work_s
        if work_s <= _NOTHING_S:
            self._finish_phase(stage)

    def _finish_phase(self, stage: _Stage) -> None:
        passage, phase, stage.phase = stage.passage, stage.phase, _Phase.IDLE
        assert passage is not None
        if phase is _Phase.PREPARING:
            if not stage.prepared:
                stage.since_s = self._now_s
            stage.prepared.append(passage)
        elif phase is _Phase.BEGINNING:
            passage.starts_s[stage.index] = self._now_s
            self._begin(stage, _Phase.COMPUTING, passage.times_s[stage.index])
            return
        elif phase is _Phase.COMPUTING:
            passage.ends_s[stage.index] = self._now_s
            if stage.index == len(self._stages) - 1:
                self._begin(stage, _Phase.HANDING_ON, self._pipeline.hand_on_s)
            else:
                self._begin(stage, _Phase.SENDING, self._pipeline.send_s)
            return
        elif phase is _Phase.HANDING_ON:
            # Sending begins first: what the tokens set going must not overtake the result.
            self._begin(stage, _Phase.SENDING, self._pipeline.result_send_s)
            self._after(self._pipeline.to_first_stage_s, _TOKENS, passage)
            return
        else:
            stage.since_s = self._now_s
            self._send_on(stage, passage)
        self._find_work(stage)

    def _send_on(self, stage: _Stage, passage: Passage) -> None:
        pipeline, index = self._pipeline, stage.index
        if index == len(self._stages) - 1:
            self._after(pipeline.to_engine_s, _RESULT, passage)
            return
        link = pipeline.links[index]
        stage.link_free_s = max(self._now_s, stage.link_free_s) + pipeline.transfer_s(link, passage.num_tokens)
        self._after(stage.link_free_s + link.latency_s - self._now_s, index + 1, passage)


def _core_share(stage: _Stage) -> float:
    return 1.0 if stage.passage is None else stage.passage.core_share


def _slowdown(stage: _Stage, num_computing: int) -> float:
    if stage.phase is not _Phase.COMPUTING or stage.passage is None:
        return 1.0
    slowdowns = stage.passage.slowdowns
    return slowdowns[min(num_computing, len(slowdowns)) - 1]


_ANNOUNCED, _RESULT, _TOKENS = -1, -2, -3
"""What may happen to a passage; from 0 on: its activations reach that stage."""
