"""The cost model: finds the costs that made the times, never a negative one, and the window that hides slow links."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.cost.stage_time import ASSUMED_ATTENTION_TOKENS, MicrobatchShape, StageTimeCosts, StageTimeModel
from stageline.cost.window import RingTime, best_window, cycle_s
from stageline.pipeline.microbatch import Microbatch, MicrobatchResult
from stageline.scheduler.pace import Pace

COSTS = StageTimeCosts(
    fixed_s=3e-3, token_s=4e-4, prefill_attention_s=2e-8, decode_s=1e-4, context_token_s=3e-7
)


def mixed_shapes(count: int) -> list[MicrobatchShape]:
    numbers = random.Random(0)
    shapes = []
    for _ in range(count):
        decodes = [numbers.randint(1, 4000) for _ in range(numbers.randint(0, 40))]
        chunks = [(numbers.randint(0, 3000), numbers.randint(2, 600)) for _ in range(numbers.randint(0, 3))]
        rows = [(length, 1) for length in decodes] + chunks or [(5, 1)]
        shapes.append(MicrobatchShape.of_rows([length for length, _ in rows], [new for _, new in rows]))
    return shapes


def test_a_shape_counts_decodes_and_prompts_apart():
    shape = MicrobatchShape.of_rows([100, 7, 16], [1, 1, 10])
    assert shape == MicrobatchShape(12, prefill_attention=2 * 16 * 10 + 100, num_decodes=2, decode_context_tokens=107)


def test_the_costs_behind_noisy_times_are_found():
    noise = random.Random(1)
    model = StageTimeModel()
    for shape in mixed_shapes(256):
        model.observe(shape, COSTS.predict_s(shape) * noise.uniform(0.95, 1.05))
    errors = [abs(model.costs.predict_s(shape) / COSTS.predict_s(shape) - 1) for shape in mixed_shapes(300)[256:]]
    assert max(errors) < 0.05


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3000), st.floats(1e-5, 10)), min_size=4, max_size=60))
def test_no_cost_is_ever_negative_whatever_the_times(observations):
    model = StageTimeModel()
    for rows, context, elapsed_s in observations:
        model.observe(MicrobatchShape(rows, 0, rows, context * rows), elapsed_s)
    costs = model.costs
    assert min(costs.fixed_s, costs.token_s, costs.prefill_attention_s, costs.decode_s, costs.context_token_s) >= 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 500), st.integers(0, 3000), st.floats(1e-5, 10)),
                min_size=4, max_size=60))  # fmt: skip
def test_a_fit_is_found_whatever_the_times_of_prompts_and_decodes(observations):
    model = StageTimeModel()
    for decodes, prompt, context, elapsed_s in observations:
        rows = [(context, 1)] * (decodes or 1) + [(context, prompt)] * (prompt > 1)
        model.observe(MicrobatchShape.of_rows([row[0] for row in rows], [row[1] for row in rows]), elapsed_s)
    costs = model.costs
    assert costs is not None
    assert min(costs.token_s, costs.prefill_attention_s, costs.prompts_s, costs.chunk_s) >= 0
    assert costs.predict_s(MicrobatchShape(1, 0, 1, 0)) < 1e6


def test_what_attention_costs_is_assumed_until_prompts_have_told():
    """A model that took it for free would cut the first long prompt into chunks that grow ever slower."""
    model = StageTimeModel()
    for _ in range(20):
        model.observe(MicrobatchShape.of_rows([0], [100]), 0.1)
    assert model.costs.prefill_attention_s == pytest.approx(ASSUMED_ATTENTION_TOKENS * model.costs.token_s)
    assert model.costs.predict_s(MicrobatchShape.of_rows([0], [100])) == pytest.approx(0.1, rel=1e-3)


def test_a_short_chunk_s_own_cost_is_told_from_that_of_decodes():
    costs = StageTimeCosts(3e-3, 4e-4, 2e-8, 1e-4, 3e-7, prompts_s=9e-3)
    model = StageTimeModel()
    for shape in mixed_shapes(256):
        model.observe(shape, costs.predict_s(shape))
    assert model.costs.chunk_s == pytest.approx(12e-3, rel=0.1)


def test_what_is_fixed_of_a_chunk_alone_is_told_by_such_chunks():
    """Decodes wait until the weights were read; a chunk computes meanwhile."""
    numbers, model = random.Random(2), StageTimeModel()
    for _ in range(64):
        decodes = MicrobatchShape.of_rows([100] * 8, [1] * 8)
        model.observe(decodes, COSTS.predict_s(decodes) * numbers.uniform(0.97, 1.03))
        chunk = MicrobatchShape.of_rows([numbers.randrange(4000)], [numbers.randrange(64, 1024)])
        model.observe(chunk, (COSTS.predict_s(chunk) - 2e-3) * numbers.uniform(0.97, 1.03))
    assert model.costs.chunk_s == pytest.approx(1e-3, abs=1e-3)
    assert model.costs.predict_s(decodes) == pytest.approx(COSTS.predict_s(decodes), rel=0.05)


def test_a_stage_that_becomes_slower_is_predicted_so_before_long():
    model = StageTimeModel()
    for shape in mixed_shapes(300):
        model.observe(shape, COSTS.predict_s(shape))
    for shape in mixed_shapes(600)[300:]:
        model.observe(shape, 2 * COSTS.predict_s(shape))
    errors = [abs(model.costs.predict_s(shape) / (2 * COSTS.predict_s(shape)) - 1) for shape in mixed_shapes(50)]
    assert max(errors) < 0.1


def test_equal_microbatches_are_predicted_though_they_cannot_tell_the_costs_apart():
    model = StageTimeModel()
    shape = MicrobatchShape(32, 0, 32, 32 * 200)
    for _ in range(20):
        model.observe(shape, 0.02)
    assert model.costs.predict_s(shape) == pytest.approx(0.02, rel=1e-3)


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_free_hops_need_one_microbatch_per_stage(num_stages):
    assert best_window(num_stages, 4 * num_stages, COSTS, 64, 64 * 200, num_stages, outside_s=2e-4) == num_stages


def test_slow_links_widen_the_window_until_it_no_longer_pays():
    windows = [best_window(2, 16, COSTS, 64, 64 * 200, 2.0, outside_s) for outside_s in (0.0, 0.01, 0.03, 0.1)]
    assert windows == sorted(windows)
    assert windows[0] == 2 < windows[2]


@given(st.integers(1, 8), st.integers(1, 200), st.floats(0, 0.2), st.integers(0, 2000))
def test_the_window_is_never_worse_than_one_microbatch_per_stage(num_stages, num_decodes, outside_s, context):
    known = (COSTS, num_decodes, num_decodes * context, num_stages, outside_s)
    window = best_window(num_stages, 4 * num_stages, *known)
    assert num_stages <= window <= 4 * num_stages
    assert cycle_s(window, *known) <= cycle_s(num_stages, *known)


def test_hops_that_are_short_beside_a_stage_never_widen_the_window_however_free_small_microbatches_look():
    """Decodes of one size cannot show the fixed cost: fitted to them alone it may come out as nothing."""
    without_fixed_cost = StageTimeCosts(0.0, 9e-4, 0.0, 0.0, 0.0)
    assert best_window(2, 8, without_fixed_cost, 64, 64 * 200, 2.0, outside_s=2e-3) == 2


def test_what_is_not_computing_is_the_least_seen():
    ring = RingTime()
    for ring_s in (0.07, 0.052, 0.09):
        ring.observe(ring_s, computing_s=0.05, slowest_s=0.025)
    assert ring.outside_s == pytest.approx(0.002)
    assert ring.stages_worth == pytest.approx(2.0)


def decode_result(rows: int, context: int, ring_s: float) -> tuple[Microbatch, MicrobatchResult, float]:
    numbers = list(range(1, rows + 1))
    microbatch = Microbatch(0, 0, [], [], [], numbers, [context] * rows, [1] * rows, [1] * rows, list(range(rows)))
    slowest_s = COSTS.predict_s(MicrobatchShape(rows, 0, rows, rows * context))
    return microbatch, MicrobatchResult(0, 0, [1] * rows, [], [], 2 * slowest_s, slowest_s), 2 * slowest_s + ring_s


def test_a_pipeline_over_a_slow_link_gets_a_wider_window_and_over_a_fast_one_does_not():
    for outside_s, is_wider in ((0.0002, False), (0.03, True)):
        pace = Pace(2, 8)
        for step in range(40):
            pace.observe(*decode_result(28 + step % 8, 200 + step, outside_s))
        assert pace.is_due
        pace.choose_window([200] * 64)
        assert (pace.window > 2) == is_wider
        assert not pace.is_due


def test_a_decode_with_a_long_context_weighs_more_than_one_with_a_short_one():
    pace = Pace(2, 8)
    assert pace.decode_weight(10) == pace.decode_weight(100_000) == 1.0
    for step in range(40):
        pace.observe(*decode_result(8 + step % 24, 100 * (step % 9 + 1), 0.0))
    pace.choose_window([100] * 32 + [900] * 32)
    assert pace.decode_weight(100) < 1.0 < pace.decode_weight(900)
    assert pace.decode_weight(500) == pytest.approx(1.0)
