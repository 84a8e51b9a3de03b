"""When simulated stages compute what: stages in order, one microbatch at a time each, links between them.

One idea: what a stage and a link do for a microbatch is known when it is launched, because later ones cannot overtake
it. So its way through all stages is one running maximum over a vector, and 64 stages cost hardly more than two.
Where stages share the cores of a host that does not hold: see `stageline.executor.simulated_cores`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stageline.errors import InternalError
from stageline.pipeline.microbatch import Microbatch

StageTimes = Callable[[Microbatch], Sequence[float]]
"""Seconds that each stage computes a microbatch, in order of stages; alone on its device."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SimulatedLink:
    """What lies between two stages. `bytes_per_s` is what one message after the other can take."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf


@dataclass(frozen=True)
class HostCores:
    """A host whose cores all stages and the engine share.

    Args:
        num_cores: what more of them want than there are, they share evenly; the engine goes first.
        slowdowns: of a microbatch with so many tokens: [stages at once, from 1 on] how many times as long computing
            takes while so many compute, because they share the memory; the last counts for more.
        core_share: of the cores that more of them want than there are, how much a stage gets that has so many tokens.
    """

    num_cores: int
    slowdowns: Callable[[int], Sequence[float]] = lambda num_tokens: (1.0,)
    core_share: Callable[[int], float] = lambda num_tokens: 1.0


@dataclass(frozen=True)
class SimulatedPipeline:
    """Everything about the stages that takes time.

    Args:
        stage_times: of computing alone.
        links: [stages - 1] in order.
        activation_bytes_per_token: what crosses a link for each token of a microbatch.
        to_stages_s: from the engine's send to a stage that listens.
        to_engine_s: from the last stage's send to the engine.
        to_first_stage_s: from the last stage to the first, for tokens that go there directly.
        prepare_s, prepare_row_s: a stage's own time for an announcement, and for each of its rows, before computing.
        begin_s: a stage's own time between having a microbatch's input and computing it.
        send_s: a stage's own time for its activations after computing, before it does anything else.
        hand_on_s, result_send_s: the last stage's, for tokens that go to the first and, after that, for the result.
        launch_s, launch_row_s: the engine's time for a microbatch, and for each of its rows.
        result_s, result_row_s: the engine's time for a result before it can launch again, and for each of its tokens.
        news_s, news_row_s: the same, for what it does after it has launched again.
        host: whose cores stages and engine share; None where each has a device of its own.
    """

    num_stages: int
    stage_times: StageTimes
    links: tuple[SimulatedLink, ...]
    activation_bytes_per_token: float = 0.0
    to_stages_s: float = 0.0
    to_engine_s: float = 0.0
    to_first_stage_s: float = 0.0
    prepare_s: float = 0.0
    prepare_row_s: float = 0.0
    begin_s: float = 0.0
    send_s: float = 0.0
    hand_on_s: float = 0.0
    result_send_s: float = 0.0
    launch_s: float = 0.0
    launch_row_s: float = 0.0
    result_s: float = 0.0
    result_row_s: float = 0.0
    news_s: float = 0.0
    news_row_s: float = 0.0
    host: HostCores | None = None

    def __post_init__(self) -> None:
        if self.num_stages < 1 or len(self.links) != self.num_stages - 1:
            raise InternalError(f"{self.num_stages} simulated stages with {len(self.links)} links between them")

    def transfer_s(self, link: SimulatedLink, num_tokens: int) -> float:
        return num_tokens * self.activation_bytes_per_token / link.bytes_per_s


@dataclass(eq=False)
class Passage:
    """A microbatch's way through the stages.

    Args:
        source: number of the microbatch whose tokens it needs on the first stage; -1 if it needs none.
        times_s: [stages] of computing, alone.
        slowdowns, core_share: see `HostCores`.
        waits_s: [stages] since when the stage could have computed it.
        starts_s, ends_s: [stages] when it computed it.
        result_s: when the engine can have the result.
    """

    number: int
    num_tokens: int
    num_rows: int
    source: int
    times_s: Sequence[float]
    slowdowns: Sequence[float] = (1.0,)
    core_share: float = 1.0
    waits_s: list[float] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    result_s: float = math.inf


class SimulatedStages(Protocol):
    """Where passages take their time. All times are on the simulation's clock and never go back."""

    def engine_works(self, now_s: float, work_s: float) -> float:
        """The engine computes for so long. Returns: when it is done."""
        ...

    def launch(self, passage: Passage, now_s: float) -> None:
        """The engine has sent a microbatch to all stages."""
        ...

    def next_result(self, until_s: float) -> Passage | None:
        """The next passage that has come to its end, in order; None if that is after `until_s`."""
        ...


class StagesOfTheirOwn:
    """Each stage has a device to itself, and so has the engine."""

    def __init__(self, pipeline: SimulatedPipeline) -> None:
        self._pipeline = pipeline
        num_stages = pipeline.num_stages
        # Stages and links in turn: s0, link 0, s1, link 1, ...
        self._free_s = np.zeros(2 * num_stages - 1)
        self._latency_s = np.zeros(2 * num_stages - 1)
        self._latency_s[1::2] = [link.latency_s for link in pipeline.links]
        self._byte_s = np.array([1.0 / link.bytes_per_s for link in pipeline.links])
        self._before: tuple[Array, Array] | None = None
        self._passages: deque[Passage] = deque()
        self._tokens_s: dict[int, float] = {}

    def engine_works(self, now_s: float, work_s: float) -> float:
        return now_s + work_s

    def launch(self, passage: Passage, now_s: float) -> None:
        pipeline, free_s = self._pipeline, self._free_s
        ready_s = free_s.copy()
        prepare_s = pipeline.prepare_s + pipeline.prepare_row_s * passage.num_rows
        ready_s[::2] = self._prepared_s(now_s + pipeline.to_stages_s, prepare_s)
        waits_s = ready_s[::2].copy()
        ready_s[0] = max(ready_s[0], self._tokens_s.get(passage.source, 0.0))
        service_s = np.empty_like(free_s)
        service_s[::2] = passage.times_s
        service_s[::2] += pipeline.begin_s + pipeline.send_s
        service_s[-1] += pipeline.hand_on_s + pipeline.result_send_s - pipeline.send_s
        service_s[1::2] = passage.num_tokens * pipeline.activation_bytes_per_token * self._byte_s
        # Each begins when it is ready and the one before is done and the message is there:
        # start[j] = max(ready[j], start[j-1] + service[j-1] + latency[j-1]), written as a running maximum.
        before_s = np.zeros_like(free_s)
        np.cumsum((service_s + self._latency_s)[:-1], out=before_s[1:])
        starts_s = before_s + np.maximum.accumulate(ready_s - before_s)
        self._free_s = starts_s + service_s
        self._before = (waits_s, starts_s[::2])
        computes_s = starts_s[::2] + pipeline.begin_s
        passage.waits_s, passage.starts_s = waits_s.tolist(), computes_s.tolist()
        passage.ends_s = (computes_s + np.asarray(passage.times_s)).tolist()
        passage.result_s = float(self._free_s[-1]) + pipeline.to_engine_s
        self._tokens_s[passage.number] = passage.ends_s[-1] + pipeline.hand_on_s + pipeline.to_first_stage_s
        self._passages.append(passage)

    def _prepared_s(self, announced_s: float, prepare_s: float) -> Array:
        """[stages] when each can begin with the next microbatch, its input aside.

        A stage that waits for the input of the one before prepares it meanwhile.
        """
        free_s = self._free_s[::2]
        prepared_s = np.maximum(free_s, announced_s) + prepare_s
        if self._before is None or prepare_s == 0:
            return prepared_s
        waits_s, starts_s = self._before
        is_prepared = np.maximum(waits_s, announced_s) + prepare_s <= starts_s
        return np.where(is_prepared, free_s, prepared_s)

    def next_result(self, until_s: float) -> Passage | None:
        if not self._passages or self._passages[0].result_s > until_s:
            return None
        passage = self._passages.popleft()
        # Whatever waits for its tokens was launched before the engine has them.
        del self._tokens_s[passage.number]
        return passage
