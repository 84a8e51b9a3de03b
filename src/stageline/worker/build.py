"""Builds a stage from a checkpoint: settles device and dtype, checks that the weights fit, reads them, reports."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.stage_tensors import stage_file_bytes, stage_weight_bytes
from stageline.checkpoint.tensor_shards import RankCuts
from stageline.clock import Clock
from stageline.errors import ConfigError
from stageline.executor.messages import StageLoaded, WorkerConfig
from stageline.parallel.tensor_parallel import TensorParallel, alone
from stageline.pipeline.partition import StageLayers
from stageline.pipeline.slowdown import AS_FAST_AS_IT_IS, StageSlowdown
from stageline.timeline.recorder import Recorder
from stageline.weights.reader import CheckpointReader
from stageline.weights.shard import ShardedReader
from stageline.worker.device import free_memory_bytes, resolve_device, resolve_dtype
from stageline.worker.made_up_weights import MadeUpWeights
from stageline.worker.stage import Stage

logger = logging.getLogger(__name__)

_PROGRESS_STEPS = 100


def build_stage(
    checkpoint: Checkpoint,
    part: StageLayers,
    *,
    dtype: str,
    device: str,
    quantization: str = "none",
    max_model_len: int,
    clock: Clock,
    recorder: Recorder,
    on_progress: Callable[[int, int], None],
    slowdown: StageSlowdown = AS_FAST_AS_IT_IS,
    device_index: int | None = None,
    join: Callable[[torch.device, torch.dtype], TensorParallel] = alone,
) -> tuple[Stage, StageLoaded]:
    """Read one stage's weights and make it ready for `allocate_kv`.

    Args:
        dtype, device, quantization: as asked for, "auto" included.
        slowdown: makes it slower than it is; a fault for tests.
        on_progress: called with (bytes read, bytes in all), first with 0 read.
        device_index: which of several GPUs; the stage's number if it is not given.
        join: meets the other ranks that share the stage's layers.
    Raises: ConfigError if the weights do not fit or cannot be read, or would stay quantised off a CPU.
    """
    torch_device = resolve_device(device, part.stage_index if device_index is None else device_index)
    keeps_quantized = quantization != "none"
    if keeps_quantized and torch_device.type != "cpu":
        raise ConfigError(
            f"--quantization {quantization} multiplies on a CPU only, but this stage runs on {torch_device}; give "
            "--device cpu or --quantization none"
        )
    torch_dtype, note = resolve_dtype(dtype, checkpoint.spec.dtype, torch_device)
    if note and part.is_first:
        logger.info(note)
    holds = (part.layers, part.is_first, part.is_last)
    ranks = join(torch_device, torch_dtype)
    weight_bytes = stage_weight_bytes(checkpoint, *holds, torch_dtype.itemsize, keeps_quantized, ranks.size)
    free_bytes = free_memory_bytes(torch_device)
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"its weights take {weight_bytes:,} bytes, but {free_bytes:,} are free on {torch_device}; give it fewer "
            f"layers with --pp-layer-partition, use more stages, or a smaller --dtype"
        )
    on_bytes = _in_steps(stage_file_bytes(checkpoint, *holds, ranks.size), on_progress)
    with CheckpointReader(checkpoint, torch_dtype, torch_device, on_bytes, keeps_quantized) as reader:
        stage = Stage(
            checkpoint.spec,
            part.layers,
            reader if ranks.size == 1 else ShardedReader(reader, RankCuts(checkpoint.spec, ranks.rank, ranks.size)),
            max_model_len,
            ranks=ranks,
            stage_index=part.stage_index,
            clock=clock,
            record=recorder.record,
            slowdown=slowdown,
        )
    return stage, _report(part, stage, weight_bytes)


def build_made_up_stage(
    config: WorkerConfig, spec: ModelSpec, part: StageLayers, clock: Clock, recorder: Recorder
) -> tuple[Stage, StageLoaded]:
    """As `build_stage`, of a model without files: its answers mean nothing, its times do."""
    device = resolve_device(config.device, part.stage_index)
    dtype, _ = resolve_dtype(config.dtype, spec.dtype, device)
    weights = MadeUpWeights(dtype, device)
    stage = Stage(
        spec,
        part.layers,
        weights,
        config.max_model_len,
        stage_index=part.stage_index,
        clock=clock,
        record=recorder.record,
    )
    return stage, _report(part, stage, 0)


def change_layers(
    checkpoint: Checkpoint, stage: Stage, part: StageLayers, quantization: str = "none"
) -> StageLoaded:
    """Let a stage that has no KV cache hold other layers: those it has stay, the others are read.

    Progress is told as when it was built, and counts on.

    Raises: ConfigError if the layers to be read do not fit or cannot be read.
    """
    keeps_quantized, itemsize = quantization != "none", stage.dtype.itemsize
    stage.drop_layers(part.layers)
    held, weight_bytes = (
        stage_weight_bytes(
            checkpoint, layers, part.is_first, part.is_last, itemsize, keeps_quantized, stage.ranks.size
        )
        for layers in (stage.layers, part.layers)
    )
    free_bytes = free_memory_bytes(stage.device)
    if weight_bytes - held > free_bytes:
        raise ConfigError(
            f"its new layers take {weight_bytes - held:,} bytes, but {free_bytes:,} are free on {stage.device}; give "
            "--pp-layer-partition, and leave --rebalance out"
        )
    stage.read_layers(part.layers)
    return _report(part, stage, weight_bytes)


def _report(part: StageLayers, stage: Stage, weight_bytes: int) -> StageLoaded:
    return StageLoaded(
        stage_index=part.stage_index,
        weight_bytes=weight_bytes,
        free_bytes=free_memory_bytes(stage.device),
        memory_pool=str(stage.device),
        dtype=str(stage.dtype).removeprefix("torch."),
        rank=stage.ranks.rank,
    )


def _in_steps(num_bytes_total: int, on_progress: Callable[[int, int], None]) -> Callable[[int], None]:
    """Turns bytes just read into progress, reported about a hundred times in all."""
    on_progress(0, num_bytes_total)
    num_bytes_read = reported = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal num_bytes_read, reported
        num_bytes_read += num_bytes
        if (num_bytes_read - reported) * _PROGRESS_STEPS >= num_bytes_total or num_bytes_read == num_bytes_total:
            reported = num_bytes_read
            on_progress(num_bytes_read, num_bytes_total)

    return on_bytes
