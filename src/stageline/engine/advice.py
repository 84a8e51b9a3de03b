"""What a run's timeline says should be changed, in sentences an operator can act on.

One idea: every sentence has a threshold below which it would be noise, the number that crossed it, and the flag that
helps. It looks at spans and plans only, so it reads simulated runs as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from stageline.engine.startup_table import format_bytes
from stageline.kv.kv_plan import KVPlan
from stageline.pipeline.partition_by_cost import ItemCosts, StageRoom, partition_by_cost, stage_times_s
from stageline.timeline.analysis import PipelineReport
from stageline.timeline.journeys import Journey, LatencySplit, mean_split

AdviceKind = Literal["concurrency", "slowest_stage", "links", "prompts", "kv_cache"]

_LOOKS_TO_BE_TOLD, _LOOKS_TO_BE_FORGOTTEN = 2, 4

# Fewer tell of a start, a pause or one slow step rather than of the pipeline.
_ENOUGH_MICROBATCHES = 32
_SLOWER_FRACTION = 0.05
_GAIN_FRACTION = 0.03
_UNDERFILLED_FRACTION = 0.1
_HOPS_FRACTION = 0.3
_UNUSED_KV_FRACTION = 0.2
_PREFILL_SHARE, _PREFILL_STRETCH = 0.25, 3.0


@dataclass(frozen=True)
class RunFacts:
    """What advice is drawn from.

    Args:
        report: of the window in question.
        journeys: of the microbatches in it (`stageline.timeline.journeys`).
        layer_counts: layers per stage.
        num_requests: most that were running at once; None if not known.
        kv_plan: None if not known.
    """

    report: PipelineReport
    journeys: Sequence[Journey]
    layer_counts: Sequence[int]
    num_requests: int | None = None
    kv_plan: KVPlan | None = None


@dataclass(frozen=True)
class Advice:
    """One sentence. `subject` is the stage or link it is about: what stays the same while its numbers vary."""

    kind: AdviceKind
    subject: str
    text: str


def advise(facts: RunFacts) -> list[Advice]:
    """The most useful first; none if there is nothing to say, or too little was seen to say it."""
    split = mean_split(facts.journeys, len(facts.layer_counts))
    if split is None or len(facts.journeys) < _ENOUGH_MICROBATCHES:
        return []
    found = (
        _on_concurrency(facts, split), _on_slowest_stage(facts), _on_links(split), _on_prefill(facts), _on_kv(facts),
    )  # fmt: skip
    return [advice for advice in found if advice is not None]


class NewAdvice:
    """Which advice should be logged: what was found twice in a row, once, and again only after it was gone."""

    def __init__(self) -> None:
        self._num_looks: dict[tuple[AdviceKind, str], int] = {}
        self._told: set[tuple[AdviceKind, str]] = set()

    def among(self, found: Sequence[Advice]) -> list[Advice]:
        """Args: found: at this look. Returns: what is new."""
        present = {(advice.kind, advice.subject): advice for advice in found}
        for key in present.keys() | self._num_looks.keys():
            looks = self._num_looks.get(key, 0) + (1 if key in present else -1)
            self._num_looks[key] = min(looks, _LOOKS_TO_BE_FORGOTTEN)
            if looks <= 0:
                del self._num_looks[key]
                self._told.discard(key)
        new = [key for key in present if self._num_looks[key] >= _LOOKS_TO_BE_TOLD and key not in self._told]
        self._told.update(new)
        return [present[key] for key in new]


def _on_slowest_stage(facts: RunFacts) -> Advice | None:
    """Which stage sets the pace, by how much, why, and a partition that evens it out."""
    if len(facts.layer_counts) < 2:
        return None
    decodes = [journey for journey in facts.journeys if not journey.has_prompt_tokens]
    decodes = decodes if len(decodes) >= _ENOUGH_MICROBATCHES else list(facts.journeys)
    times_s = _stage_times_s(decodes)
    slowest = max(range(len(times_s)), key=times_s.__getitem__)
    others_s = fmean(time_s for stage, time_s in enumerate(times_s) if stage != slowest)
    if others_s <= 0 or times_s[slowest] < others_s * (1 + _SLOWER_FRACTION):
        return None
    sampling_s = _sampling_s(decodes)
    is_last = slowest == len(times_s) - 1
    head = f": LM head {sampling_s / times_s[slowest]:.0%} of its time" if is_last and sampling_s > 0 else ""
    line = f"slowest stage: s{slowest} (+{times_s[slowest] / others_s - 1:.0%}){head}"
    better = _better_counts(times_s, sampling_s, facts.layer_counts)
    if better and all(_is_better(half, facts.layer_counts, better) for half in _halves(decodes)):
        line += f"; try --pp-layer-partition {','.join(map(str, better))} or auto"
    return Advice("slowest_stage", f"s{slowest}", line)


def _stage_times_s(of: Sequence[Journey]) -> list[float]:
    """[stages] of a usual microbatch: one that was held up says nothing."""
    by_stage = zip(*(journey.computed for journey in of), strict=True)
    return [median(end_s - start_s for start_s, end_s in intervals) for intervals in by_stage]


def _sampling_s(of: Sequence[Journey]) -> float:
    last = [journey.segments[-1] for journey in of]
    return median(segment.end_s - segment.start_s if segment.cause == "sampling" else 0.0 for segment in last)


def _halves(of: Sequence[Journey]) -> tuple[Sequence[Journey], Sequence[Journey]]:
    """What is so of the pipeline, and no accident, is so of each."""
    return of[: len(of) // 2], of[len(of) // 2 :]


def _better_counts(times_s: Sequence[float], sampling_s: float, counts: Sequence[int]) -> tuple[int, ...] | None:
    """A partition that should make the slowest stage faster, if layers cost alike; None if there is none."""
    found = _layer_costs(times_s, sampling_s, counts)
    if found is None:
        return None
    costs, rooms = found
    better = partition_by_cost(costs, rooms)
    gain = max(stage_times_s(costs, rooms, counts)) / max(stage_times_s(costs, rooms, better)) - 1
    return better if gain >= _GAIN_FRACTION else None


def _is_better(of: Sequence[Journey], counts: Sequence[int], other: Sequence[int]) -> bool:
    """Whether these microbatches alone would gain by the other partition, too."""
    found = _layer_costs(_stage_times_s(of), _sampling_s(of), counts)
    if found is None:
        return False
    return max(stage_times_s(*found, counts)) > max(stage_times_s(*found, other))


def _layer_costs(
    times_s: Sequence[float], sampling_s: float, counts: Sequence[int]
) -> tuple[ItemCosts, list[StageRoom]] | None:
    """What a layer costs on each stage; None if a stage took no time."""
    layers_s = [*times_s[:-1], times_s[-1] - sampling_s]
    per_layer_s = [time_s / count for time_s, count in zip(layers_s, counts, strict=True)]
    if min(per_layer_s) <= 0:
        return None
    layer_s = sum(layers_s) / sum(counts)
    is_alike = max(per_layer_s) <= min(per_layer_s) * (1 + 2 * _SLOWER_FRACTION)
    rooms = [StageRoom(1.0 if is_alike else layer_s / own_s) for own_s in per_layer_s]
    return ItemCosts(0.0, (layer_s,) * sum(counts), sampling_s * rooms[-1].speed), rooms


def _on_concurrency(facts: RunFacts, split: LatencySplit) -> Advice | None:
    """Too few requests to keep every stage busy, and how many would."""
    if not facts.num_requests or facts.report.window_s <= 0:
        return None
    underfilled = fmean(stage.underfilled_s / stage.window_s for stage in facts.report.stages)
    if underfilled < _UNDERFILLED_FRACTION:
        return None
    slowest_s = max(
        stage_s + split.sampling_s * (stage == len(split.stages_s) - 1) for stage, stage_s in enumerate(split.stages_s)
    )
    ring_s = split.total_s - sum(split.queues_s)
    needed = math.ceil(ring_s / slowest_s) if slowest_s > 0 else 0
    if facts.num_requests >= needed:
        return None
    return Advice(
        "concurrency", "",
        f"too few requests to fill the pipeline: {facts.num_requests} at once leave the stages idle {underfilled:.0%} "
        f"of the time; {needed} or more would fill it",
    )  # fmt: skip


def _on_links(split: LatencySplit) -> Advice | None:
    """The time between stages outweighs what they compute."""
    hops_s = split.hops_s[1:]
    ring_s = split.total_s - sum(split.queues_s)
    if ring_s <= 0 or not hops_s or sum(hops_s) < ring_s * _HOPS_FRACTION:
        return None
    slowest = max(range(len(hops_s)), key=hops_s.__getitem__)
    link = f"s{slowest} -> s{slowest + 1}"
    return Advice(
        "links", link,
        f"links take {sum(hops_s) / ring_s:.0%} of a microbatch's way, most of it {link} with "
        f"{hops_s[slowest] * 1000:.1f} ms; more requests at once and a larger --max-microbatches-in-flight hide it",
    )  # fmt: skip


def _on_prefill(facts: RunFacts) -> Advice | None:
    """Chunks of prompts stretch the steps of everyone who is decoding."""

    def slowest_s(journey: Journey) -> float:
        return max(end_s - start_s for start_s, end_s in journey.computed)

    mixed = [slowest_s(j) for j in facts.journeys if j.has_prompt_tokens and j.num_rows > 1]
    plain = [slowest_s(j) for j in facts.journeys if not j.has_prompt_tokens]
    if not mixed or not plain:
        return None
    stretch, share = median(mixed) / median(plain), len(mixed) / len(facts.journeys)
    if stretch < _PREFILL_STRETCH or share < _PREFILL_SHARE:
        return None
    return Advice(
        "prompts", "",
        f"prompts starve decodes: {share:.0%} of the microbatches carry prompt chunks and take {stretch:.1f} times as "
        f"long ({median(mixed) * 1000:.0f} instead of {median(plain) * 1000:.0f} ms); lower "
        "--max-decode-slowdown or --max-num-batched-tokens",
    )  # fmt: skip


def _on_kv(facts: RunFacts) -> Advice | None:
    """One stage's KV cache decides for all, and others could hold much more."""
    plan = facts.kv_plan
    if plan is None or plan.limiting_stage is None or len(plan.stages) < 2:
        return None
    unused = sum(stage.unused_bytes for stage in plan.stages)
    available = sum(stage.available_bytes for stage in plan.stages)
    if available <= 0 or unused < available * _UNUSED_KV_FRACTION:
        return None
    return Advice(
        "kv_cache", f"s{plan.limiting_stage}",
        f"KV cache of s{plan.limiting_stage} limits the rest: the other stages leave {format_bytes(unused)} "
        f"({unused / available:.0%}) unused; give it fewer layers or more memory (--kv-cache-memory takes a list)",
    )  # fmt: skip
