"""The scheduler: every request ends with its own tokens, nothing is scheduled twice, window and budgets are kept."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.cost.stage_time import StageTimeCosts
from stageline.errors import RequestError
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.scheduler.budget import PromptWork, chunk_length, next_chunk_s
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.unit.simulated_stages import (
    VOCAB_SIZE,
    SimulatedEngine,
    SimulatedStages,
    engine_request,
    expected_output,
)

BLOCK_SIZE = 4


def make_engine(
    num_stages=2,
    num_blocks=1000,
    window=None,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    max_model_len=2000,
    max_chunk_tokens=None,
    prefix_caching=True,
    max_decode_slowdown=math.inf,
    look_ahead=False,
) -> SimulatedEngine:
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, prefix_caching)
    limits = SchedulerLimits(
        num_stages=num_stages,
        window=window or num_stages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_chunk_tokens=max_chunk_tokens,
        max_decode_slowdown=max_decode_slowdown,
        look_ahead=look_ahead,
    )
    stages = SimulatedStages(
        MicrobatchLimits(num_blocks, BLOCK_SIZE, VOCAB_SIZE, max_num_seqs, max_num_batched_tokens, max_model_len)
    )
    engine = SimulatedEngine(Scheduler(kv, limits), stages)
    engine.kv = kv
    return engine


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_request_ends_with_its_own_tokens_and_every_block_comes_back(data):
    """Random requests, priorities, aborts, memory, window, chunks: outputs are those of each request on its own."""
    num_blocks = data.draw(st.integers(4, 40), "blocks")
    engine = make_engine(
        num_stages=data.draw(st.integers(1, 5), "stages"),
        num_blocks=num_blocks,
        window=data.draw(st.integers(1, 7), "window"),
        max_num_seqs=data.draw(st.integers(1, 8), "max_num_seqs"),
        max_num_batched_tokens=data.draw(st.sampled_from([1, 3, 16, 64]), "max_num_batched_tokens"),
        max_chunk_tokens=data.draw(st.sampled_from([None, 1, 3, 7]), "chunk"),
        prefix_caching=data.draw(st.booleans(), "prefix caching"),
        max_decode_slowdown=data.draw(st.sampled_from([math.inf, 1.5]), "max_decode_slowdown"),
        look_ahead=data.draw(st.booleans(), "look-ahead"),
    )
    longest = num_blocks * BLOCK_SIZE
    asked, aborted = {}, set()
    for index in range(data.draw(st.integers(1, 12), "requests")):
        shared = [7] * data.draw(st.integers(0, longest // 2))
        prompt = [*shared, data.draw(st.integers(0, 3))]
        max_tokens = data.draw(st.integers(1, longest - len(prompt)))
        request = msgspec.structs.replace(
            engine_request(str(index), prompt, max_tokens, eos=(VOCAB_SIZE - 1,)),
            priority=data.draw(st.integers(-1, 1), "priority"),
            cache_salt=data.draw(st.sampled_from(["", "salt"]), "salt"),
        )
        engine.add(request)
        asked[str(index)] = request
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step()
        if data.draw(st.integers(0, 9)) == 0:
            victim = str(data.draw(st.integers(0, index)))
            if victim not in engine.finished:
                aborted.add(victim)
            engine.abort(victim)
    engine.run()
    assert set(engine.finished) == set(asked)
    for request_id, request in asked.items():
        expected = expected_output(request)
        if request_id in aborted:
            assert engine.outputs[request_id] == expected[: len(engine.outputs[request_id])]
        else:
            assert engine.outputs[request_id] == expected
            is_eos = expected[-1] == VOCAB_SIZE - 1
            assert engine.finished[request_id] == ("stop" if is_eos else "length")
    assert engine.kv.num_free_blocks == num_blocks


def decode_sizes(engine, num_results):
    """Rows of the pure decode microbatches launched while `num_results` results come in."""
    first = len(engine.stages.launched)
    for _ in range(num_results):
        engine.step()
    return [m.num_rows for m in engine.stages.launched[first:] if m.num_tokens == m.num_rows]


@pytest.mark.parametrize("look_ahead", [False, True])
@pytest.mark.parametrize(("num_requests", "num_stages"), [(64, 2), (64, 4), (63, 4), (10, 3)])
def test_a_burst_is_levelled_over_the_window(num_requests, num_stages, look_ahead):
    """64 requests on 2 stages decode as 32 + 32, not 64 + 0."""
    engine = make_engine(num_stages=num_stages, look_ahead=look_ahead)
    for index in range(num_requests):
        engine.add(engine_request(str(index), [index % VOCAB_SIZE] * 10, 200))
    while engine.scheduler.num_waiting:
        engine.step()
    decode_sizes(engine, 4 * num_stages)
    sizes = decode_sizes(engine, 5 * num_stages)
    most = -(-num_requests // num_stages)
    assert max(sizes) == most
    for first in range(len(sizes) - num_stages + 1):
        assert sum(sizes[first : first + num_stages]) == num_requests


@pytest.mark.parametrize("look_ahead", [False, True])
def test_groups_stay_level_as_requests_of_different_lengths_finish(look_ahead):
    engine = make_engine(num_stages=2, look_ahead=look_ahead)
    lengths = random.Random(1)
    for index in range(64):
        # The first half ends early: without levelling one group would be left almost alone.
        max_tokens = lengths.randint(20, 60) if index < 32 else 400
        engine.add(engine_request(str(index), [index % VOCAB_SIZE] * 10, max_tokens))
    while engine.scheduler.num_unfinished > 32:
        engine.step()
    decode_sizes(engine, 6)
    assert set(decode_sizes(engine, 20)) == {16}


def test_the_window_is_full_whenever_there_are_requests_for_it():
    engine = make_engine(num_stages=4)
    for index in range(4):
        engine.add(engine_request(str(index), [index] * 3, 50))
    decode_sizes(engine, 8)
    for _ in range(40):
        engine.fill()
        assert len(engine.in_flight) == 4
        engine.step()


def test_chunks_of_one_prompt_follow_each_other_without_waiting_for_a_result():
    engine = make_engine(num_stages=3, max_chunk_tokens=16)
    engine.add(engine_request("long", [i % VOCAB_SIZE for i in range(100)], 1))
    engine.fill()
    assert [m.num_scheduled_tokens for m in engine.stages.launched] == [[16], [16], [16]]
    assert [m.sampling_rows for m in engine.stages.launched] == [[], [], []]
    engine.run()
    assert sum(m.num_tokens for m in engine.stages.launched) == 100
    assert engine.stages.launched[-1].sampling_rows == [0]


def test_prefill_and_decode_share_a_microbatch_with_decodes_first():
    engine = make_engine(num_stages=1, max_chunk_tokens=8)
    engine.add(engine_request("decoding", [1, 2], 50))
    engine.step()
    engine.add(engine_request("arriving", [3] * 20, 5))
    engine.step()
    mixed = engine.stages.launched[-1]
    assert mixed.num_scheduled_tokens == [1, 8]
    assert mixed.num_decode_rows == 1


def test_preemption_frees_the_newest_request_and_it_still_gets_its_tokens():
    engine = make_engine(num_stages=2, num_blocks=8, prefix_caching=False)
    requests = [engine_request(str(index), [index] * 8, 16) for index in range(3)]
    for request in requests:
        engine.add(request)
    engine.run()
    preempted = [number for m in engine.stages.launched for number in m.removed]
    introduced = [added.request_number for m in engine.stages.launched for added in m.added]
    assert len(introduced) > 3, "memory for 32 tokens cannot hold 3 requests of 24: one must be preempted"
    assert preempted
    assert [engine.outputs[r.request_id] for r in requests] == [expected_output(r) for r in requests]


def test_the_oldest_request_is_never_preempted():
    engine = make_engine(num_stages=3, num_blocks=10)
    for index in range(5):
        engine.add(engine_request(str(index), [index] * 10, 25))
    order = []
    while engine.step():
        order += [request_id for request_id in engine.finished if request_id not in order]
    assert order[0] == "0"
    first = [m for m in engine.stages.launched for added in m.added if added.request_number == 1]
    assert len(first) == 1


def test_a_request_that_can_never_fit_is_refused_on_arrival_with_the_numbers():
    engine = make_engine(num_blocks=5)
    with pytest.raises(RequestError, match=r"max_tokens 12 need 6 KV cache blocks.*has 5") as caught:
        engine.add(engine_request("big", [1] * 10, 12))
    assert caught.value.field == "max_tokens"
    engine.add(engine_request("fits", [1] * 10, 11))
    engine.run()
    assert len(engine.outputs["fits"]) == 11


def test_an_aborted_request_keeps_its_blocks_until_nothing_in_flight_uses_them():
    engine = make_engine(num_stages=2, num_blocks=10)
    engine.add(engine_request("gone", [1] * 8, 20))
    engine.fill()
    assert engine.kv.num_free_blocks == 8
    engine.abort("gone")
    assert engine.kv.num_free_blocks == 8
    assert engine.finished == {"gone": "abort"}
    engine.step()
    assert engine.kv.num_free_blocks == 10
    assert engine.outputs["gone"] == []


def test_requests_that_begin_alike_share_blocks_as_soon_as_the_first_is_launched():
    engine = make_engine(num_stages=2)
    prefix = [5] * 16
    engine.add(engine_request("a", [*prefix, 1], 2))
    engine.fill()
    engine.add(engine_request("b", [*prefix, 2], 2))
    engine.fill()
    second = engine.stages.launched[1]
    assert second.num_computed_tokens == [16]
    assert second.num_scheduled_tokens == [1]
    assert second.added[0].block_ids[:4] == engine.stages.launched[0].added[0].block_ids[:4]
    engine.run()
    assert engine.outputs["b"] == expected_output(engine_request("b", [*prefix, 2], 2))


@given(st.integers(1, 100_000), st.integers(2, 16))
def test_the_chosen_chunk_is_near_the_best_for_a_pipeline_of_equal_stages(num_tokens, num_stages):
    """Makespan (M + P - 1)(F / M + c) at the chosen chunk against the best integer M, in units of c."""
    costs = StageTimeCosts(1.0, 1 / 64, 0.0, 0.0, 0.0)
    chunk_s = next_chunk_s(PromptWork(num_tokens / 64, 0.0, num_tokens), costs, num_stages)

    def makespan(num_chunks):
        return (num_chunks + num_stages - 1) * (num_tokens / 64 / num_chunks + 1)

    best = min(makespan(m) for m in range(1, 200))
    assert makespan(round(num_tokens / 64 / chunk_s)) <= 1.01 * best + 0.1


def test_beside_decodes_a_chunk_more_costs_what_they_take():
    costs, work = StageTimeCosts(1.0, 1 / 64, 0.0, 0.0, 0.0), PromptWork(64.0, 0.0, 64 * 64)
    assert next_chunk_s(work, costs, 2.0) == next_chunk_s(work, costs, 2.0, decodes_s=0.5) == 64.0 / 8
    assert next_chunk_s(work, costs, 2.0, decodes_s=4.0) == 64.0 / 4


@given(st.integers(2, 300), st.integers(0, 300), st.integers(1, 300), st.integers(1, 400))
def test_a_chunk_fills_the_room_and_ends_on_a_block_boundary_when_that_wastes_little(gap, computed, room, most):
    length = chunk_length(gap, computed, room, 16, most)
    assert 1 <= length <= min(gap, most, room + room / 8)
    if length < gap and room <= most:
        assert length >= 0.75 * room
        if room >= 4 * 16:
            assert (computed + length) % 16 == 0
