"""What crowding costs is found again from pipelines that ran, whatever the machine did meanwhile."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import Factors, HostProfile
from stageline.engine.startup import scheduler_limits
from stageline.loadgen.workload import draw_random, uniform
from stageline.pipeline.partition import stages_of
from stageline.planner.crowding import Turns, lone_work, with_crowding
from stageline.planner.host_pipeline import host_pipeline
from stageline.planner.measure_run import PROMPT_TOKENS, SteadyDecodes
from stageline.planner.simulate import SimulatedMemory, simulate
from tests.unit.test_host_profile import SHAPE, profile

CONFIG = EngineConfig(model="model")
WORK, SHARES = Factors((1, 4), (1.25, 1.0)), Factors((4, 12), (0.7, 0.9))
STAGES = 3  # on two places


def with_costs(work: Factors, shares: Factors) -> HostProfile:
    known = profile()
    return msgspec.structs.replace(
        known, crowded_run=msgspec.structs.replace(known.crowded_run, work=work, core_share=shares)
    )


def ran(truth: HostProfile, num_stages: int, num_requests: int, slower: float) -> SteadyDecodes:
    """Steady decodes of such a machine, while everything on it took so many times as long."""
    layer_counts = (len(SHAPE.layer_weights) // num_stages,) * num_stages
    partition = stages_of(layer_counts)
    requests = draw_random(num_requests, uniform(PROMPT_TOKENS, 0), uniform(96, 0), random.Random(0))
    limits = scheduler_limits(dataclasses.replace(CONFIG, pipeline_parallel_size=num_stages), 256)
    memory = SimulatedMemory(1000, CONFIG.block_size, False)
    run = simulate(requests, host_pipeline(truth, SHAPE, partition), partition, limits, memory)
    steady_s = 0.3 * run.duration_s, 0.8 * run.duration_s
    steady = [
        msgspec.structs.replace(span, start_s=span.start_s * slower, end_s=span.end_s * slower)
        for span in run.spans
        if steady_s[0] < span.start_s and span.end_s < steady_s[1]
    ]
    return SteadyDecodes(layer_counts, num_requests, steady, [])


def found(truth: HostProfile, slower: list[float]) -> tuple[Factors, Factors]:
    """By a calibration that knows all but the cost of crowding."""
    turns = [
        Turns(
            rows,
            [ran(truth, 1, rows, one) for one in slower],
            [ran(truth, STAGES, rows if rows == 1 else rows * STAGES, one) for one in slower],
        )
        for rows in (1, 4, 12)
    ]
    run = with_crowding(with_costs(Factors((1,), (1.0,)), Factors((1,), (1.0,))), CONFIG, turns).crowded_run
    return run.work, run.core_share


@pytest.mark.parametrize("slower", [[1.0], [1.0, 1.4, 1.4], [0.7, 1.0, 1.3]], ids=str)
def test_work_and_what_is_had_of_the_cores_are_found_at_any_pace_of_the_machine(slower: list[float]) -> None:
    work, shares = found(with_costs(WORK, SHARES), slower)
    assert work.tokens == WORK.tokens and work.factors == pytest.approx(WORK.factors, rel=0.01)
    assert shares.tokens == SHARES.tokens and shares.factors == pytest.approx(SHARES.factors, rel=0.03)


def test_what_crowding_does_not_cost_is_no_gain() -> None:
    work, shares = found(with_costs(Factors((1,), (0.9,)), Factors((4, 12), (1.2, 1.2))), [1.0])
    assert work.factors == shares.factors == (1.0, 1.0)


def test_a_share_lies_between_its_points_and_is_the_same_beyond_them() -> None:
    assert [SHARES.at(tokens) for tokens in (1, 4, 8, 12, 512)] == pytest.approx([0.7, 0.7, 0.8, 0.9, 0.9])


def test_cores_that_are_idle_between_the_stages_of_one_request_are_found_too() -> None:
    known = profile()
    slow = msgspec.structs.replace(known, run=msgspec.structs.replace(known.run, work=WORK))
    turns = Turns(1, [ran(slow, 1, 1, one) for one in (1.0, 1.3)], [ran(slow, 2, 1, one) for one in (1.0, 1.3)])
    assert lone_work(known, turns) == pytest.approx(1.25, rel=0.01)
    assert lone_work(slow, turns) == pytest.approx(1.0, rel=0.01), "it is known already"
