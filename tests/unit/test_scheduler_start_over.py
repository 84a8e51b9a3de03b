"""A new epoch loses nothing: whatever was running ends with its own tokens, though the stages forgot everything."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.kv.kv_cache_manager import KVCacheManager
from tests.unit.simulated_stages import SimulatedEngine, SimulatedStages, engine_request, expected_output
from tests.unit.test_scheduler import BLOCK_SIZE, make_engine


def start_over(engine: SimulatedEngine, num_blocks: int) -> None:
    """Wait until nothing is in flight, then go on with stages that know nothing."""
    while len(engine.in_flight):
        engine.land()
    before = engine.stages
    engine.kv = KVCacheManager(num_blocks, BLOCK_SIZE, True)
    epoch, first = engine.scheduler.start_over(engine.kv)
    for last in before.launched[-1:]:
        assert (epoch, first) == (last.epoch + 1, last.number + 1)
    engine.stages = SimulatedStages(before.limits)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_do_not_depend_on_new_epochs(data) -> None:
    look_ahead = data.draw(st.booleans(), "look-ahead")
    engine = make_engine(num_stages=3, num_blocks=40, max_num_batched_tokens=16, look_ahead=look_ahead)
    asked = []
    for number in range(data.draw(st.integers(1, 6), "requests")):
        prompt = data.draw(st.lists(st.integers(0, 49), min_size=1, max_size=30), "prompt")
        asked.append(engine_request(str(number), prompt, data.draw(st.integers(1, 20), "tokens")))
        engine.add(asked[-1])
    aborted = data.draw(st.sampled_from([None, *asked]), "aborted")
    for epoch in range(3):
        for _ in range(data.draw(st.integers(1, 12), "steps")):
            engine.step()
        if epoch == 1 and aborted is not None:
            engine.abort(aborted.request_id)
        start_over(engine, 40)
    while engine.scheduler.num_unfinished or len(engine.in_flight):
        engine.step()
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    for one in asked:
        if one is not aborted:
            assert engine.outputs[one.request_id] == expected_output(one)


def test_being_computed_again_is_no_preemption() -> None:
    engine = make_engine()
    engine.add(engine_request("a", [1, 2, 3], 10))
    engine.step()
    start_over(engine, 1000)
    assert engine.scheduler.num_running == 0 and engine.scheduler.num_waiting == 1
    assert engine.scheduler.num_preemptions == 0


def test_what_does_not_fit_into_a_smaller_cache_ends_with_the_numbers_and_the_others_go_on() -> None:
    engine = make_engine(num_blocks=40)
    asked = [engine_request("fits", [1, 2, 3], 5 * BLOCK_SIZE), engine_request("large", [4] * 9 * BLOCK_SIZE, 20)]
    for one in asked:
        engine.add(one)
    engine.step()
    start_over(engine, 7)
    [ended] = engine.scheduler.end_misfits(0.0)
    assert (ended.request_id, ended.finish_reason) == ("large", "error")
    assert ended.failure is not None and "has 7 KV cache blocks" in ended.failure.message
    while engine.scheduler.num_unfinished or len(engine.in_flight):
        engine.step()
    assert engine.outputs["fits"] == expected_output(asked[0])
    assert engine.kv.num_free_blocks == 7


def test_a_request_that_costs_the_stages_again_and_again_is_ended_and_the_others_go_on() -> None:
    engine = make_engine()
    asked = [engine_request(name, [number, 2, 3], 10) for number, name in enumerate(("deadly", "waits"))]
    engine.add(asked[0])
    num_losses, ended = 0, []
    while not ended:
        # Lost with the first microbatch that holds it; nothing of it comes back.
        microbatch = engine.scheduler.schedule(0.0)
        assert microbatch is not None and num_losses < 10
        engine.kv = KVCacheManager(40, BLOCK_SIZE, True)
        engine.scheduler.start_over(engine.kv)
        if num_losses == 0:
            engine.add(asked[1])
        ended = engine.scheduler.end_misfits(0.0)
        num_losses += 1
    assert num_losses == 4 and [one.request_id for one in ended] == ["deadly"]
    assert ended[0].failure is not None and "4 times in a row" in ended[0].failure.message


def test_losses_with_a_token_in_between_end_nothing() -> None:
    engine = make_engine()
    engine.add(engine_request("a", [1, 2, 3], 20))
    for _ in range(10):
        engine.step()
        start_over(engine, 40)
        assert engine.scheduler.end_misfits(0.0) == []
