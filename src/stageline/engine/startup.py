"""From what was asked for to a pipeline that is ready: refuse what cannot work, start stages, agree on the KV cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.encodings import PACKED_BLOCK_BYTES
from stageline.checkpoint.stage_tensors import can_stay_quantized
from stageline.checkpoint.tensor_shards import as_shared, check_shards
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.clock import Clock
from stageline.config.engine_config import EngineConfig
from stageline.engine.balancer import Balancer
from stageline.engine.core import EngineCore
from stageline.engine.layout import Layout, LayoutRules
from stageline.engine.partitioning import PartitionChoice, choose_partition
from stageline.engine.rebalance import RebalancePolicy
from stageline.engine.startup_table import count_stages
from stageline.errors import ConfigError
from stageline.executor.executor import Executor, OnProgress
from stageline.executor.in_process import InProcessExecutor
from stageline.executor.messages import StageLoaded
from stageline.executor.multi_process import MultiProcessExecutor
from stageline.executor.remote_stages import RemoteStages
from stageline.executor.stage_processes import available_cores
from stageline.grammar.compiler import GrammarCompiler
from stageline.grammar.mask_pool import MaskPool
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.kv.kv_plan import KVPlan, parse_kv_cache_memory
from stageline.links.wakeup import Wakeup
from stageline.pipeline.partition import StageLayers
from stageline.scheduler.limits import SchedulerLimits
from stageline.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_WIDEST_WINDOW_PER_STAGE = 4
_USUAL_KV_CACHE_FRACTION = 0.95


@dataclass(frozen=True)
class Pipeline:
    """A pipeline that is ready, and what was found out on the way."""

    core: EngineCore
    balancer: Balancer
    max_model_len: int

    @property
    def layout(self) -> Layout:
        """As it is now: with `--rebalance` it may change."""
        return self.balancer.layout

    @property
    def partition(self) -> tuple[StageLayers, ...]:
        return self.layout.partition

    @property
    def reports(self) -> tuple[StageLoaded, ...]:
        return self.layout.reports

    @property
    def kv_plan(self) -> KVPlan:
        return self.layout.kv_plan


def choose_max_model_len(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Raises: ConfigError if more is asked for than the model was made for."""
    most = checkpoint.spec.max_position_embeddings
    asked = config.max_model_len
    if asked is not None and asked > most:
        raise ConfigError(f"--max-model-len is {asked}, but the model has {most} positions; ask for at most {most}")
    return most if asked is None else asked


def check_quantization(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises: ConfigError if weights shall stay quantised that are not."""
    if config.quantization == "none":
        return
    supported = ", ".join(sorted(PACKED_BLOCK_BYTES))
    way_out = (
        f"give a GGUF file of such a type ({supported}), a checkpoint in AWQ, GPTQ, compressed-tensors or MXFP4, or "
        "--quantization none"
    )
    if not any(can_stay_quantized(entry) for entry in checkpoint.tensors.values()):
        found = ", ".join(sorted({entry.encoding for entry in checkpoint.tensors.values() if len(entry.shape) == 2}))
        raise ConfigError(
            f"--quantization {config.quantization}: the matrices of {checkpoint.path} are of type {found}, none of "
            f"which it can keep; {way_out}"
        )


def check_threads(config: EngineConfig) -> None:
    """Raises: ConfigError if a stage would have more threads than there are CPU cores."""
    num_cores = len(available_cores() or ()) or os.cpu_count()
    if num_cores is not None and config.threads_per_stage > num_cores:
        raise ConfigError(
            f"--threads-per-stage is {config.threads_per_stage}, but there are {num_cores} CPU cores; "
            f"give at most {num_cores}"
        )


def check_ranks(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raises: ConfigError if the ranks of some stage cannot share its layers."""
    shared = as_shared(checkpoint, config.enable_expert_parallel)
    for size in set(config.ranks_per_stage):
        check_shards(shared.spec, size)


def check_before_start(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Refuse what can be known to be wrong without starting anything.

    Returns: the longest request in tokens. Raises: ConfigError.
    """
    config.check()
    check_threads(config)
    check_quantization(config, checkpoint)
    check_ranks(config, checkpoint)
    max_model_len = choose_max_model_len(config, checkpoint)
    choose_partition(config, checkpoint, max_model_len)
    parse_kv_cache_memory(config.kv_cache_memory, config.pipeline_parallel_size)
    return max_model_len


def start_pipeline(
    config: EngineConfig,
    checkpoint: Checkpoint,
    clock: Clock,
    on_progress: OnProgress | None = None,
    grammars: GrammarCompiler | None = None,
    remote: RemoteStages | None = None,
    wakeup: Wakeup | None = None,
) -> Pipeline:
    """Bring a pipeline up.

    Args:
        grammars: to be shared with who checks requests; None if that is another process.
        remote: the stages that other machines run, if there are any.
        wakeup: to be rung for this pipeline, and for others after it.
    Raises: ConfigError before anything starts for whatever can be known by then, or after loading if memory is short,
        with everything stopped again; WorkerLost if a stage dies on the way.
    """
    if config.distributed_executor_backend == "ray":
        raise ConfigError(
            "--distributed-executor-backend ray works with `stageline serve` only; leave it out, or ask a server"
        )
    max_model_len = check_before_start(config, checkpoint)
    checkpoint = as_shared(checkpoint, config.enable_expert_parallel)
    if config.enable_expert_parallel and max(config.ranks_per_stage) == 1:
        logger.warning("--enable-expert-parallel changes nothing: no stage has several ranks; give -tp")
    loaded = _load(config, checkpoint, max_model_len, clock, on_progress, remote, wakeup)
    rules = LayoutRules(config, checkpoint, max_model_len)
    with _closed_on_failure(loaded):
        layout = rules.laid_out(loaded.partition, loaded.reports)
        loaded.executor.allocate(rules.limits(layout))
    _log_layout(layout, max_model_len)
    masks = MaskPool(grammars or _make_compiler(config, checkpoint), loaded.executor.wakeup.ring)
    balancer = Balancer(loaded.executor, rules, layout, _rebalance_policy(config), config.rebalance, clock)
    core = _make_core(config, loaded.executor, layout.kv_plan, max_model_len, masks, clock, balancer)
    return Pipeline(core, balancer, max_model_len)


def restart_pipeline(
    before: Pipeline,
    config: EngineConfig,
    checkpoint: Checkpoint,
    clock: Clock,
    on_progress: OnProgress | None = None,
    remote: RemoteStages | None = None,
    wakeup: Wakeup | None = None,
) -> Pipeline:
    """Bring up new stages in the place of those of a pipeline that lost one; requests that it has go on with them.

    Raises: as `start_pipeline`.
    """
    checkpoint = as_shared(checkpoint, config.enable_expert_parallel)
    loaded = _load(config, checkpoint, before.max_model_len, clock, on_progress, remote, wakeup)
    rules = LayoutRules(config, checkpoint, before.max_model_len)
    with _closed_on_failure(loaded):
        layout = rules.laid_out(loaded.partition, loaded.reports)
        plan = layout.kv_plan
        kv = KVCacheManager(plan.num_blocks, config.block_size, config.enable_prefix_caching, plan.window)
        loaded.executor.allocate(rules.limits(layout), *before.core.start_over(kv))
    _log_layout(layout, before.max_model_len)
    balancer = Balancer(loaded.executor, rules, layout, _rebalance_policy(config), config.rebalance, clock)
    before.core.go_on(loaded.executor, balancer)
    return Pipeline(before.core, balancer, before.max_model_len)


@dataclass(frozen=True)
class _Loaded:
    """Stages with their weights, and no KV cache yet."""

    executor: Executor
    partition: tuple[StageLayers, ...]
    reports: list[StageLoaded]


@contextmanager
def _closed_on_failure(loaded: _Loaded) -> Iterator[None]:
    try:
        yield
    except BaseException:
        loaded.executor.close()
        raise


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    clock: Clock,
    on_progress: OnProgress | None,
    remote: RemoteStages | None,
    wakeup: Wakeup | None,
) -> _Loaded:
    num_stages = config.pipeline_parallel_size
    choice = choose_partition(config, checkpoint, max_model_len)
    if choice.note:
        logger.info("%s", choice.note)
    kv_memory = parse_kv_cache_memory(config.kv_cache_memory, num_stages)
    if any((wish.fraction_of_free or 0) > _USUAL_KV_CACHE_FRACTION for wish in kv_memory):
        logger.warning(
            "--kv-cache-memory %s leaves little for anything else: the host may run out of memory",
            config.kv_cache_memory,
        )
    logger.info("loading %s into %s", config.model, count_stages(num_stages))
    executor = _make_executor(config, checkpoint, choice, max_model_len, clock, remote, wakeup)
    try:
        return _Loaded(executor, reports=executor.load(on_progress), partition=executor.partition)
    except BaseException:
        executor.close()
        raise


def _log_layout(layout: Layout, max_model_len: int) -> None:
    plan = layout.kv_plan
    logger.info("%s", layout.table)
    if plan.num_tokens < max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, fewer than the model length of %d: longer requests will be refused",
            plan.num_tokens,
            max_model_len,
        )


def _rebalance_policy(config: EngineConfig) -> RebalancePolicy | None:
    """None where no cut is better than another: one stage, or stages that take turns."""
    if config.pipeline_parallel_size == 1 or config.distributed_executor_backend == "in_process":
        return None
    return RebalancePolicy(config.rebalance_gain, config.rebalance_patience_s)


def _make_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    choice: PartitionChoice,
    max_model_len: int,
    clock: Clock,
    remote: RemoteStages | None,
    wakeup: Wakeup | None,
) -> Executor:
    if config.distributed_executor_backend == "in_process":
        return InProcessExecutor(config, checkpoint, choice.stages, max_model_len, clock)
    return MultiProcessExecutor(
        config, checkpoint.path, choice.stages, max_model_len, clock, choice.calibration, remote, wakeup
    )


def _make_compiler(config: EngineConfig, checkpoint: Checkpoint) -> GrammarCompiler:
    """Its tokenizer is loaded when the first grammar comes."""
    spec = checkpoint.spec
    return GrammarCompiler(
        lambda: load_tokenizer(checkpoint, config.tokenizer).serialized(), spec.vocab_size, spec.eos_token_ids
    )


def _make_core(
    config: EngineConfig,
    executor: Executor,
    plan: KVPlan,
    max_model_len: int,
    masks: MaskPool,
    clock: Clock,
    balancer: Balancer,
) -> EngineCore:
    kv = KVCacheManager(plan.num_blocks, config.block_size, config.enable_prefix_caching, plan.window)
    return EngineCore(executor, Scheduler(kv, scheduler_limits(config, max_model_len), masks), clock, balancer)


def scheduler_limits(config: EngineConfig, max_model_len: int) -> SchedulerLimits:
    """What the configuration asks of the scheduler."""
    return SchedulerLimits(
        num_stages=config.pipeline_parallel_size,
        window=config.pipeline_parallel_size,
        widest_window=_widest_window(config),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_chunk_tokens=config.prefill_chunk_tokens,
        max_decode_slowdown=config.max_decode_slowdown,
        # Where stages take turns in one process, a result is there as soon as its microbatch is waited for.
        look_ahead=config.look_ahead and config.distributed_executor_backend != "in_process",
    )


def _widest_window(config: EngineConfig) -> int:
    """Stages in one process take turns: more than one microbatch per stage would only make each smaller."""
    if config.distributed_executor_backend == "in_process":
        return config.pipeline_parallel_size
    return config.max_microbatches_in_flight or _WIDEST_WINDOW_PER_STAGE * config.pipeline_parallel_size
