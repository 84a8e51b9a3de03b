"""Requests with a grammar: their tokens do not depend on when masks come, and nobody else waits for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.request import EngineRequest, RequestFailure
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.unit.masked_stages import (
    FIELD,
    ControlledMasks,
    MaskedEngine,
    MaskedStages,
    every_third,
    expected_masked_output,
    release_none,
)
from tests.unit.simulated_stages import VOCAB_SIZE, engine_request, expected_output

BLOCK_SIZE = 4


def make_engine(
    num_stages: int = 2,
    num_blocks: int = 1000,
    window: int | None = None,
    chunk: int | None = None,
    look_ahead: bool = False,
):
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, True)
    limits = SchedulerLimits(
        num_stages=num_stages,
        window=window or num_stages,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=2000,
        max_chunk_tokens=chunk,
        look_ahead=look_ahead,
    )
    masks = ControlledMasks()
    stages = MaskedStages(MicrobatchLimits(num_blocks, BLOCK_SIZE, VOCAB_SIZE, 16, 64, 2000))
    engine = MaskedEngine(Scheduler(kv, limits, masks), stages, masks)
    engine.kv = kv
    return engine


def guided(request_id: str, prompt: list[int], max_tokens: int, first: int = 0, num_tokens: int = 999) -> EngineRequest:
    asked = engine_request(request_id, prompt, max_tokens)
    return msgspec.structs.replace(asked, grammar=every_third(first, num_tokens))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_tokens_do_not_depend_on_when_masks_come(data):
    """Random requests with and without grammars, masks in random order and late, preemption, aborts, any window."""
    num_blocks = data.draw(st.integers(6, 40), "blocks")
    engine = make_engine(
        num_stages=data.draw(st.integers(1, 4), "stages"),
        num_blocks=num_blocks,
        window=data.draw(st.integers(1, 5), "window"),
        chunk=data.draw(st.sampled_from([None, 1, 5]), "chunk"),
        look_ahead=data.draw(st.booleans(), "look-ahead"),
    )

    def release_some(masks: ControlledMasks) -> None:
        for _ in range(data.draw(st.integers(0, len(masks.pending)))):
            masks.release(data.draw(st.integers(0, len(masks.pending) - 1)))

    engine.compute = release_some
    asked, aborted = {}, set()
    for index in range(data.draw(st.integers(1, 8), "requests")):
        prompt = [7] * data.draw(st.integers(0, num_blocks)) + [data.draw(st.integers(0, 3))]
        max_tokens = data.draw(st.integers(1, min(30, num_blocks * BLOCK_SIZE - len(prompt))))
        request = engine_request(str(index), prompt, max_tokens)
        if data.draw(st.booleans()):
            request = guided(str(index), prompt, max_tokens, index, data.draw(st.integers(1, 30)))
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
        expected = expected_output(request) if request.grammar is None else expected_masked_output(request)
        got = engine.outputs[request_id]
        assert got == (expected[: len(got)] if request_id in aborted else expected)
    assert engine.kv.num_free_blocks == num_blocks
    assert not engine.scheduler.has_grammars and not engine.scheduler.is_waiting_for_masks


def test_a_mask_that_is_ready_goes_out_with_its_microbatch_and_no_row_is_computed_twice():
    engine = make_engine(num_stages=1)
    engine.add(guided("a", [1, 2, 3], 10))
    engine.run()
    assert engine.outputs["a"] == expected_masked_output(guided("a", [1, 2, 3], 10))
    assert [m.num_tokens for m in engine.stages.launched] == [3] + [1] * 9
    assert engine.scheduler.num_missed_masks == 0


def test_a_prompt_is_computed_while_its_grammar_is_compiled():
    engine = make_engine(num_stages=1)
    engine.compute = release_none
    engine.add(guided("a", [1] * 20, 3))
    engine.fill()
    assert [m.num_tokens for m in engine.stages.launched] == [20]
    assert engine.stages.launched[0].masked_rows == [0]


def test_a_late_mask_delays_its_own_request_only():
    """The other row of the microbatch has a token at every turn while the mask is missing; the late row is skipped."""
    engine = make_engine(num_stages=1)
    engine.compute = release_none
    engine.add(guided("late", [1, 2], 4))
    engine.add(engine_request("free", [3, 4], 50))
    for turn in range(1, 8):
        engine.step()
        assert len(engine.outputs["free"]) == turn
        assert engine.outputs["late"] == []
    assert engine.scheduler.num_missed_masks == 1
    assert all(m.num_rows == 1 for m in engine.stages.launched[1:]), "it is scheduled again only with its mask"
    engine.masks.release()
    engine.step()
    assert engine.stages.launched[-1].num_scheduled_tokens == [1, 1]
    assert len(engine.outputs["late"]) == 1
    engine.run()


def test_a_mask_that_comes_while_its_microbatch_is_under_way_is_in_time():
    engine = make_engine(num_stages=1)
    engine.compute = release_none
    engine.add(guided("a", [1, 2], 1))
    engine.fill()
    engine.masks.release()
    engine.step()
    assert engine.outputs["a"] == expected_masked_output(guided("a", [1, 2], 1))
    assert engine.scheduler.num_missed_masks == 0


def test_a_complete_grammar_ends_the_request_with_stop_also_at_max_tokens():
    engine = make_engine()
    engine.add(guided("early", [1], 20, num_tokens=5))
    engine.add(guided("just in time", [2], 5, num_tokens=5))
    engine.add(guided("cut", [3], 4, num_tokens=5))
    engine.run()
    assert engine.finished == {"early": "stop", "just in time": "stop", "cut": "length"}
    assert len(engine.outputs["early"]) == 5


def test_a_grammar_that_cannot_be_compiled_ends_its_request_and_no_other():
    engine = make_engine()
    broken = guided("broken", [1], 20)
    engine.masks.broken.add(broken.grammar.definition)
    engine.add(broken)
    engine.add(engine_request("whole", [2], 5))
    engine.run()
    assert engine.finished == {"broken": "error", "whole": "length"}
    assert engine.failures == {"broken": RequestFailure("it is broken", FIELD)}


@pytest.mark.parametrize("limits", [{"most_tokens": 4}, {"maskless_after": 5}])
def test_a_grammar_that_exceeds_its_limits_on_its_way_ends_its_request_with_an_error_and_no_other(limits, caplog):
    engine = make_engine()
    engine.add(msgspec.structs.replace(guided("over", [1], 20), grammar=every_third(0, 999, **limits)))
    engine.add(msgspec.structs.replace(guided("cut before", [1], 5), grammar=every_third(0, 999, **limits)))
    engine.add(guided("whole", [2], 8))
    engine.run()
    assert engine.finished == {"over": "error", "cut before": "length", "whole": "length"}
    assert len(engine.outputs["whole"]) == 8
    [(request_id, failure)] = engine.failures.items()
    assert request_id == "over" and failure.field == FIELD
    assert f"{FIELD} exceeded the limits of a grammar after 5 tokens of the answer" in failure.message
    assert [record.getMessage() for record in caplog.records] == [f"request over failed: {failure.message}"]
    assert engine.kv.num_free_blocks == 1000 and not engine.scheduler.has_grammars


def test_without_grammars_a_microbatch_names_no_masked_rows():
    engine = make_engine()
    engine.add(engine_request("a", [1], 3))
    engine.run()
    assert all(m.masked_rows == [] for m in engine.stages.launched)
    assert engine.masks.pending == type(engine.masks.pending)()
