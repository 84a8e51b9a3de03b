"""Look-ahead: decodes are announced before their tokens are known, never more than helps, and nothing else changes."""

from __future__ import annotations

import statistics

import pytest

from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.unit.simulated_stages import VOCAB_SIZE, engine_request, expected_output
from tests.unit.test_scheduler import BLOCK_SIZE, make_engine
from tests.unit.test_scheduler_grammar import guided
from tests.unit.test_scheduler_grammar import make_engine as make_masked_engine
from tests.unit.virtual_pipeline import STAGE_COSTS, VirtualPipeline


def decoding_engine(num_requests: int, num_stages: int = 2, max_tokens: int = 100, **settings):
    """Its requests decode, and it looks ahead."""
    engine = make_engine(num_stages=num_stages, look_ahead=True, **settings)
    for index in range(num_requests):
        engine.add(engine_request(str(index), [index % VOCAB_SIZE] * 5, max_tokens))
    while engine.scheduler.num_waiting_tokens:
        engine.step()
    for _ in range(3 * num_stages):
        engine.step()
    return engine


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_in_steady_decode_every_result_finds_one_microbatch_more_than_the_window(num_stages):
    engine = decoding_engine(8, num_stages)
    for _ in range(20):
        engine.fill()
        assert len(engine.in_flight) == num_stages + 1
        newest = engine.in_flight.microbatches[-1]
        assert newest.pending_rows == list(range(newest.num_rows))
        engine.step()


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_prompt_alone_has_one_chunk_more_in_flight_than_the_window(num_stages):
    """Chunks do not take equally long, and without one that lies ready the stages would wait for one another."""
    engine = make_engine(num_stages=num_stages, look_ahead=True, max_num_batched_tokens=8)
    engine.add(engine_request("long", [1] * 400, 2))
    for _ in range(10):
        engine.fill()
        assert [microbatch.num_tokens for microbatch in engine.in_flight.microbatches] == [8] * (num_stages + 1)
        engine.step()


def test_beside_decodes_a_chunk_more_than_the_window_waits_until_there_is_a_decode_to_go_with_it():
    engine = decoding_engine(1, num_stages=4, max_num_batched_tokens=8)
    engine.add(engine_request("long", [1] * 400, 2))
    for _ in range(10):
        engine.fill()
        *others, newest = engine.in_flight.microbatches
        assert len(others) < 4 or newest.pending_rows
        engine.step()


def test_no_row_is_computed_that_is_known_to_be_one_too_many():
    """Requests that end by length: every token but the last of each is computed once."""
    engine = make_engine(num_stages=2, look_ahead=True)
    lengths = [1, 2, 3, 7, 20, 20, 31, 64]
    for index, max_tokens in enumerate(lengths):
        engine.add(engine_request(str(index), [index] * 4, max_tokens))
    engine.run()
    assert sum(len(m.pending_rows) for m in engine.stages.launched) > 0
    assert sum(m.num_tokens for m in engine.stages.launched) == sum(4 + max_tokens - 1 for max_tokens in lengths)


def test_a_request_that_ends_unexpectedly_is_told_once_and_keeps_its_blocks_until_its_row_has_landed():
    engine = decoding_engine(1, num_stages=1, prefix_caching=False)
    engine.fill()
    assert engine.in_flight.microbatches[-1].pending_rows == [0]
    engine.abort("0")
    used = engine.kv.num_blocks - engine.kv.num_free_blocks
    assert used > 0
    engine.step()
    assert engine.kv.num_blocks - engine.kv.num_free_blocks == used
    engine.run()
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    assert engine.finished == {"0": "abort"}


@pytest.mark.parametrize("place", range(1, 12))
def test_an_end_of_sequence_ends_the_answer_where_it_stands(place):
    """The row that was announced beyond it says nothing."""
    prompt = [3, 1, 4]
    eos = expected_output(engine_request("a", prompt, 40))[place]
    asked = engine_request("a", prompt, 40, eos=(eos,))
    engine = make_engine(num_stages=1, look_ahead=True)
    engine.add(asked)
    engine.run()
    assert engine.outputs["a"] == expected_output(asked)
    assert engine.finished["a"] == "stop"
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_blocks_filled_while_their_tokens_were_unknown_are_shared_under_their_true_names():
    first = engine_request("a", [1, 2, 3], 30)
    engine = make_engine(num_stages=1, look_ahead=True)
    engine.add(first)
    engine.run()
    engine.add(engine_request("b", [*first.prompt_token_ids, *expected_output(first)], 2))
    before = engine.scheduler.num_prefix_hits_tokens
    engine.run()
    # The last token of the first answer was never computed, so its block is not whole.
    assert engine.scheduler.num_prefix_hits_tokens - before == (3 + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_nobody_is_preempted_for_a_row_whose_token_is_not_known():
    """Both requests' next blocks are missing; only when a token is known may the older take the younger's."""
    engine = make_engine(num_stages=1, num_blocks=2, prefix_caching=False, look_ahead=True)
    engine.add(engine_request("older", [1] * 3, 5))
    engine.add(engine_request("younger", [2] * 3, 5))
    engine.fill()
    engine.fill()
    assert engine.scheduler.num_preemptions == 0
    engine.run()
    for request_id, first in (("older", 1), ("younger", 2)):
        assert engine.outputs[request_id] == expected_output(engine_request(request_id, [first] * 3, 5))


def test_where_the_window_has_room_nothing_is_announced_ahead():
    """One request on two stages: a prompt that arrives would have to wait for its successor, and does not."""
    engine = decoding_engine(1, num_stages=2)
    for _ in range(10):
        engine.fill()
        assert len(engine.in_flight) == 1
        engine.step()
    assert not any(m.pending_rows for m in engine.stages.launched)
    engine.fill()
    engine.add(engine_request("new", [9] * 5, 3))
    engine.fill()
    assert [len(m.added) for m in engine.in_flight.microbatches[:2]] == [0, 1]


def test_a_new_prompt_waits_for_one_microbatch_more_than_without():
    def num_before_the_prompt(look_ahead: bool) -> int:
        engine = decoding_engine(8) if look_ahead else make_engine(num_stages=2)
        if not look_ahead:
            for index in range(8):
                engine.add(engine_request(str(index), [index] * 5, 100))
            for _ in range(20):
                engine.step()
        engine.fill()
        oldest = engine.in_flight.microbatches[0].number
        engine.add(engine_request("new", [9] * 5, 3))
        while not engine.stages.launched[-1].added:
            engine.step()
            engine.fill()
        return next(m.number for m in engine.stages.launched[oldest:] if m.added) - oldest

    assert (num_before_the_prompt(False), num_before_the_prompt(True)) == (2, 3)


def test_prompts_get_their_chunks_while_decodes_are_announced_ahead():
    engine = decoding_engine(8, max_chunk_tokens=4)
    engine.fill()
    first = len(engine.stages.launched)
    engine.add(engine_request("long", [7] * 40, 3))
    for _ in range(10):
        engine.step()
    with_chunks = engine.stages.launched[first : first + 9]
    assert [m.num_scheduled_tokens[-1] for m in with_chunks] == [4] * 9
    assert all(m.pending_rows for m in with_chunks)


def test_a_group_with_a_grammar_is_not_announced_and_stays_together():
    engine = make_masked_engine(num_stages=2, look_ahead=True)
    asked = [guided("guided", [1, 2], 60)]
    asked += [engine_request(name, [3, place], 60) for place, name in enumerate("abc")]
    for request in asked:
        engine.add(request)
    for _ in range(12):
        engine.step()
    first = len(engine.stages.launched)
    for _ in range(20):
        engine.step()
    launched = engine.stages.launched[first:]
    numbers = {number for m in launched if m.masked_rows for number in m.request_numbers}
    assert len(numbers) == 2, "the guided request and one more take turns with the other two"
    for m in launched:
        assert m.pending_rows == ([] if m.masked_rows else [0, 1])


def cycle_s(look_ahead: bool, num_stages: int, hop_s: float) -> float:
    """Time in which every request of a steady decode gets one token."""
    num_requests = 8 * num_stages
    limits = SchedulerLimits(num_stages, num_stages, num_requests, 2048, 4096, look_ahead=look_ahead)
    pipeline = VirtualPipeline(Scheduler(KVCacheManager(10_000, 16, False), limits), [STAGE_COSTS] * num_stages, hop_s)
    for index in range(num_requests):
        pipeline.arrive(engine_request(str(index), [1] * 32, 400))
    pipeline.run(2.0)
    return statistics.median(pipeline.records["0"].gaps_s(1.0, 2.0))


@pytest.mark.parametrize(("num_stages", "num_hops_saved"), [(1, 2), (2, 1), (3, 1)])
def test_a_token_goes_straight_to_its_next_microbatch(num_stages, num_hops_saved):
    """By the engine it takes two hops from the last stage to the first; else one, and none within a single stage."""
    hop_s = 1e-3
    saved_s = cycle_s(False, num_stages, hop_s) - cycle_s(True, num_stages, hop_s)
    assert saved_s == pytest.approx(num_hops_saved * hop_s, rel=0.1)
