"""Who is served first, who is preempted first, who may share, and what is counted."""

from __future__ import annotations

import msgspec
import pytest

from stageline.request import EngineRequest
from tests.unit.simulated_stages import SimulatedEngine, engine_request, expected_output
from tests.unit.test_scheduler import BLOCK_SIZE, make_engine


def asking(request_id: str, prompt: list[int], max_tokens: int, **more) -> EngineRequest:
    return msgspec.structs.replace(engine_request(request_id, prompt, max_tokens), **more)


def finishing_order(engine: SimulatedEngine) -> list[str]:
    while engine.step():
        pass
    return list(engine.finished)


def test_waiting_requests_start_by_priority_then_by_arrival():
    engine = make_engine(num_stages=1, max_num_seqs=1)
    for index, priority in enumerate([0, 5, -1, 0, 5, -1]):
        engine.add(asking(str(index), [index] * 4, 3, priority=priority))
    assert finishing_order(engine) == ["2", "5", "0", "3", "1", "4"]


def test_an_important_request_overtakes_the_prompt_of_another_that_is_partly_computed():
    engine = make_engine(num_stages=1, max_num_batched_tokens=16)
    engine.add(asking("slow", [1] * 160, 1))
    engine.step()
    engine.add(asking("urgent", [2] * 48, 1, priority=-1))
    assert finishing_order(engine) == ["urgent", "slow"]
    assert [engine.outputs[name] for name in ("slow", "urgent")] == [
        expected_output(asking("slow", [1] * 160, 1)),
        expected_output(asking("urgent", [2] * 48, 1)),
    ]


def test_the_least_important_is_preempted_though_it_came_first_and_it_keeps_its_place():
    engine = make_engine(num_stages=2, num_blocks=8, prefix_caching=False)
    # The last is as important as the least, but younger: were a preempted request queued at the end, it would be later.
    lengths, priorities = {"least": 8, "middle": 7, "most": 6, "later": 5}, [0, -1, -2, 0]
    requests = [
        asking(name, [1] * length, 16, priority=priority)
        for (name, length), priority in zip(lengths.items(), priorities, strict=True)
    ]
    for request in requests:
        engine.add(request)
    assert finishing_order(engine) == ["most", "middle", "least", "later"]
    num_starts = dict.fromkeys(lengths, 0)
    for microbatch in engine.stages.launched:
        for added in microbatch.added:
            for name, length in lengths.items():
                num_starts[name] += added.num_prompt_tokens == length
    assert num_starts["most"] == 1 < num_starts["least"]
    assert engine.scheduler.num_preemptions == sum(num_starts.values()) - 4
    assert [engine.outputs[request.request_id] for request in requests] == [expected_output(r) for r in requests]


def test_a_thousand_of_ten_thousand_waiting_are_aborted_and_the_rest_keep_their_order():
    engine = make_engine(num_stages=1, max_num_seqs=1)
    for index in range(10_000):
        engine.add(asking(str(index), [1, 2], 1))
    for index in range(9_990):
        engine.abort(str(index))
    assert engine.scheduler.num_waiting == 10
    assert engine.scheduler.num_waiting_tokens == 20
    assert finishing_order(engine)[9_990:] == [str(index) for index in range(9_990, 10_000)]


@pytest.mark.parametrize(("salts", "num_shared_tokens"), [(("a", "a"), 16), (("a", "b"), 0), (("", "b"), 0)])
def test_only_requests_with_the_same_salt_share_a_prefix(salts, num_shared_tokens):
    engine = make_engine()
    prefix = [5, 6, 7, 8] * BLOCK_SIZE
    for name, salt in zip("xy", salts, strict=True):
        engine.add(asking(name, [*prefix, ord(name) % 50], 2, cache_salt=salt))
        engine.run()
    second = next(m for m in engine.stages.launched for added in m.added if added.request_number == 2)
    assert second.num_computed_tokens == [num_shared_tokens]
    assert engine.outputs["y"] == expected_output(asking("y", [*prefix, ord("y") % 50], 2))


def test_queries_and_hits_of_the_prefix_cache_are_counted_in_prompt_tokens():
    engine = make_engine(num_stages=1)
    prompt = [3] * (4 * BLOCK_SIZE)
    for name in "ab":
        engine.add(asking(name, prompt, 2))
        engine.run()
    assert engine.scheduler.num_prefix_queries_tokens == 2 * len(prompt)
    assert engine.scheduler.num_prefix_hits_tokens == 3 * BLOCK_SIZE


def test_blocks_and_waiting_tokens_are_told_while_requests_run():
    engine = make_engine(num_stages=1, num_blocks=50, prefix_caching=False, max_num_batched_tokens=8)
    engine.add(asking("long", [1] * 20, 2))
    assert engine.scheduler.num_waiting_tokens == 20
    engine.fill()
    assert engine.scheduler.num_waiting_tokens == 12
    assert (engine.scheduler.num_used_blocks, engine.scheduler.num_blocks) == (8 // BLOCK_SIZE, 50)
    engine.run()
    assert engine.scheduler.num_waiting_tokens == engine.scheduler.num_used_blocks == 0
