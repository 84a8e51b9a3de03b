"""What it costs stages that their cores are idle in between, and that more stages than cores have none of their own.

One idea: the calibrating pipeline is simulated with all else that is known. By how much it really was slower, with one
request, where stages only wake elsewhere, and with many, where they wait for one another, is the cost of crowding. All
of it is compared with one stage that ran in turns with them, as measured and as simulated, so that what makes the whole
machine slower or faster meanwhile is not taken for it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import Factors, HostProfile, RunCosts, stage_times_of
from stageline.engine.startup import scheduler_limits
from stageline.loadgen.workload import draw_random, uniform
from stageline.pipeline.microbatch import Microbatch
from stageline.pipeline.partition import stages_of
from stageline.planner.host_pipeline import host_pipeline
from stageline.planner.measure_run import PROMPT_TOKENS, SteadyDecodes
from stageline.planner.run_costs import forward_s, tokens_per_s
from stageline.planner.simulate import SimulatedMemory, simulate

_LEAST_SHARE = 0.5
_NUM_HALVINGS = 6
_OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class Turns:
    """Two pipelines that ran in turns, within seconds of each other, as often as there are entries.

    Args:
        rows: requests of a stage.
        single: one stage.
        several: several stages, with one request if `rows` is 1, else with so many for each.
    """

    rows: int
    single: Sequence[SteadyDecodes]
    several: Sequence[SteadyDecodes]


def lone_work(profile: HostProfile, turns: Turns) -> float:
    """How many times as long computing one request takes where several stages take turns, and their cores are idle."""
    pairs = zip(turns.single, turns.several, strict=True)
    return max(1.0, median(_over_alone(profile, several) / _over_alone(profile, single) for single, several in pairs))


def with_crowding(profile: HostProfile, config: EngineConfig, turns: Sequence[Turns]) -> HostProfile:
    """The profile with `work` and `core_share` of its crowded run.

    Args: turns: with ever more rows; the first with one request.
    """
    lone, *loads = turns
    # With several requests it is the share of the cores that says what is lost.
    work = Factors((lone.rows, loads[0].rows), (lone_work(profile, lone), 1.0))
    crowded_run = replace(profile.crowded_run, work=work)
    shares = tuple(_core_share(_with(profile, crowded_run), config, load) for load in loads)
    return _with(profile, replace(crowded_run, core_share=Factors(tuple(load.rows for load in loads), shares)))


def _core_share(profile: HostProfile, config: EngineConfig, turns: Turns) -> float:
    """With which the simulated pipeline gains as much over the simulated stage as the one that ran did."""
    pairs = [
        (tokens_per_s(single.spans), tokens_per_s(crowded.spans))
        for single, crowded in zip(turns.single, turns.several, strict=True)
    ]
    gains = [crowded / single for single, crowded in pairs if single > 0]
    if not gains:
        return 1.0
    wanted = median(gains) * _simulated_tokens_per_s(profile, config, turns.single[0])
    least, most = _LEAST_SHARE, 1.0
    for _ in range(_NUM_HALVINGS):
        share = (least + most) / 2
        crowded_run = replace(profile.crowded_run, core_share=Factors((turns.rows,), (share,)))
        is_enough = _simulated_tokens_per_s(_with(profile, crowded_run), config, turns.several[0]) >= wanted
        least, most = (least, share) if is_enough else (share, most)
    return most


def _with(profile: HostProfile, crowded: RunCosts) -> HostProfile:
    return replace(profile, crowded_run=crowded)


def _over_alone(profile: HostProfile, lone: SteadyDecodes) -> float:
    """How many times as long computing one request took as its layers take alone."""
    context = PROMPT_TOKENS + len(lone.steps) // 2
    decode = Microbatch(0, 0, [], [], [], [1], [context], [1], [0], sampling_rows=[])
    return forward_s(lone) / sum(stage_times_of(profile, profile.shape, stages_of(lone.layer_counts))(decode))


def _simulated_tokens_per_s(profile: HostProfile, config: EngineConfig, decodes: SteadyDecodes) -> float:
    """Of the same pipeline with as many requests, once its groups have settled."""
    partition, num_requests = stages_of(decodes.layer_counts), decodes.num_requests
    num_tokens = PROMPT_TOKENS + _OUTPUT_TOKENS
    requests = draw_random(num_requests, uniform(PROMPT_TOKENS, 0), uniform(_OUTPUT_TOKENS, 0), random.Random(0))
    memory = SimulatedMemory(num_requests * -(-num_tokens // config.block_size), config.block_size, False)
    limits = scheduler_limits(dataclasses.replace(config, pipeline_parallel_size=len(partition)), num_tokens)
    run = simulate(requests, host_pipeline(profile, profile.shape, partition), partition, limits, memory)
    prompts_end_s = max(span.end_s for span in run.spans if span.num_tokens > span.num_rows)
    first_end_s = min(one.finished_s or run.duration_s for one in run.requests)
    settled_s = (prompts_end_s + first_end_s) / 2
    return tokens_per_s(span for span in run.spans if settled_s <= span.start_s and span.end_s <= first_end_s)
