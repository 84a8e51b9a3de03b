"""Simulated stages keep the laws of real ones: in order, one microbatch at a time, never faster than their work."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.clock import VirtualClock
from stageline.errors import InternalError
from stageline.executor.simulated import SimulatedExecutor
from stageline.executor.simulated_cores import StagesOnOneHost
from stageline.executor.simulated_stages import (
    HostCores,
    Passage,
    SimulatedLink,
    SimulatedPipeline,
    StagesOfTheirOwn,
)
from stageline.pipeline.microbatch import Microbatch
from stageline.pipeline.partition import stages_of

BYTES_PER_TOKEN = 100.0
ALMOST = 1e-9

times = st.floats(0.0, 1.0)


def passages(times_s: list[list[float]], sources: list[int]) -> list[Passage]:
    return [
        Passage(number, number % 5 + 1, 1, source, stages_s)
        for number, (stages_s, source) in enumerate(zip(times_s, sources, strict=True))
    ]


def run(stages, its_passages: list[Passage], gaps_s: list[float]) -> list[Passage]:
    """Launch each after a gap, then take all results."""
    now_s = 0.0
    for passage, gap_s in zip(its_passages, gaps_s, strict=True):
        now_s += gap_s
        stages.launch(passage, now_s)
    return [result for _ in its_passages if (result := stages.next_result(float("inf"))) is not None]


@st.composite
def pipelines(draw, prepares: bool = True) -> tuple[SimulatedPipeline, list[list[float]], list[int], list[float]]:
    num_stages = draw(st.integers(1, 4))
    num_passages = draw(st.integers(1, 8))
    links = tuple(
        SimulatedLink(draw(times), draw(st.sampled_from([float("inf"), 1000.0, 200.0]))) for _ in range(num_stages - 1)
    )
    pipeline = SimulatedPipeline(
        num_stages,
        lambda microbatch: [],
        links,
        activation_bytes_per_token=BYTES_PER_TOKEN,
        to_stages_s=draw(times),
        to_engine_s=draw(times),
        to_first_stage_s=draw(times),
        prepare_s=draw(times) if prepares else 0.0,
        begin_s=draw(times),
        send_s=draw(times),
        hand_on_s=draw(times),
        result_send_s=draw(times),
    )
    times_s = [[draw(times) for _ in range(num_stages)] for _ in range(num_passages)]
    sources = [draw(st.integers(-1, number - 1)) for number in range(num_passages)]
    return pipeline, times_s, sources, [draw(times) for _ in range(num_passages)]


@settings(max_examples=150, deadline=None)
@given(case=pipelines(), num_cores=st.sampled_from([None, 1, 2, 9]))
def test_a_stage_computes_one_microbatch_at_a_time_after_the_stage_before_and_the_link(case, num_cores):
    pipeline, times_s, sources, gaps_s = case
    stages = StagesOfTheirOwn(pipeline) if num_cores is None else StagesOnOneHost(pipeline, HostCores(num_cores))
    results = run(stages, passages(times_s, sources), gaps_s)
    assert [result.number for result in results] == list(range(len(times_s)))
    for result in results:
        for stage in range(pipeline.num_stages):
            start_s, end_s = result.starts_s[stage], result.ends_s[stage]
            assert end_s - start_s >= times_s[result.number][stage] - ALMOST
            assert result.waits_s[stage] <= start_s + ALMOST
            if stage:
                link = pipeline.links[stage - 1]
                hop_s = link.latency_s + result.num_tokens * BYTES_PER_TOKEN / link.bytes_per_s
                input_s = result.ends_s[stage - 1] + pipeline.send_s + hop_s
                assert start_s >= input_s + pipeline.begin_s - ALMOST
        handed_on_s = result.ends_s[-1] + pipeline.hand_on_s
        if result.source >= 0:
            tokens_s = results[result.source].ends_s[-1] + pipeline.hand_on_s + pipeline.to_first_stage_s
            assert result.starts_s[0] >= tokens_s + pipeline.begin_s - ALMOST
        assert result.result_s >= handed_on_s + pipeline.result_send_s + pipeline.to_engine_s - ALMOST
    sends_s = [pipeline.send_s] * (pipeline.num_stages - 1) + [pipeline.hand_on_s + pipeline.result_send_s]
    for before, after in itertools.pairwise(results):
        for stage in range(pipeline.num_stages):
            assert after.starts_s[stage] >= before.ends_s[stage] + sends_s[stage] + pipeline.begin_s - ALMOST


@settings(max_examples=150, deadline=None)
@given(case=pipelines(prepares=False))
def test_stages_with_a_core_for_everybody_are_stages_of_their_own(case):
    pipeline, times_s, sources, gaps_s = case
    alone = run(StagesOfTheirOwn(pipeline), passages(times_s, sources), gaps_s)
    shared = run(StagesOnOneHost(pipeline, HostCores(pipeline.num_stages + 1)), passages(times_s, sources), gaps_s)
    for one, other in zip(alone, shared, strict=True):
        assert one.starts_s == pytest.approx(other.starts_s)
        assert one.ends_s == pytest.approx(other.ends_s)
        assert one.result_s == pytest.approx(other.result_s)


@settings(max_examples=100, deadline=None)
@given(case=pipelines(), num_cores=st.integers(1, 3))
def test_cores_do_no_more_than_their_number_allows(case, num_cores):
    pipeline, times_s, sources, gaps_s = case
    results = run(StagesOnOneHost(pipeline, HostCores(num_cores)), passages(times_s, sources), gaps_s)
    work_s = sum(sum(stages_s) for stages_s in times_s) + len(times_s) * pipeline.num_stages * pipeline.prepare_s
    assert results[-1].ends_s[-1] * num_cores >= work_s - ALMOST


def test_two_stages_on_one_core_take_turns_and_slow_each_other():
    pipeline = SimulatedPipeline(2, lambda microbatch: [], (SimulatedLink(),))
    both = passages([[1.0, 1.0], [1.0, 1.0]], [-1, -1])
    one_core = run(StagesOnOneHost(pipeline, HostCores(1)), both, [0.0, 0.0])
    # Stage 0 alone for a second; then both share the core for two; then stage 1 alone.
    assert one_core[1].ends_s == pytest.approx([3.0, 4.0])
    both = passages([[1.0, 1.0], [1.0, 1.0]], [-1, -1])
    two_cores = run(StagesOnOneHost(pipeline, HostCores(2, lambda num_tokens: (1.0, 1.5))), both, [0.0, 0.0])
    assert two_cores[1].ends_s == pytest.approx([2.5, 3.5])


def test_the_engine_goes_first_and_holds_up_a_stage_where_there_is_no_core_for_it():
    pipeline = SimulatedPipeline(1, lambda microbatch: [], ())
    [passage] = passages([[1.0]], [-1])
    stages = StagesOnOneHost(pipeline, HostCores(1))
    stages.launch(passage, 0.0)
    assert stages.engine_works(0.5, 0.25) == pytest.approx(0.75)
    assert stages.next_result(float("inf")) is passage
    assert passage.ends_s == pytest.approx([1.25])


def microbatch(number: int) -> Microbatch:
    return Microbatch(0, number, [], [], [], [1], [0], [1], [7], [0])


def test_the_clock_stands_at_the_result_or_at_the_time_that_was_waited_for():
    clock = VirtualClock()
    pipeline = SimulatedPipeline(1, lambda found: [2.0], (), launch_s=0.5, result_s=0.25)
    executor = SimulatedExecutor(pipeline, stages_of((1,)), clock)
    executor.launch(microbatch(0))
    assert clock.now_s() == 0.5
    assert executor.wait(1.5) is None and clock.now_s() == 1.5
    result = executor.wait()
    assert result is not None and len(result.token_ids) == 1
    assert clock.now_s() == 2.75
    assert (result.computing_s, result.slowest_s) == (2.0, 2.0)
    assert [(str(span), span.start_s, span.end_s) for span in executor.collect_spans() if span.kind == "forward"] == [
        ("s0 m0 forward", 0.5, 2.5)
    ]
    with pytest.raises(InternalError):
        executor.wait()
    executor.close()
