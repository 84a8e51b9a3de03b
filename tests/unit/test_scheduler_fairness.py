"""Nobody starves: decodes beside a long prompt, a long prompt beside decodes, a short prompt behind a long one.

In virtual time, so the bounds are on times and still exact.
"""

from __future__ import annotations

import math
import random
import statistics

import pytest

from stageline.cost.stage_time import StageTimeCosts
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.scheduler.budget import decode_slowdown
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.unit.simulated_stages import engine_request
from tests.unit.virtual_pipeline import STAGE_COSTS, Record, VirtualPipeline

SLOWDOWN = 2.0
LONG_PROMPT = 4000
# What a microbatch costs beside its tokens is worth 7 of them, 400 and 10.
COSTS = {
    "small model on a core": STAGE_COSTS,
    "accelerator": StageTimeCosts(8e-3, 2e-5, 1e-10, 1e-5, 2e-8),
    "large model on a core": StageTimeCosts(0.1, 1e-2, 1e-7, 1e-3, 1e-6),
}


def make_pipeline(
    num_stages: int = 2,
    costs: StageTimeCosts = STAGE_COSTS,
    slowdown: float = SLOWDOWN,
    max_num_seqs: int = 256,
    noise=lambda: 1.0,
) -> VirtualPipeline:
    limits = SchedulerLimits(
        num_stages=num_stages,
        window=num_stages,
        widest_window=4 * num_stages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=8192,
        max_decode_slowdown=slowdown,
    )
    scheduler = Scheduler(KVCacheManager(50_000, 16, False), limits)
    return VirtualPipeline(scheduler, [costs] * num_stages, noise=noise)


def start_decodes(pipeline: VirtualPipeline, num_decodes: int) -> list[Record]:
    """Let requests decode until the pipeline is in its stride."""
    for index in range(num_decodes):
        pipeline.arrive(engine_request(f"decode {index}", [1] * 64, 8000))
    while not all(len(record.token_times_s) >= 60 for record in pipeline.records.values()) or not pipeline.records:
        pipeline.step()
    return list(pipeline.records.values())


def first_token(pipeline: VirtualPipeline, name: str, num_tokens: int) -> float:
    """Send a prompt of so many tokens and wait for its first token. Returns: its time to first token, in seconds."""
    pipeline.arrive(engine_request(name, [1] * num_tokens, 1))
    while name not in pipeline.records or not pipeline.records[name].token_times_s:
        assert pipeline.step()
    return pipeline.records[name].time_to_first_token_s


def gaps_s(records: list[Record], start_s: float, end_s: float) -> list[float]:
    return sorted(gap for record in records for gap in record.gaps_s(start_s, end_s))


def p99(values: list[float]) -> float:
    return values[int(0.99 * len(values))]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_decodes", [1, 8, 32])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_a_long_prompt_never_makes_a_token_take_three_times_the_usual(num_stages, num_decodes, costs):
    pipeline = make_pipeline(num_stages, costs)
    decodes = start_decodes(pipeline, num_decodes)
    quiet_from_s = pipeline.now_s
    pipeline.run(until_s=quiet_from_s + 1.0)
    quiet_s = gaps_s(decodes, quiet_from_s, pipeline.now_s)
    arrival_s = pipeline.now_s
    first_token(pipeline, "long", LONG_PROMPT)
    disturbed_s = gaps_s(decodes, arrival_s, pipeline.now_s)
    assert len(disturbed_s) > 3 * num_decodes
    assert disturbed_s[-1] < 3 * statistics.median(quiet_s)


def test_without_the_bound_a_long_prompt_does():
    """The law above is not kept by chance."""
    pipeline = make_pipeline(slowdown=math.inf)
    decodes = start_decodes(pipeline, 8)
    quiet_s, arrival_s = gaps_s(decodes, pipeline.now_s - 0.3, pipeline.now_s), pipeline.now_s
    first_token(pipeline, "long", LONG_PROMPT)
    assert p99(gaps_s(decodes, arrival_s, pipeline.now_s)) > 10 * statistics.median(quiet_s)


@pytest.mark.parametrize("num_decodes", [8, 32])
def test_on_a_noisy_machine_a_long_prompt_slows_decodes_down_as_far_as_it_may_and_no_further(num_decodes):
    """Times vary by half and one in twenty is four times as long: single gaps and runs are noise, all together not."""
    ratios = [mean_slowdown(random.Random(seed), num_decodes) for seed in range(12)]
    assert 1.3 < statistics.median(ratios) < 2.5


def mean_slowdown(numbers: random.Random, num_decodes: int) -> float:
    """Mean of the gaps while three long prompts come, over that before."""

    def noise() -> float:
        return math.exp(numbers.gauss(0.0, 0.5)) * (4.0 if numbers.random() < 0.05 else 1.0)

    pipeline = make_pipeline(noise=noise)
    decodes = start_decodes(pipeline, num_decodes)
    quiet_from_s = pipeline.now_s
    pipeline.run(until_s=quiet_from_s + 10.0)
    quiet_s, arrival_s = gaps_s(decodes, quiet_from_s, pipeline.now_s), pipeline.now_s
    for index in range(3):
        first_token(pipeline, f"long {index}", LONG_PROMPT)
    disturbed_s = gaps_s(decodes, arrival_s, pipeline.now_s)
    return statistics.mean(disturbed_s) / statistics.mean(quiet_s)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_decodes", [8, 64])
def test_a_long_prompt_comes_to_its_end_beside_decodes_that_never_end(num_stages, num_decodes):
    alone_s = first_token(make_pipeline(num_stages), "long", LONG_PROMPT)
    pipeline = make_pipeline(num_stages)
    start_decodes(pipeline, num_decodes)
    before = len(pipeline.launched)
    beside_s = first_token(pipeline, "long", LONG_PROMPT)
    chunks = [m for m in pipeline.launched[before:] if m.num_tokens > m.num_decode_rows]
    assert len(chunks) <= LONG_PROMPT / 8 + 1
    # Half of every microbatch is its own, so twice the time, and something for the smaller chunks.
    assert beside_s < 3.2 * alone_s


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_decodes_go_on_under_an_endless_stream_of_prompts(num_stages):
    """More arrives than can be served: the queue only grows."""
    pipeline = make_pipeline(num_stages)
    decodes = start_decodes(pipeline, 8)
    median_s = statistics.median(gaps_s(decodes, pipeline.now_s - 0.2, pipeline.now_s))
    start_s = pipeline.now_s
    for index in range(600):
        pipeline.arrive(engine_request(f"prompt {index}", [1] * 500, 1), at_s=start_s + 0.05 * index)
    pipeline.run(until_s=start_s + 30.0)
    assert pipeline.scheduler.num_waiting > 100, "the stream is not more than can be served"
    most = decode_slowdown(SLOWDOWN, num_prompts=10**9, num_decoding=8)
    assert gaps_s(decodes, start_s, pipeline.now_s)[-1] < 2 * most * median_s


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("spread", [0, 100])
def test_a_burst_is_served_as_fast_as_without_the_bound(num_stages, spread):
    def makespan_s(slowdown: float) -> float:
        lengths = random.Random(0)
        pipeline = make_pipeline(num_stages, slowdown=slowdown)
        for index in range(64):
            pipeline.arrive(engine_request(str(index), [1] * (128 + lengths.randint(-spread, spread)), 128))
        pipeline.run()
        return pipeline.now_s

    assert makespan_s(SLOWDOWN) < 1.03 * makespan_s(math.inf)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_chunks_of_a_lone_prompt_are_those_without_the_bound(num_stages):
    def chunks(slowdown: float) -> list[int]:
        pipeline = make_pipeline(num_stages, slowdown=slowdown)
        first_token(pipeline, "lone", LONG_PROMPT)
        return [m.num_tokens for m in pipeline.launched]

    assert chunks(SLOWDOWN) == chunks(math.inf)


@pytest.mark.parametrize("num_decodes", [0, 8])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_short_prompt_does_not_wait_for_the_long_one_before_it(num_stages, num_decodes):
    def serve(with_short: bool) -> VirtualPipeline:
        pipeline = make_pipeline(num_stages)
        if num_decodes:
            start_decodes(pipeline, num_decodes)
        start_s = pipeline.now_s
        pipeline.arrive(engine_request("long", [1] * LONG_PROMPT, 1))
        if with_short:
            pipeline.arrive(engine_request("short", [1] * 64, 1), at_s=start_s + 0.1)
        pipeline.run(until_s=start_s + 20.0)
        return pipeline

    both = serve(with_short=True).records
    long_alone_s = serve(with_short=False).records["long"].time_to_first_token_s
    # It waits for what is in flight when it comes, and then shares; small chunks beside decodes are soon over.
    assert both["short"].time_to_first_token_s < (0.2 if num_decodes else 0.5) * long_alone_s
    assert both["long"].time_to_first_token_s < 1.1 * long_alone_s


def test_a_long_prompt_is_not_starved_by_an_endless_stream_of_short_ones():
    pipeline = make_pipeline()
    alone_s = first_token(make_pipeline(), "long", LONG_PROMPT)
    for index in range(1000):
        pipeline.arrive(engine_request(f"short {index}", [1] * 64, 1), at_s=0.02 * index)
        if index == 100:
            pipeline.arrive(engine_request("long", [1] * LONG_PROMPT, 1), at_s=0.02 * index)
    pipeline.run(until_s=20.0)
    assert pipeline.records["long"].time_to_first_token_s < 4 * alone_s


def test_what_nobody_may_do_less_than_is_never_exceeded():
    """The slowdown: the asked one for a lone prompt, more for many, and bounded."""
    assert decode_slowdown(2.0, num_prompts=1, num_decoding=1) == 2.0
    assert decode_slowdown(2.0, num_prompts=3, num_decoding=100) == 2.0
    rising = [decode_slowdown(2.0, num_prompts, 8) for num_prompts in (1, 4, 8, 16, 64, 10_000)]
    assert rising == sorted(rising)
    assert 2.0 < rising[2] < rising[-1] == decode_slowdown(2.0, 10**9, 1)
