"""Measures a pipeline to cut it better: what each item takes, and what a partition is worth.

One idea: everything is measured on real stages under a real load of decodes; two partitions take turns in one run, so
that whatever else the machine does meanwhile happens to both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.config.engine_config import EngineConfig
from stageline.cost.layer_costs import MeasuredCosts, costs_from_measured, layer_kinds
from stageline.cost.profile import Profile
from stageline.engine.advice import RunFacts, advise
from stageline.engine.layout import measured_rooms
from stageline.engine.llm import LLM
from stageline.engine.partitioning import planned_bytes, profile_key_of
from stageline.errors import ConfigError
from stageline.kv.kv_plan import KVPlan
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes
from stageline.pipeline.partition_by_cost import StageRoom, partition_by_cost
from stageline.sampling import SamplingParams
from stageline.timeline.analysis import PipelineReport, analyse
from stageline.timeline.journeys import Journey, journeys

_FULL_ROWS_FRACTION = 0.8
_ROOM_FOR_A_SECOND = 0.6
"""Share of the memory free beside a loaded pipeline that a second one's weights may take."""


@dataclass(frozen=True)
class DecodeLoad:
    """So many requests that decode at once.

    Args:
        context_tokens: of each request, halfway through its answer.
        output_tokens: of each request.
    """

    num_requests: int
    context_tokens: int
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.context_tokens - self.output_tokens // 2)

    def check(self, config: EngineConfig, max_model_len: int) -> None:
        """Raises: ConfigError if the load cannot run at once."""
        if self.num_requests > config.max_num_seqs:
            raise ConfigError(
                f"--concurrency is {self.num_requests}, but --max-num-seqs is {config.max_num_seqs}; raise it or lower "
                "--concurrency"
            )
        if (needed := self.prompt_tokens + self.output_tokens) > max_model_len:
            raise ConfigError(
                f"--context {self.context_tokens} makes requests of {needed} tokens, above the model limit of "
                f"{max_model_len}; lower it"
            )


@dataclass(frozen=True)
class LoadRun:
    """What one run of a load showed, from the last prompt's end to the first request's.

    Args:
        stage_times_s: [stages] the median time of a full microbatch.
    """

    output_tokens_per_s: float
    stage_times_s: tuple[float, ...]
    report: PipelineReport
    journeys: tuple[Journey, ...]


@dataclass
class Trial:
    """A partition under measurement."""

    counts: tuple[int, ...]
    runs: list[LoadRun] = field(default_factory=list)

    @property
    def output_tokens_per_s(self) -> float:
        return median(run.output_tokens_per_s for run in self.runs)

    @property
    def stage_times_s(self) -> tuple[float, ...]:
        return tuple(median(times) for times in zip(*(run.stage_times_s for run in self.runs), strict=True))

    @property
    def bubble_fraction(self) -> float:
        return median(run.report.bubble_fraction for run in self.runs)


def run_load(llm: LLM, load: DecodeLoad, seed: int = 0) -> LoadRun:
    """Run the load once. The same prompts every time: their KV cache is found again, and only decoding is left.

    Raises: ConfigError if the KV cache does not hold the load.
    """
    needed = load.num_requests * (load.prompt_tokens + load.output_tokens)
    if needed > llm.kv_plan.num_tokens:
        raise ConfigError(
            f"{load.num_requests} requests of {load.prompt_tokens + load.output_tokens} tokens need a KV cache of "
            f"{needed:,} tokens, but it holds {llm.kv_plan.num_tokens:,}; raise --kv-cache-memory, or lower "
            "--concurrency or --context"
        )
    words = random.Random(seed)
    prompts = [words.choices(range(llm.spec.vocab_size), k=load.prompt_tokens) for _ in range(load.num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=load.output_tokens, ignore_eos=True)
    start_s = llm.clock.now_s()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    timings = [output.outputs[0].timings for output in outputs]
    first_s = max(timing.first_token_s or 0.0 for timing in timings)
    last_s = max(first_s, min(timing.finished_s or 0.0 for timing in timings))
    num_tokens = sum(sum(first_s < time_s <= last_s for time_s in timing.token_times_s) for timing in timings)
    num_stages = llm.config.pipeline_parallel_size
    spans = llm.spans(start_s)
    inside = [journey for journey in journeys(spans, num_stages) if first_s <= journey.start_s <= last_s]
    rate = num_tokens / (last_s - first_s) if last_s > first_s else 0.0
    report = analyse(spans, num_stages, first_s, last_s)
    return LoadRun(rate, _typical_stage_times_s(inside, num_stages), report, tuple(inside))


def _typical_stage_times_s(inside: Sequence[Journey], num_stages: int) -> tuple[float, ...]:
    decodes = [journey for journey in inside if not journey.has_prompt_tokens]
    most_rows = max((journey.num_rows for journey in decodes), default=0)
    full = [journey for journey in decodes if journey.num_rows >= _FULL_ROWS_FRACTION * most_rows]
    if not full:
        raise ConfigError("the load was over before a full microbatch of decodes ran; raise --output-len")
    return tuple(median(j.computed[stage][1] - j.computed[stage][0] for j in full) for stage in range(num_stages))


@dataclass(frozen=True)
class Proposal:
    """A partition, and what it was made from.

    Args:
        measured: each stage's item times, as they came.
    """

    counts: tuple[int, ...]
    measured: tuple[StageItemTimes, ...]
    costs: MeasuredCosts
    rooms: tuple[StageRoom, ...]
    planned: PlannedMicrobatch


def propose(llm: LLM, checkpoint: Checkpoint, measured: Sequence[StageItemTimes], context_tokens: int) -> Proposal:
    """The best partition for what was measured. Raises: ConfigError if none fits the stages' memory."""
    planned = PlannedMicrobatch(measured[0].num_rows, context_tokens)
    costs = costs_from_measured(measured, layer_kinds(checkpoint))
    rooms = measured_rooms(llm.stage_reports, costs.speeds)
    counts = partition_by_cost(costs.items, rooms, planned_bytes(llm.config, checkpoint, planned))
    return Proposal(counts, tuple(measured), costs, rooms, planned)


def as_profile(proposal: Proposal, config: EngineConfig, checkpoint: Checkpoint) -> Profile:
    """What `--pp-layer-partition auto` reads from then on."""
    key = profile_key_of(config, checkpoint)
    return Profile(key, checkpoint.path, proposal.planned, proposal.costs.items, proposal.rooms)


def advice_on(trial: Trial, load: DecodeLoad, kv_plan: KVPlan | None = None) -> list[str]:
    """What the partition's last run says should be changed."""
    run = trial.runs[-1]
    facts = RunFacts(run.report, run.journeys, trial.counts, load.num_requests, kv_plan)
    return [advice.text for advice in advise(facts)]


def has_room_for_another(llm: LLM) -> bool:
    """Whether a second pipeline of the same model fits beside this one."""
    pools = {report.memory_pool for report in llm.stage_reports}
    return all(
        sum(r.weight_bytes for r in llm.stage_reports if r.memory_pool == pool)
        <= _ROOM_FOR_A_SECOND * min(r.free_bytes for r in llm.stage_reports if r.memory_pool == pool)
        for pool in pools
    )
