"""Which layers each stage gets: as asked, by the default rule, or by cost for `--pp-layer-partition auto`.

One idea: `auto` takes the best knowledge there is, and says in the log which it was: a profile that `stageline tune`
kept; else times that the stages take themselves, of a few layers, before they load; else an estimate from shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.tensor_shards import as_shared, rank_spec
from stageline.config import environment
from stageline.config.engine_config import AUTO_PARTITIONS, PLANNED_CONTEXT_TOKENS, PLANNED_REQUESTS, EngineConfig
from stageline.cost.layer_costs import (
    analytic_costs,
    costs_from_measured,
    item_bytes,
    layer_kinds,
    layers_to_time,
    rooms_of,
)
from stageline.cost.profile import ProfileKey, load_profile, profile_key
from stageline.executor.executor import CalibrationPlan
from stageline.kv.kv_size import kept_window, kv_bytes_per_layer, kv_bytes_per_token
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes
from stageline.pipeline.partition import StageLayers, partition_layers, stages_of
from stageline.pipeline.partition_by_cost import (
    ItemBytes,
    ItemCosts,
    StageRoom,
    partition_by_cost,
    stage_times_s,
)

logger = logging.getLogger(__name__)

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_NUM_LAYERS_PER_KIND = 2


@dataclass(frozen=True)
class PartitionChoice:
    """The stages' layers; with a calibration only their number, until it was made.

    Args:
        note: for the log: what a choice by cost was based on; else empty.
    """

    stages: tuple[StageLayers, ...]
    note: str = ""
    calibration: CalibrationPlan | None = None


def choose_partition(config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> PartitionChoice:
    """The flag's, or else the environment's, or else the default. Raises: ConfigError."""
    num_layers, num_stages = checkpoint.spec.num_layers, config.pipeline_parallel_size
    asked, source = config.pp_layer_partition, "--pp-layer-partition"
    if asked is None and (variable := environment.pp_layer_partition()) is not None:
        asked, source = variable.value, variable.name
    objective = AUTO_PARTITIONS.get((asked or "").strip())
    if objective is None or num_stages == 1:
        return PartitionChoice(partition_layers(num_layers, num_stages, asked if objective is None else None, source))
    # Refused here if there are more stages than layers.
    default = partition_layers(num_layers, num_stages, None)
    planned = planned_microbatch(config, max_model_len)
    sizes = planned_bytes(config, checkpoint, planned)
    profile = load_profile(profile_key_of(config, checkpoint))
    if profile is not None:
        origin = f"a profile of `stageline tune` ({profile.planned.num_rows} rows of {profile.planned.context_tokens})"
        return _cut(profile.costs, profile.rooms_for(num_stages), sizes, objective, origin)
    if config.distributed_executor_backend == "in_process":
        kv_bytes = kv_bytes_per_token(checkpoint.spec, 1, _itemsize(config, checkpoint))
        weights = item_bytes(checkpoint, _itemsize(config, checkpoint), config.quantization != "none", 0)
        costs = analytic_costs(checkpoint, planned, weights, kv_bytes)
        rooms = (StageRoom(),) * num_stages
        return _cut(costs, rooms, sizes, objective, "an estimate from the model's shapes")
    kinds = layer_kinds(checkpoint)

    def choose(measured: list[StageItemTimes]) -> tuple[StageLayers, ...]:
        found = costs_from_measured(measured, kinds)
        origin = f"times of {len(measured[0].layers)} layers and the ends, taken just now by the stages"
        choice = _cut(found.items, rooms_of(measured, found.speeds), sizes, objective, origin)
        logger.info("%s", choice.note)
        return choice.stages

    timed = layers_to_time(kinds, _NUM_LAYERS_PER_KIND)
    return PartitionChoice(default, calibration=CalibrationPlan(planned, tuple(timed), choose))


def planned_microbatch(
    config: EngineConfig,
    max_model_len: int,
    num_requests: int = PLANNED_REQUESTS,
    context_tokens: int = PLANNED_CONTEXT_TOKENS,
) -> PlannedMicrobatch:
    """One of the microbatches that so many decoding requests make, as far as the limits allow them."""
    num_rows = -(-min(num_requests, config.max_num_seqs) // config.pipeline_parallel_size)
    return PlannedMicrobatch(min(num_rows, config.max_num_batched_tokens), min(context_tokens, max_model_len - 1))


def planned_bytes(config: EngineConfig, checkpoint: Checkpoint, planned: PlannedMicrobatch) -> ItemBytes:
    """Memory of every item, with the KV cache for what is planned; if ranks share layers, of all of them, where most
    do."""
    itemsize = _itemsize(config, checkpoint)
    spec, num_requests = checkpoint.spec, planned.num_rows * config.pipeline_parallel_size
    window = kept_window(spec, config.max_model_len or spec.max_position_embeddings)
    ranks = max(config.ranks_per_stage)
    kv_bytes = kv_bytes_per_layer(
        rank_spec(spec, ranks), planned.context_tokens + 1, itemsize, window, config.block_size
    )
    kv_of_all = [ranks * num_requests * num_bytes for num_bytes in kv_bytes]
    return item_bytes(checkpoint, itemsize, config.quantization != "none", kv_of_all, ranks)


def profile_key_of(config: EngineConfig, checkpoint: Checkpoint) -> ProfileKey:
    """Where this configuration's profile is kept. "auto" as dtype is the checkpoint's own, whoever spells it out."""
    dtype = checkpoint.spec.dtype if config.dtype == "auto" else config.dtype
    shared = as_shared(checkpoint, config.enable_expert_parallel)
    return profile_key(
        shared, config.device, dtype, config.quantization, config.threads_per_stage, config.ranks_per_stage
    )


def format_counts(stages: Sequence[StageLayers]) -> str:
    """As `--pp-layer-partition` takes it."""
    return ",".join(str(len(stage.layers)) for stage in stages)


def format_stage_times(times_s: Sequence[float]) -> str:
    """Such as "s0 12.3 ms, s1 11.9 ms"."""
    return ", ".join(f"s{stage} {time_s * 1000:.1f} ms" for stage, time_s in enumerate(times_s))


def _cut(
    costs: ItemCosts, rooms: Sequence[StageRoom], sizes: ItemBytes, objective: str, origin: str
) -> PartitionChoice:
    counts = partition_by_cost(costs, rooms, sizes, objective)
    stages = stages_of(counts)
    predicted = format_stage_times(stage_times_s(costs, rooms, counts))
    return PartitionChoice(
        stages, f"--pp-layer-partition auto: {format_counts(stages)}, by {origin}; predicted {predicted}"
    )


def _itemsize(config: EngineConfig, checkpoint: Checkpoint) -> int:
    return _ITEMSIZE[checkpoint.spec.dtype if config.dtype == "auto" else config.dtype]
