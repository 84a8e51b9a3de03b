"""More stages than cores: what it costs them that none has a core of its own.

One idea: the calibrating pipeline is simulated with all else that is known. By how much it really was slower, with one
request, where stages only wake elsewhere, and with many, where they wait for one another, is the cost of crowding.
"""

from __future__ import annotations

import dataclasses
import random

from msgspec.structs import replace

from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import HostProfile, RunCosts, stage_times_of
from stageline.engine.startup import scheduler_limits
from stageline.loadgen.workload import draw_random, uniform
from stageline.pipeline.microbatch import Microbatch
from stageline.pipeline.partition import StageLayers, stages_of
from stageline.planner.host_pipeline import host_pipeline
from stageline.planner.measure_run import PROMPT_TOKENS, SteadyDecodes
from stageline.planner.run_costs import forward_s, tokens_per_s
from stageline.planner.simulate import SimulatedMemory, simulate

_LEAST_SHARE = 0.5
_NUM_ROUNDS = 3
_OUTPUT_TOKENS = 64


def with_crowding(
    profile: HostProfile, config: EngineConfig, lone: SteadyDecodes, loaded: SteadyDecodes
) -> HostProfile:
    """The profile with `work` and `core_share` of its crowded run.

    Args: lone, loaded: of the pipeline of more stages than cores, with one request and with several per stage.
    """
    partition = stages_of(loaded.layer_counts)
    context = PROMPT_TOKENS + len(lone.steps) // 2
    decode = Microbatch(0, 0, [], [], [], [1], [context], [1], [0], sampling_rows=[])
    alone_s = sum(stage_times_of(profile, profile.shape, partition)(decode))
    crowded = replace(profile.crowded_run, work=max(1.0, forward_s(lone) / alone_s))
    measured = tokens_per_s(loaded.spans)
    for _ in range(_NUM_ROUNDS):
        simulated = _simulated_tokens_per_s(_with(profile, crowded), config, partition, loaded.num_requests)
        if simulated > 0 and measured > 0:
            share = crowded.core_share * measured / simulated
            crowded = replace(crowded, core_share=min(1.0, max(_LEAST_SHARE, share)))
    return _with(profile, crowded)


def _with(profile: HostProfile, crowded: RunCosts) -> HostProfile:
    return replace(profile, crowded_run=crowded)


def _simulated_tokens_per_s(
    profile: HostProfile, config: EngineConfig, partition: tuple[StageLayers, ...], num_requests: int
) -> float:
    num_tokens = PROMPT_TOKENS + _OUTPUT_TOKENS
    requests = draw_random(num_requests, uniform(PROMPT_TOKENS, 0), uniform(_OUTPUT_TOKENS, 0), random.Random(0))
    memory = SimulatedMemory(num_requests * -(-num_tokens // config.block_size), config.block_size, False)
    limits = scheduler_limits(dataclasses.replace(config, pipeline_parallel_size=len(partition)), num_tokens)
    run = simulate(requests, host_pipeline(profile, profile.shape, partition), partition, limits, memory)
    is_full = [span for span in run.spans if span.num_rows >= num_requests // (len(partition) + 1)]
    return tokens_per_s(is_full)
