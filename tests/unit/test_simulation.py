"""A simulated run is a run: every request gets its tokens, in time, and the same analysis reads it."""

from __future__ import annotations

import random

import pytest

from stageline.cost.stage_time import MicrobatchShape, StageTimeCosts
from stageline.errors import ConfigError
from stageline.executor.simulated_stages import HostCores, SimulatedLink, SimulatedPipeline
from stageline.loadgen.workload import (
    PlannedRequest,
    Segment,
    arrival_times,
    arriving,
    draw_like_sharegpt,
    draw_random,
    draw_sharing,
    uniform,
)
from stageline.pipeline.microbatch import Microbatch
from stageline.pipeline.partition import stages_of
from stageline.planner.simulate import SimulatedMemory, SimulatedRun, check_servable, simulate
from stageline.planner.simulation_report import format_simulation
from stageline.scheduler.limits import SchedulerLimits

COSTS = StageTimeCosts(2e-3, 3e-4, 1e-8, 8e-5, 3e-7)
MEMORY = SimulatedMemory(20_000, 16)


def limits(num_stages: int, **changed: object) -> SchedulerLimits:
    asked = {
        "num_stages": num_stages,
        "window": num_stages + 1,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
        "max_decode_slowdown": 1.8,
        "look_ahead": True,
    }
    return SchedulerLimits(**{**asked, **changed})  # type: ignore[arg-type]


def pipeline(num_stages: int, host: HostCores | None = None) -> SimulatedPipeline:
    def stage_times(microbatch: Microbatch) -> list[float]:
        shape = MicrobatchShape.of_rows(microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
        return [COSTS.predict_s(shape) / num_stages] * num_stages

    return SimulatedPipeline(
        num_stages, stage_times, (SimulatedLink(1e-4, 1e9),) * (num_stages - 1), 2048.0, 5e-5, 5e-5, 5e-5,
        launch_s=1e-4, result_s=1e-5, news_s=1e-5, host=host,
    )  # fmt: skip


def run(
    requests: list[PlannedRequest], num_stages: int, most: int | None = None, host: HostCores | None = None
) -> SimulatedRun:
    partition = stages_of((1,) * num_stages)
    return simulate(requests, pipeline(num_stages, host), partition, limits(num_stages), MEMORY, most)


@pytest.mark.parametrize("host", [None, HostCores(2, lambda num_tokens: (1.0, 1.2))])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_every_request_gets_all_its_tokens_and_each_of_them_takes_time(num_stages, host):
    requests = draw_like_sharegpt(40, random.Random(num_stages))
    found = run(requests, num_stages, host=host)
    assert [len(one.token_times_s) for one in found.requests] == [one.num_output_tokens for one in requests]
    for one in found.requests:
        assert one.first_token_s is not None and one.finished_s is not None
        assert one.arrival_s < one.first_token_s <= one.finished_s <= found.duration_s
        assert all(gap_s > 0 for gap_s in one.timings.inter_token_s)
    report = found.report()
    assert report.num_microbatches == found.num_microbatches
    for stage, busy_s in zip(report.stages, found.busy_s, strict=True):
        assert stage.busy_s == pytest.approx(busy_s)
    assert f"{len(requests)} requests" in format_simulation(found)


def test_the_same_workload_gives_the_same_run():
    requests = draw_like_sharegpt(20, random.Random(5))
    assert run(requests, 2).spans == run(requests, 2).spans


def test_nothing_is_computed_before_it_arrives():
    requests = arriving(
        draw_random(30, uniform(64, 0), uniform(8, 0), random.Random(0)), arrival_times(20.0, 1.0, random.Random(1))
    )
    found = run(requests, 2)
    for planned, one in zip(requests, found.requests, strict=True):
        assert one.arrival_s == planned.at_s
        assert one.first_scheduled_s is not None and one.first_scheduled_s >= one.arrival_s
    assert found.duration_s > requests[-1].at_s


def test_a_closed_loop_has_no_more_under_way_than_it_says():
    found = run(draw_random(30, uniform(64, 0.5), uniform(16, 0.5), random.Random(0)), 2, most=4)
    changes = sorted(
        [(one.arrival_s, 1) for one in found.requests] + [(one.finished_s or 0.0, -1) for one in found.requests]
    )
    under_way, most = 0, 0
    for _, change in changes:
        under_way += change
        most = max(most, under_way)
    assert most == 4


def test_prompts_share_what_the_workload_says_they_share():
    requests = draw_sharing(12, 2, 128, uniform(40, 0), uniform(4, 0), random.Random(3))
    found = run(requests, 1, most=1)
    seen: set[int] = set()
    for planned, one in zip(requests, found.requests, strict=True):
        group = planned.segments[0].content
        assert one.num_cached_tokens == (128 if group in seen else 0)
        seen.add(group)


def test_more_stages_of_a_share_of_the_time_each_are_faster_when_there_are_requests_to_fill_them():
    requests = draw_random(64, uniform(32, 0), uniform(32, 0), random.Random(0))
    one, four = run(requests, 1), run(requests, 4)
    assert 2.0 < four.output_tokens_per_s / one.output_tokens_per_s < 4.0


def test_sixty_four_stages_are_a_pipeline_like_any_other():
    found = run(draw_random(100, uniform(32, 0), uniform(4, 0), random.Random(0)), 64)
    assert all(len(one.token_times_s) == 4 for one in found.requests)
    assert len(found.busy_s) == 64
    assert max(found.busy_s) == pytest.approx(min(found.busy_s))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (PlannedRequest((), 4, text="words"), "lengths in tokens"),
        (PlannedRequest((Segment(5000, 0),), 4), "4096"),
        (PlannedRequest((Segment(400, 0),), 4), "room for 403 tokens; there is for 320"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_its_numbers(request_, words):
    with pytest.raises(ConfigError, match=words):
        check_servable([request_], limits(1), SimulatedMemory(20, 16))


def test_what_warms_up_is_not_told_and_leaves_a_scheduler_that_knows_its_times():
    requests = draw_random(24, uniform(256, 0), uniform(48, 0), random.Random(1))
    partition = stages_of((1,))
    cold, warm = (
        simulate(requests, pipeline(1), partition, limits(1), MEMORY, warm_up=[requests] * num_rounds)
        for num_rounds in (0, 2)
    )
    for found in (cold, warm):
        assert [len(one.token_times_s) for one in found.requests] == [48] * 24
        assert found.num_prompt_tokens == 24 * 256, "what warmed up shares nothing with what comes after"
        assert found.duration_s == pytest.approx(max(one.finished_s - one.arrival_s for one in found.requests))
        assert sum(span.duration_s for span in found.spans if span.kind == "forward") == pytest.approx(found.busy_s[0])
    assert all(one.num_cached_tokens == 0 for one in warm.requests)
    assert warm.num_microbatches != cold.num_microbatches, "chunks are sized by what was learnt"
