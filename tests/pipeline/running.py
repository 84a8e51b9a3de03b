"""Runs requests through a real pipeline of stages, with a scheduler set up as a test wants it.

Starting processes is what costs time, so an executor is started once and its stages are given a new KV cache, and the
engine a new scheduler, for every case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from stageline.checkpoint import open_checkpoint
from stageline.clock import MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.engine.core import EngineCore
from stageline.executor.executor import Executor
from stageline.executor.in_process import InProcessExecutor
from stageline.executor.multi_process import MultiProcessExecutor
from stageline.kv.kv_cache_manager import KVCacheManager, WindowBlocks
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.pipeline.partition import partition_layers
from stageline.request import EngineRequest, RequestUpdate
from stageline.sampling import SamplerSpec
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits

MAX_MODEL_LEN = 256
BLOCK_SIZE = 16


@dataclass
class StartedPipeline:
    """Stages with their weights loaded."""

    executor: Executor
    num_stages: int
    vocab_size: int


def start_stages(
    model: Path,
    num_stages: int,
    backend: str,
    partition: str | None = None,
    ranks: str = "1",
    deals_experts: bool = False,
) -> StartedPipeline:
    checkpoint = open_checkpoint(str(model))
    parts = partition_layers(checkpoint.spec.num_layers, num_stages, partition)
    config = EngineConfig(
        model=str(model),
        pipeline_parallel_size=num_stages,
        tensor_parallel_size=ranks,
        enable_expert_parallel=deals_experts,
        dtype="float32",
        device="cpu",
        distributed_executor_backend=backend,
        bind_cores=False,
    )
    clock = MonotonicClock()
    if backend == "in_process":
        executor: Executor = InProcessExecutor(config, checkpoint, parts, MAX_MODEL_LEN, clock)
    else:
        executor = MultiProcessExecutor(config, checkpoint.path, parts, MAX_MODEL_LEN, clock)
    try:
        executor.load()
    except BaseException:
        executor.close()
        raise
    return StartedPipeline(executor, num_stages, checkpoint.spec.vocab_size)


@dataclass(frozen=True)
class Case:
    """How the scheduler is set up. 13 blocks of 16 tokens hold one long request and make several preempt each other."""

    max_chunk_tokens: int | None = None
    prefix_caching: bool = True
    num_blocks: int = 400
    window_blocks: WindowBlocks | None = None
    max_num_batched_tokens: int = 256
    window: int | None = None
    look_ahead: bool = True


@dataclass
class Finished:
    """All updates of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def take(self, update: RequestUpdate) -> None:
        self.token_ids += update.token_ids
        self.finish_reason = update.finish_reason
        self.num_cached_tokens = update.num_cached_tokens
        self.num_preemptions = update.num_preemptions


def request(request_id: str, prompt: list[int], max_tokens: int, sampler: SamplerSpec | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampler=sampler or SamplerSpec(seed=0),
        max_tokens=max_tokens,
        eos_token_ids=(),
        stop_token_ids=(),
        arrival_s=0.0,
    )


def make_core(pipeline: StartedPipeline, case: Case) -> EngineCore:
    """A fresh engine over stages with a fresh KV cache."""
    limits = MicrobatchLimits(
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        vocab_size=pipeline.vocab_size,
        max_num_seqs=64,
        max_num_batched_tokens=case.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        num_window_blocks=0 if case.window_blocks is None else case.window_blocks.num_blocks,
    )
    pipeline.executor.allocate(limits)
    window = case.window or pipeline.num_stages
    scheduler = Scheduler(
        KVCacheManager(case.num_blocks, BLOCK_SIZE, case.prefix_caching, case.window_blocks),
        SchedulerLimits(
            num_stages=pipeline.num_stages,
            window=window,
            max_num_seqs=64,
            max_num_batched_tokens=case.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            max_chunk_tokens=case.max_chunk_tokens,
            look_ahead=case.look_ahead and isinstance(pipeline.executor, MultiProcessExecutor),
        ),
    )
    return EngineCore(pipeline.executor, scheduler, MonotonicClock())


def run(pipeline: StartedPipeline, case: Case, requests: list[EngineRequest]) -> dict[str, Finished]:
    """Run all requests to their ends. The first has a start of one token, so that later ones find its prefix."""
    core = make_core(pipeline, case)
    finished = {asked.request_id: Finished() for asked in requests}

    def step() -> None:
        for update in core.step():
            finished[update.request_id].take(update)

    core.add(requests[0])
    while not finished[requests[0].request_id].token_ids:
        step()
    for asked in requests[1:]:
        core.add(asked)
    while core.has_work:
        step()
    assert all(result.finish_reason is not None for result in finished.values())
    return finished

