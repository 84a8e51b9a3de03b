"""Which stage holds what: the cut, what the stages reported, and the KV cache that all of them have room for.

One idea: a layout follows from reports by arithmetic alone. So another cut can be laid out before any stage hears of
it, and what would not fit is refused while the pipeline still runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.stage_tensors import stage_weight_bytes
from stageline.checkpoint.tensor_shards import rank_spec
from stageline.config.engine_config import EngineConfig
from stageline.cost.layer_costs import item_bytes
from stageline.engine.startup_table import format_startup_table
from stageline.errors import ConfigError
from stageline.executor.messages import StageLoaded
from stageline.kv.kv_plan import KVCacheMemory, KVPlan, WindowNeed, parse_kv_cache_memory, plan_kv_cache
from stageline.kv.kv_size import kept_window, kv_bytes_by_kind, kv_bytes_per_layer, window_share
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.pipeline.partition import StageLayers
from stageline.pipeline.partition_by_cost import ItemBytes, StageRoom

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Layout:
    """A cut, and what it takes."""

    partition: tuple[StageLayers, ...]
    reports: tuple[StageLoaded, ...]
    kv_plan: KVPlan

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return tuple(len(part.layers) for part in self.partition)

    @property
    def table(self) -> str:
        """For an operator."""
        return format_startup_table(self.partition, self.reports, self.kv_plan)


class LayoutRules:
    """What every layout of one model under one configuration has to keep."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, max_model_len: int) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self._max_model_len = max_model_len

    def laid_out(self, partition: Sequence[StageLayers], reports: Sequence[StageLoaded]) -> Layout:
        """Raises: ConfigError if the KV cache that was asked for does not fit."""
        config = self.config
        asked = parse_kv_cache_memory(config.kv_cache_memory, len(partition))
        window = kept_window(self.checkpoint.spec, self._max_model_len)
        kinds = [
            self._kv_bytes_of_ranks(size, part.layers, ITEMSIZE[report.dtype], window)
            for size, part, report in zip(config.ranks_per_stage, partition, reports, strict=True)
        ]
        need = None if window is None else self._window_need(window, [windowed for _, windowed in kinds])
        share = 1.0 if need is None else need.share
        plan = plan_kv_cache(
            asked,
            free_bytes_per_stage(asked, reports, [math.ceil(full + share * windowed) for full, windowed in kinds]),
            [full for full, _ in kinds],
            config.block_size,
            max_useful_blocks=config.max_num_seqs * -(-self._max_model_len // config.block_size),
            window=need,
        )
        return Layout(tuple(partition), tuple(reports), plan)

    def _kv_bytes_of_ranks(self, size: int, layers: range, itemsize: int, window: int | None) -> tuple[int, int]:
        """What a token takes on all ranks of a stage, which may keep copies; see `kv_bytes_by_kind`."""
        full, windowed = kv_bytes_by_kind(rank_spec(self.checkpoint.spec, size), layers, itemsize, window)
        return size * full, size * windowed

    def _window_need(self, window: int, bytes_per_token: list[int]) -> WindowNeed:
        """A request that is computed has its window, the chunk before and the one that is next."""
        config = self.config
        tokens = window + 2 * config.max_num_batched_tokens
        return WindowNeed(
            window,
            bytes_per_token,
            window_share(window, config.block_size, self._max_model_len, config.expected_request_tokens),
            least_blocks=-(-tokens // config.block_size) + 2,
        )

    def elsewhere(self, layout: Layout, partition: Sequence[StageLayers]) -> Layout:
        """What another cut of the same pipeline would be.

        Raises: ConfigError if it does not fit, or requests would be refused that are accepted now.
        """
        weights = [self._weight_bytes(part, old) for part, old in zip(partition, layout.reports, strict=True)]
        grown: dict[str, int] = {}
        for old, num_bytes in zip(layout.reports, weights, strict=True):
            grown[old.memory_pool] = grown.get(old.memory_pool, 0) + num_bytes - old.weight_bytes
        reports = [
            msgspec.structs.replace(
                old, weight_bytes=num_bytes, free_bytes=max(0, old.free_bytes - grown[old.memory_pool])
            )
            for old, num_bytes in zip(layout.reports, weights, strict=True)
        ]
        other = self.laid_out(partition, reports)
        needed = self._needed_tokens(layout)
        if other.kv_plan.num_tokens < needed:
            raise ConfigError(
                f"its KV cache would hold {other.kv_plan.num_tokens:,} tokens, fewer than the {needed:,} that a "
                "request may need; give more --kv-cache-memory"
            )
        return other

    def _needed_tokens(self, layout: Layout) -> int:
        """The longest request that is accepted now."""
        return min(layout.kv_plan.num_tokens, self._max_model_len)

    def needed_bytes(self, layout: Layout) -> ItemBytes:
        """Memory of every item, with the least KV cache that will do; of all ranks of a stage, where most share it."""
        itemsize = ITEMSIZE[layout.reports[0].dtype]
        spec, chunks = self.checkpoint.spec, 2 * self.config.max_num_batched_tokens
        window = kept_window(spec, self._max_model_len)
        ranks = max(self.config.ranks_per_stage)
        kv_bytes = kv_bytes_per_layer(
            rank_spec(spec, ranks), self._needed_tokens(layout), itemsize, window, chunks
        )
        kv_of_all = [ranks * num_bytes for num_bytes in kv_bytes]
        return item_bytes(self.checkpoint, itemsize, self.config.quantization != "none", kv_of_all, ranks)

    def limits(self, layout: Layout) -> MicrobatchLimits:
        config = self.config
        return MicrobatchLimits(
            num_blocks=layout.kv_plan.num_blocks,
            block_size=config.block_size,
            vocab_size=self.checkpoint.spec.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._max_model_len,
            num_window_blocks=0 if layout.kv_plan.window is None else layout.kv_plan.window.num_blocks,
        )

    def _weight_bytes(self, part: StageLayers, report: StageLoaded) -> int:
        """Of all ranks of the stage, as they would report it."""
        keeps_quantized, ranks = self.config.quantization != "none", report.num_ranks
        holds, itemsize = (part.layers, part.is_first, part.is_last), ITEMSIZE[report.dtype]
        return ranks * stage_weight_bytes(self.checkpoint, *holds, itemsize, keeps_quantized, ranks)


def measured_rooms(reports: Sequence[StageLoaded], speeds: Sequence[float]) -> tuple[StageRoom, ...]:
    """Each stage's speed, and the memory that was free before it loaded if it shares it with no other stage."""
    pools = [report.memory_pool for report in reports]
    return tuple(
        StageRoom(speed, report.free_bytes + report.weight_bytes if pools.count(report.memory_pool) == 1 else None)
        for report, speed in zip(reports, speeds, strict=True)
    )


def free_bytes_per_stage(
    asked: Sequence[KVCacheMemory], reports: Sequence[StageLoaded], bytes_per_token: Sequence[int]
) -> list[int]:
    """What each stage may count as its own of the memory that is free.

    Stages that share a pool share it as their layers need it, so that all of them hold equally many tokens; one that
    asks for a number of bytes is given that first. The one that loaded last saw how much is left.

    Args:
        bytes_per_token: per stage, for all its layers.
    """
    free_bytes = [0] * len(reports)
    for pool in {report.memory_pool for report in reports}:
        stages = [index for index, report in enumerate(reports) if report.memory_pool == pool]
        free = min(reports[index].free_bytes for index in stages)
        fixed = sum(asked[index].num_bytes or 0 for index in stages)
        weight = sum(bytes_per_token[index] for index in stages if asked[index].num_bytes is None)
        for index in stages:
            own = asked[index].num_bytes
            if own is not None:
                free_bytes[index] = max(0, free - (fixed - own))
            else:
                free_bytes[index] = max(0, free - fixed) * bytes_per_token[index] // weight
    return free_bytes
