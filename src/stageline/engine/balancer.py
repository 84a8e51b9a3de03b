"""Keeps a running pipeline's cut: looks whether another would be faster, says so, and moves it when it may.

One idea: the cut is moved between two moments at which nothing is in flight. Stages keep the layers they have; the KV
cache is a new one; whatever runs is queued again and computed from its known tokens, as after a preemption.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stageline.clock import Clock
from stageline.cost.layer_costs import costs_from_measured, layer_kinds
from stageline.engine.events import EventKind
from stageline.engine.layout import Layout, LayoutRules, measured_rooms
from stageline.engine.partitioning import format_counts, format_stage_times
from stageline.engine.rebalance import BetterCut, DriftWatch, RebalancePolicy
from stageline.errors import ConfigError
from stageline.executor.executor import Executor
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.item_times import StageItemTimes
from stageline.pipeline.partition import partition_layers, stages_of
from stageline.pipeline.partition_by_cost import partition_by_cost, stage_times_s
from stageline.scheduler.scheduler import Scheduler
from stageline.timeline.stage_counters import StageCounters

logger = logging.getLogger(__name__)

_DECODES_PER_LOOK, _LEAST_TIMED = 16, 8
"""Microbatches of decodes between two looks at the items' times, and how many of them have to have been full ones."""


@dataclass(frozen=True)
class Notice:
    """What an operator should hear of."""

    kind: EventKind
    text: str


class Balancer:
    """Owns the layout of one pipeline.

    Args:
        layout: as the pipeline was started.
        policy: when another cut is worthwhile; None to look for none.
        moves: make it; otherwise it is only told.
    """

    def __init__(
        self,
        executor: Executor,
        rules: LayoutRules,
        layout: Layout,
        policy: RebalancePolicy | None,
        moves: bool,
        clock: Clock,
    ) -> None:
        self.layout = layout
        self._executor = executor
        self._rules = rules
        self._moves = moves
        self._clock = clock
        self._watch = None if policy is None else DriftWatch(policy, clock.now_s())
        self._is_timing = False
        self._enough_decodes = 0
        self._next: Layout | None = None

    @property
    def wants_to_move(self) -> bool:
        """Nothing should be launched, so that the cut can be moved."""
        return self._next is not None

    def leave_alone(self) -> None:
        """Look for no other cut any more: somebody else times the stages' items."""
        self._watch = None

    def ask_to_move(self, layer_counts: Sequence[int]) -> None:
        """Cut the layers so as soon as nothing is in flight. Raises: ConfigError if it is no cut, or does not fit."""
        num_layers, num_stages = self._rules.checkpoint.spec.num_layers, len(self.layout.partition)
        stages = partition_layers(num_layers, num_stages, ",".join(map(str, layer_counts)), "the new cut")
        self._next = self._rules.elsewhere(self.layout, stages)

    # ---- is another cut better? ----

    def is_due(self, now_s: float) -> bool:
        """The stages' counters are wanted, for `look`."""
        return self._watch is not None and self._next is None and self._watch.is_due(now_s)

    def look(self, counters: Sequence[StageCounters], now_s: float) -> list[Notice]:
        """Judge the stages by their counters, and by their items' times if they are uneven."""
        if not self.is_due(now_s) or self._watch is None:
            return []
        if not self._watch.is_uneven(counters, now_s):
            if self._is_timing:
                self._time_items(goes_on=False)
            return []
        if self._is_timing and self._num_decodes(counters) < self._enough_decodes:
            return []
        measured = self._time_items(goes_on=True)
        self._enough_decodes = self._num_decodes(counters) + _DECODES_PER_LOOK
        if min(stage.num_microbatches for stage in measured) < _LEAST_TIMED:
            return []
        better = self._better_cut(measured)
        is_lasting = self._watch.is_lasting(better, now_s)
        if is_lasting or better is None:
            self._time_items(goes_on=False)
            self._watch.accept()
        return [self._tell(better)] if is_lasting and better is not None else []

    @staticmethod
    def _num_decodes(counters: Sequence[StageCounters]) -> int:
        """Microbatches of decodes that every stage has computed."""
        return min(stage.decode.time_s.num_values for stage in counters)

    def _time_items(self, goes_on: bool) -> list[StageItemTimes]:
        self._is_timing = goes_on
        return self._executor.collect_item_times(goes_on)

    def _better_cut(self, measured: list[StageItemTimes]) -> BetterCut | None:
        """The fastest cut for what was measured; None if it is the one there is, or none fits."""
        costs = costs_from_measured(measured, layer_kinds(self._rules.checkpoint))
        rooms = measured_rooms(self.layout.reports, costs.speeds)
        try:
            counts = partition_by_cost(costs.items, rooms, self._rules.needed_bytes(self.layout))
        except ConfigError:
            return None
        if counts == self.layout.layer_counts:
            return None
        now_s = stage_times_s(costs.items, rooms, self.layout.layer_counts)
        return BetterCut(counts, stage_times_s(costs.items, rooms, counts), now_s)

    def _tell(self, better: BetterCut) -> Notice:
        counts = ",".join(map(str, better.layer_counts))
        text = (
            f"the stages are uneven: {format_stage_times(better.times_now_s)}; cut {counts} instead of "
            f"{format_counts(self.layout.partition)} they would take {format_stage_times(better.times_s)}, "
            f"{1 + better.gain_fraction:.2f} times as fast"
        )
        try:
            other = self._rules.elsewhere(self.layout, stages_of(better.layer_counts))
        except ConfigError as error:
            text = f"{text}, but that does not fit: {error}"
        else:
            if self._moves:
                self._next = other
            else:
                text = f"{text}; try --pp-layer-partition {counts}, or --rebalance"
        logger.warning("%s", text)
        return Notice("imbalance", text)

    # ---- the move ----

    def move(self, scheduler: Scheduler) -> Notice:
        """Cut the layers as wanted. Nothing is in flight, and the stages do nothing else meanwhile.

        Raises: WorkerLost, ConfigError if a stage could not do it; the pipeline is closed then.
        """
        assert self._next is not None
        before, start_s, num_running = format_counts(self.layout.partition), self._clock.now_s(), scheduler.num_running
        planned, self._next = self._next, None
        reports = self._executor.repartition(planned.partition)
        self.layout = replace(planned, reports=tuple(reports))
        limits = self._rules.limits(self.layout)
        config = self._rules.config
        window = self.layout.kv_plan.window
        kv = KVCacheManager(limits.num_blocks, limits.block_size, config.enable_prefix_caching, window)
        self._executor.allocate(limits, *scheduler.start_over(kv))
        now_s = self._clock.now_s()
        if self._watch is not None:
            self._watch.moved(now_s)
        self._is_timing = False
        text = (
            f"the layers are cut {format_counts(self.layout.partition)} instead of {before} now; it took "
            f"{now_s - start_s:.2f} s, and {num_running} requests are computed again"
        )
        logger.info("%s\n%s", text, self.layout.table)
        return Notice("rebalance", text)
