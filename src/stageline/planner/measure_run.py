"""A small pipeline that really runs: what stages, links and the engine take besides computing, as a run has them.

One idea: these are the processes, the sockets and the loop that serve, on weights that are larger than the caches; and
what is read from them is what every run records. So a preparation finds its data as cold as it will be, and a message
wakes whom it will wake.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from stageline.checkpoint.model_spec import ModelSpec
from stageline.clock import Clock, MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.engine.core import EngineCore
from stageline.engine.startup import scheduler_limits
from stageline.executor.multi_process import MultiProcessExecutor
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.microbatch import MicrobatchLimits, MicrobatchResult
from stageline.pipeline.partition import partition_layers
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec
from stageline.scheduler.scheduler import Scheduler
from stageline.timeline.span import Span

PROMPT_TOKENS = 16
_MAX_LEN = 256
_NUM_SETTLING_STEPS, _LEAST_STEPS = 4, 8


@dataclass(frozen=True)
class EngineStep:
    """What the engine did for one result.

    Args:
        microbatch: whose result it was.
        at_s: when it was there, on the run's clock.
        waiting_s: the thread's own time for waiting and receiving.
        result_s: until the next microbatch was being scheduled.
        launch_s: scheduling and sending it.
        news_s: the thread's own time for what came after.
        other_threads_s: what the process's other threads worked meanwhile.
    """

    microbatch: int
    at_s: float
    waiting_s: float
    result_s: float
    launch_s: float
    news_s: float
    other_threads_s: float


@dataclass(frozen=True)
class SteadyDecodes:
    """A stretch of a run in which nothing but decodes happened.

    Args:
        layer_counts: [stages].
        num_requests: that decoded.
    """

    layer_counts: tuple[int, ...]
    num_requests: int
    spans: list[Span]
    steps: list[EngineStep]

    @classmethod
    def together(cls, stretches: Sequence[SteadyDecodes]) -> SteadyDecodes:
        """Several stretches of one pipeline with as many requests. What is between them is not seen."""
        first = stretches[0]
        return cls(
            first.layer_counts,
            first.num_requests,
            [span for stretch in stretches for span in stretch.spans],
            [step for stretch in stretches for step in stretch.steps],
        )


class _WatchedExecutor(MultiProcessExecutor):
    """Remembers the newest result, when it gave it, and what waiting for it cost this thread."""

    number, answered_s, answered_at_s, waiting_s = -1, 0.0, 0.0, 0.0

    def wait(self, until_s: float | None = None) -> MicrobatchResult | None:
        start_s = time.thread_time()
        result = super().wait(until_s)
        self.answered_s, self.answered_at_s = time.thread_time(), self._clock.now_s()
        self.waiting_s += self.answered_s - start_s
        self.number = -1 if result is None else result.number
        return result


class RunningPipeline:
    """Stages of the first layers of a model's shape, and the engine's loop in this thread."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, num_layers: int, num_stages: int, most_rows: int) -> None:
        self.num_stages = num_stages
        config = replace(
            config, pipeline_parallel_size=num_stages, max_num_seqs=max(config.max_num_seqs, most_rows)
        )
        small = shortened(spec, num_layers)
        num_tokens = min(_MAX_LEN, spec.max_position_embeddings)
        self._num_tokens = num_tokens
        num_blocks = most_rows * -(-num_tokens // config.block_size)
        clock: Clock = MonotonicClock()
        stages = partition_layers(num_layers, num_stages, None)
        self._layer_counts = tuple(len(part.layers) for part in stages)
        self._executor = _WatchedExecutor(config, "", stages, num_tokens, clock, made_up=small)
        try:
            self._executor.load()
            limits = scheduler_limits(config, num_tokens)
            self._executor.allocate(
                MicrobatchLimits(
                    num_blocks,
                    config.block_size,
                    spec.vocab_size,
                    limits.max_num_seqs,
                    limits.max_num_batched_tokens,
                    num_tokens,
                )
            )
            scheduler = Scheduler(KVCacheManager(num_blocks, config.block_size, False), limits)
            self._core = EngineCore(self._executor, scheduler, clock)
        except BaseException:
            self._executor.close()
            raise
        self._clock = clock
        self._names = itertools.count()

    def decode(self, num_requests: int, duration_s: float) -> SteadyDecodes:
        """Let so many requests decode together for so long, after their prompts."""
        names = [str(next(self._names)) for _ in range(num_requests)]
        num_output_tokens = self._num_tokens - PROMPT_TOKENS
        for name in names:
            self._core.add(_request(name, num_output_tokens))
        is_prefilling = set(names)
        while is_prefilling:
            is_prefilling -= {update.request_id for update in self._core.step() if update.token_ids}
        for _ in range(_NUM_SETTLING_STEPS * self.num_stages):
            self._core.step()
        start_s = self._clock.now_s()
        steps: list[EngineStep] = []
        while self._core.has_work and (len(steps) < _LEAST_STEPS or self._clock.now_s() < start_s + duration_s):
            steps += self._step()
        end_s = self._clock.now_s()
        for name in names:
            self._core.abort(name)
        while self._core.has_work:
            self._core.step()
        spans = [span for span in self._core.spans(start_s) if start_s <= span.start_s and span.end_s <= end_s]
        return SteadyDecodes(self._layer_counts, num_requests, spans, steps)

    def _step(self) -> Iterator[EngineStep]:
        executor = self._executor
        executor.waiting_s = 0.0
        own_s, all_s = time.thread_time(), time.process_time()
        self._core.step()
        end_s = time.thread_time()
        others_s = time.process_time() - all_s - (end_s - own_s)
        schedule = next(iter(self._core.recorder.spans(most=1)), None)
        if executor.number < 0 or schedule is None or schedule.start_s < executor.answered_at_s:
            return
        result_s, launch_s = schedule.start_s - executor.answered_at_s, schedule.duration_s
        news_s = end_s - executor.answered_s - result_s - launch_s
        yield EngineStep(
            executor.number,
            executor.answered_at_s,
            executor.waiting_s,
            result_s,
            launch_s,
            max(0.0, news_s),
            max(0.0, others_s),
        )

    def close(self) -> None:
        self._core.close()


@contextmanager
def running_pipeline(
    config: EngineConfig, spec: ModelSpec, num_layers: int, num_stages: int, most_rows: int
) -> Iterator[RunningPipeline]:
    pipeline = RunningPipeline(config, spec, num_layers, num_stages, most_rows)
    try:
        yield pipeline
    finally:
        pipeline.close()


def shortened(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model of the first layers."""
    return msgspec.structs.replace(
        spec,
        num_layers=num_layers,
        layer_windows=spec.layer_windows[:num_layers],
        unrotated_layers=tuple(layer for layer in spec.unrotated_layers if layer < num_layers),
    )


def _request(name: str, num_output_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[(int(name) * 31 + position) % 97 + 3 for position in range(PROMPT_TOKENS)],
        sampler=SamplerSpec(seed=0),
        max_tokens=num_output_tokens,
        eos_token_ids=(),
        stop_token_ids=(),
        arrival_s=0.0,
    )
