"""Chunks of a prompt that has the pipeline to itself: equally long in time, and as fast as the best size for all.

In virtual time, on stages as measured with 135 million parameters: attention makes a token after 4,000 others cost four
times as much as the first.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.cost.stage_time import MicrobatchShape, StageTimeCosts
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.microbatch import Microbatch
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.unit.simulated_stages import engine_request
from tests.unit.virtual_pipeline import VirtualPipeline

# Of all layers together.
MODEL_COSTS = {
    "small model on a core": StageTimeCosts(12e-3, 5.5e-4, 2e-7, 1e-4, 4e-7, 10e-3),
    "large model on a core": StageTimeCosts(1.0, 3e-2, 2e-6, 1e-3, 2e-6),
    "accelerator": StageTimeCosts(8e-3, 4e-5, 2e-9, 1e-5, 2e-8, 1e-3),
}
SIZES = (64, 128, 256, 512, 1024, 2048)
WARM_UP = ((1, 32, 8), (1, 512, 8), (8, 128, 16), (32, 32, 16))


def times(costs: StageTimeCosts, factor: float) -> StageTimeCosts:
    values = {name: factor * value for name, value in asdict(costs).items() if value is not None}
    return StageTimeCosts(**values)


class Lone:
    """A pipeline that has served the usual warm-up and then one prompt after the other."""

    def __init__(self, model: StageTimeCosts, num_stages: int, chunk: int | None, slower: float = 1.0) -> None:
        limits = SchedulerLimits(
            num_stages=num_stages,
            window=num_stages,
            widest_window=4 * num_stages,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            max_model_len=10_000,
            max_chunk_tokens=chunk,
            max_decode_slowdown=2.0,
        )
        self.costs = [times(model, 1 / num_stages)] * (num_stages - 1) + [times(model, slower / num_stages)]
        self.pipeline = VirtualPipeline(Scheduler(KVCacheManager(50_000, 16, False), limits), self.costs)
        for kind, (count, prompt, output) in enumerate(WARM_UP):
            for index in range(count):
                self.pipeline.arrive(engine_request(f"{kind} {index}", [1] * prompt, output))
            self.pipeline.run()

    def serve(self, num_tokens: int) -> tuple[float, list[Microbatch]]:
        """Returns: time to first token, and the chunks."""
        before = len(self.pipeline.launched)
        name = f"prompt {before}"
        self.pipeline.arrive(engine_request(name, [1] * num_tokens, 1))
        self.pipeline.run()
        return self.pipeline.records[name].time_to_first_token_s, self.pipeline.launched[before:]

    def slowest_s(self, microbatch: Microbatch) -> float:
        shape = MicrobatchShape.of_rows(microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
        return max(costs.predict_s(shape) for costs in self.costs)


@pytest.mark.parametrize("num_tokens", [1000, 4000, 8000])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("model", MODEL_COSTS.values(), ids=MODEL_COSTS)
def test_no_fixed_size_is_more_than_three_percent_faster(model, num_stages, num_tokens):
    auto_s, _ = Lone(model, num_stages, None).serve(num_tokens)
    best_s = min(Lone(model, num_stages, size).serve(num_tokens)[0] for size in SIZES)
    assert auto_s <= 1.03 * best_s


@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_wrong_size_is_much_slower(num_stages):
    """The law above is about something."""
    model = MODEL_COSTS["small model on a core"]
    auto_s, _ = Lone(model, num_stages, None).serve(4000)
    assert max(Lone(model, num_stages, size).serve(4000)[0] for size in SIZES) > 1.3 * auto_s


@pytest.mark.parametrize("num_stages", [2, 4])
def test_chunks_take_equally_long_and_end_on_block_boundaries(num_stages):
    lone = Lone(MODEL_COSTS["small model on a core"], num_stages, None)
    _, chunks = lone.serve(8000)
    times_s = [lone.slowest_s(chunk) for chunk in chunks]
    assert len(times_s) > 2 * num_stages
    # A block of 16 tokens is up to a tenth of the shortest chunk.
    assert max(times_s) < 1.15 * sum(times_s) / len(times_s)
    assert min(times_s) > 0.85 * sum(times_s) / len(times_s)
    assert all(chunk.num_computed_tokens[0] % 16 == 0 for chunk in chunks)


def test_one_stage_takes_what_it_may_at_once():
    _, chunks = Lone(MODEL_COSTS["accelerator"], 1, None).serve(2000)
    assert [chunk.num_tokens for chunk in chunks] == [2000]


def test_a_stage_that_others_wait_for_gets_larger_chunks():
    """There is less to overlap then. Equal times are not quite the best: where the last stage is the slowest, it would
    be to begin with a shorter chunk."""
    model = MODEL_COSTS["small model on a core"]
    _, level = Lone(model, 4, None).serve(4000)
    auto_s, uneven = Lone(model, 4, None, slower=3.0).serve(4000)
    assert len(uneven) < len(level)
    assert auto_s <= 1.05 * min(Lone(model, 4, size, slower=3.0).serve(4000)[0] for size in SIZES)


def test_a_size_that_was_asked_for_is_kept():
    _, chunks = Lone(MODEL_COSTS["small model on a core"], 4, 256).serve(4000)
    assert [chunk.num_tokens for chunk in chunks] == [256] * 15 + [160]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(1, 6))
def test_every_prompt_comes_to_its_end_however_many_there_are(lengths, num_stages):
    lone = Lone(MODEL_COSTS["small model on a core"], num_stages, None)
    before = len(lone.pipeline.launched)
    for index, length in enumerate(lengths):
        lone.pipeline.arrive(engine_request(f"prompt {index}", [1] * length, 1))
    lone.pipeline.run()
    chunks = lone.pipeline.launched[before:]
    assert sum(chunk.num_tokens for chunk in chunks) == sum(lengths)
    assert max(chunk.num_tokens for chunk in chunks) <= 2048
