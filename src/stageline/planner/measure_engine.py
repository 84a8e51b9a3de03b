"""The engine's own time for a microbatch: the real scheduler and loop, on stages that take no time at all.

One idea: an executor that answers at once leaves nothing to measure but the engine. Between two steps the caches are
emptied, as stages empty them in a run: what Python finds there decides how long it takes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import numpy as np

from stageline.clock import VirtualClock
from stageline.cost.host_profile import EngineCosts
from stageline.engine.core import EngineCore
from stageline.executor.simulated import SimulatedExecutor
from stageline.executor.simulated_stages import SimulatedPipeline
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.microbatch import MicrobatchLimits, MicrobatchResult
from stageline.pipeline.partition import stages_of
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec
from stageline.scheduler.limits import SchedulerLimits
from stageline.scheduler.scheduler import Scheduler

_LARGER_THAN_CACHES_BYTES = 2**26
_FEW_ROWS, _MANY_ROWS = 1, 32
_NUM_STEPS = 100
_PROMPT_TOKENS, _BLOCK_SIZE, _MAX_LEN = 128, 16, 1024


class _OwnTime(VirtualClock):
    """This thread's own time on a core, whatever else the host does; nobody moves it."""

    def now_s(self) -> float:
        return time.thread_time()

    def advance_to(self, time_s: float) -> None:
        """Time passes by itself."""


class _InstantStages(SimulatedExecutor):
    """Answers at once, and remembers when."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(SimulatedPipeline(1, lambda microbatch: [0.0], ()), stages_of((1,)), clock)
        self.answered_s = 0.0
        self._flush: Callable[[], None] = lambda: None

    def answers_after(self, flush: Callable[[], None]) -> None:
        """Do this before the next answer."""
        self._flush = flush

    def wait(self, until_s: float | None = None) -> MicrobatchResult | None:
        result = super().wait(until_s)
        self._flush()
        self.answered_s = time.thread_time()
        return result


class CacheFlush:
    """Empties the processor's caches, as far as a process can."""

    def __init__(self) -> None:
        self._larger_than_caches = np.zeros(_LARGER_THAN_CACHES_BYTES // 4, dtype=np.float32)

    def __call__(self) -> None:
        self._larger_than_caches += 1.0


def measure_engine() -> EngineCosts:
    """Takes some seconds; times are medians."""
    few, many = (_parts_s(rows) for rows in (_FEW_ROWS, _MANY_ROWS))
    costs = []
    for few_s, many_s in zip(few, many, strict=True):
        row_s = max(0.0, (many_s - few_s) / (_MANY_ROWS - _FEW_ROWS))
        costs += [max(0.0, few_s - row_s * _FEW_ROWS), row_s]
    return EngineCosts(*costs)


def _parts_s(num_rows: int) -> tuple[float, float, float]:
    """Of steady decodes: launching, what comes between a result and the launch, and what comes after it."""
    executor = _InstantStages(_OwnTime())
    num_blocks = num_rows * _MAX_LEN // _BLOCK_SIZE
    executor.allocate(MicrobatchLimits(num_blocks, _BLOCK_SIZE, 1 << 31, num_rows, 4096, _MAX_LEN))
    limits = SchedulerLimits(1, 1, num_rows, 4096, _MAX_LEN)
    core = EngineCore(executor, Scheduler(KVCacheManager(num_blocks, _BLOCK_SIZE, True), limits), _OwnTime())
    for number in range(num_rows):
        core.add(_request(number))
    parts: dict[str, list[float]] = defaultdict(list)
    flush = CacheFlush()
    for _ in range(_NUM_STEPS):
        executor.answers_after(flush)
        core.step()
        end_s = time.thread_time()
        span = core.recorder.spans(most=1)[0]
        if span.num_rows == num_rows == span.num_tokens:
            parts["launch"].append(span.duration_s)
            parts["result"].append(span.start_s - executor.answered_s)
            parts["news"].append(end_s - span.end_s)
    core.close()
    return median(parts["launch"]), median(parts["result"]), median(parts["news"])


def _request(number: int) -> EngineRequest:
    first = number * _MAX_LEN
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=list(range(first, first + _PROMPT_TOKENS)),
        sampler=SamplerSpec(seed=0),
        max_tokens=_MAX_LEN - _PROMPT_TOKENS,
        eos_token_ids=(),
        stop_token_ids=(),
        arrival_s=0.0,
    )
