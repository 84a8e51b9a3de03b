"""Microbatches of decodes take equally long though contexts differ wildly, and soon again after anything that happens.

In virtual time on stages where a long context costs: a decode with 2,000 tokens of it takes ten times a short one's.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.cost.stage_time import MicrobatchShape, StageTimeCosts
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.microbatch import Microbatch
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.unit.simulated_stages import engine_request
from tests.unit.virtual_pipeline import VirtualPipeline

COSTS = StageTimeCosts(2.5e-3, 1e-4, 1.2e-8, 1e-4, 9e-7)
SHORT, LONG = 50, 2000


def make_pipeline(num_stages: int, num_blocks: int = 50_000) -> VirtualPipeline:
    limits = SchedulerLimits(
        num_stages=num_stages,
        window=num_stages,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        max_decode_slowdown=2.0,
    )
    return VirtualPipeline(Scheduler(KVCacheManager(num_blocks, 16, False), limits), [COSTS] * num_stages)


def time_s(microbatch: Microbatch) -> float:
    shape = MicrobatchShape.of_rows(microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
    return COSTS.predict_s(shape)


def go_round(pipeline: VirtualPipeline, num_rounds: int) -> list[Microbatch]:
    """The microbatches launched while so many times the window comes back."""
    before = len(pipeline.launched)
    while len(pipeline.launched) < before + num_rounds * pipeline.scheduler.window and pipeline.step():
        pass
    return pipeline.launched[before:]


def settle(pipeline: VirtualPipeline) -> None:
    """Until no prompt waits and the costs are learnt."""
    while pipeline.scheduler.num_waiting_tokens or not pipeline.launched:
        assert pipeline.step()
    go_round(pipeline, 40)


def spread(microbatches: list[Microbatch]) -> float:
    """Of their times, largest over smallest, less one; all are of decodes alone."""
    assert all(microbatch.num_tokens == microbatch.num_decode_rows for microbatch in microbatches)
    times_s = [time_s(microbatch) for microbatch in microbatches]
    return max(times_s) / min(times_s) - 1


def start(pipeline: VirtualPipeline, num_requests: int, seed: int = 0) -> None:
    """Half of them with a short context, half with a long one, as they come."""
    lengths = [SHORT, LONG] * (num_requests // 2)
    random.Random(seed).shuffle(lengths)
    for index, length in enumerate(lengths):
        pipeline.arrive(engine_request(str(index), [1] * length, 4000))


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_half_short_half_long_contexts_make_microbatches_that_take_equally_long(num_stages, seed):
    pipeline = make_pipeline(num_stages)
    start(pipeline, 32 * num_stages, seed)
    settle(pipeline)
    assert spread(go_round(pipeline, 20)) <= 0.10


@pytest.mark.parametrize("num_stages", [2, 4])
def test_short_ones_before_long_ones_too(num_stages):
    pipeline = make_pipeline(num_stages)
    for index in range(32 * num_stages):
        pipeline.arrive(engine_request(str(index), [1] * (SHORT if index < 16 * num_stages else LONG), 4000))
    settle(pipeline)
    assert spread(go_round(pipeline, 20)) <= 0.10


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_groups_are_level_again_soon_after_ends_bursts_and_aborts(data):
    num_stages = data.draw(st.sampled_from([2, 3, 4]), "stages")
    pipeline = make_pipeline(num_stages)
    start(pipeline, 64, data.draw(st.integers(0, 100), "order"))
    settle(pipeline)
    alive = [str(index) for index in range(64)]
    for number in range(data.draw(st.integers(1, 3), "disturbances")):
        if data.draw(st.booleans(), "abort"):
            for victim in data.draw(st.lists(st.sampled_from(alive), max_size=16, unique=True), "victims"):
                pipeline.scheduler.abort(victim, pipeline.now_s)
                alive.remove(victim)
        else:
            num_tokens = data.draw(st.sampled_from([20, 4000]), "output")
            for index in range(data.draw(st.integers(1, 24), "size")):
                length = data.draw(st.sampled_from([SHORT, LONG]))
                pipeline.arrive(engine_request(f"{number} {index}", [1] * length, num_tokens))
        go_round(pipeline, 3)
        while pipeline.scheduler.num_waiting_tokens:
            pipeline.step()
    go_round(pipeline, 25)
    check_level(go_round(pipeline, 4), num_stages)


def check_level(microbatches: list[Microbatch], num_stages: int) -> None:
    """As level as can be where whole requests are what is moved."""
    longest = max(max(microbatch.num_computed_tokens) for microbatch in microbatches)
    longest_row_s = COSTS.decode_s + COSTS.token_s + COSTS.context_token_s * longest
    times_s = [time_s(microbatch) for microbatch in microbatches]
    # Each group may have half of a request too much, which the last then lacks.
    assert max(times_s) - min(times_s) <= (num_stages / 2 + 1) * longest_row_s


@pytest.mark.parametrize(("num_stages", "seed"), [(2, 0), (2, 50), (3, 1), (3, 84), (3, 96), (4, 0), (4, 50)])
def test_groups_are_level_again_soon_after_requests_were_preempted(num_stages, seed):
    """Of 24 long and 24 short ones, with room for 100 more tokens of each."""
    num_blocks = 24 * (LONG // 16 + SHORT // 16 + 2) + 48 * 100 // 16
    pipeline = make_pipeline(num_stages, num_blocks)
    start(pipeline, 48, seed)
    settle(pipeline)
    num_checks = 0
    while num_checks < 3:
        before = pipeline.scheduler.num_preemptions
        while pipeline.scheduler.num_preemptions == before:
            assert pipeline.step()
        go_round(pipeline, 25)
        num_preempted = pipeline.scheduler.num_preemptions
        microbatches = go_round(pipeline, 4)
        # One that had to make room may have come back meanwhile, with its prompt.
        are_decodes = all(microbatch.num_tokens == microbatch.num_decode_rows for microbatch in microbatches)
        if are_decodes and pipeline.scheduler.num_preemptions == num_preempted:
            check_level(microbatches, num_stages)
            num_checks += 1
    assert pipeline.scheduler.num_waiting > 0
