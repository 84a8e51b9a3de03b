"""The engine's statistics: every completion counts once wherever it belongs, whatever becomes of it."""

from __future__ import annotations

import msgspec
import pytest

from stageline.engine.stats import EngineStats, StatsCollector, token_count_bounds
from tests.unit.stats_examples import MAX_MODEL_LEN, microbatch, request, snapshot, update


def test_a_completion_is_timed_from_its_arrival_to_its_end() -> None:
    collector = StatsCollector(MAX_MODEL_LEN, now_s=0.0)
    collector.added(request("a", arrival_s=0.5))
    collector.updated([update("a", 3.0, num_cached_tokens=4)])
    collector.updated([update("a", 3.5)])
    collector.updated([update("a", 4.5, finish_reason="length")])
    stats = snapshot(collector).requests
    for histogram, value in (
        (stats.ttft_s, 2.5), (stats.queue_s, 0.5), (stats.prefill_s, 2.0), (stats.decode_s, 1.5),
        (stats.inference_s, 3.5), (stats.e2e_s, 4.0), (stats.tpot_s, 0.75), (stats.prompt_tokens, 10),
        (stats.generation_tokens, 3), (stats.max_tokens, 5),
    ):  # fmt: skip
        assert (histogram.num_values, histogram.total) == (1, pytest.approx(value))
    assert (stats.inter_token_s.num_values, stats.inter_token_s.total) == (2, pytest.approx(1.5))
    assert (stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generation_tokens) == (10, 4, 3)
    assert stats.num_finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_every_completion_that_ends_is_in_every_histogram_of_ends() -> None:
    collector = StatsCollector(MAX_MODEL_LEN, now_s=0.0)
    for name in "abcd":
        collector.added(request(name))
    collector.updated([update("a", 3.0, finish_reason="stop"), update("b", 3.0)])
    # One is aborted before it was scheduled, one ends by a stop string, one is never heard of again.
    collector.ended(update("c", 4.0, 0, "abort", first_scheduled_s=None, first_token_s=None), "abort")
    collector.ended(update("b", 5.0, 0, "abort"), "stop")
    stats = snapshot(collector).requests
    assert stats.num_added == 4 and stats.num_finished == {"stop": 2, "length": 0, "abort": 1, "error": 0}
    for histogram in (stats.e2e_s, stats.prompt_tokens, stats.generation_tokens, stats.max_tokens):
        assert histogram.num_values == 3
    assert stats.queue_s.num_values == stats.prefill_s.num_values == stats.ttft_s.num_values == 2


def test_news_of_what_has_ended_or_never_began_change_nothing() -> None:
    collector = StatsCollector(MAX_MODEL_LEN, now_s=0.0)
    collector.added(request("a"))
    collector.updated([update("a", 3.0, finish_reason="stop")])
    before = snapshot(collector)
    collector.updated([update("a", 4.0), update("ghost", 4.0, finish_reason="stop")])
    collector.ended(update("a", 5.0, 0, "abort"), "abort")
    assert snapshot(collector) == before


def test_tokens_that_come_together_count_as_many_gaps_as_tokens() -> None:
    collector = StatsCollector(MAX_MODEL_LEN, now_s=0.0)
    collector.added(request("a"))
    collector.updated([update("a", 3.0, num_tokens=2)])
    collector.updated([update("a", 6.0, num_tokens=3, finish_reason="length")])
    stats = snapshot(collector).requests
    assert stats.inter_token_s.num_values == stats.num_generation_tokens - 1 == 4
    assert stats.inter_token_s.total == pytest.approx(3.0)


def test_completions_of_one_request_are_told_once() -> None:
    collector = StatsCollector(MAX_MODEL_LEN, now_s=0.0)
    for name, num_completions in (("a-0", 3), ("a-1", 0), ("a-2", 0), ("b", 1)):
        collector.added(request(name, num_completions=num_completions))
    assert (snapshot(collector).requests.completions.num_values, snapshot(collector).requests.num_added) == (2, 4)


def test_microbatches_are_counted_by_kind_and_those_in_flight_by_size() -> None:
    collector = StatsCollector(MAX_MODEL_LEN, now_s=0.0)
    decode, mixed, prefill = microbatch(1, 1, 1), microbatch(1, 20), microbatch(40)
    for one in (decode, mixed, prefill):
        collector.launched(one)
    collector.completed(decode, ring_s=0.5, computing_s=0.2)
    stats = snapshot(collector, (mixed, prefill)).microbatches
    assert stats.in_flight_rows == [2, 1]
    assert (stats.tokens.num_values, stats.tokens.total) == (3, 64)
    assert {kind: ring.ring_s.num_values for kind, ring in stats.by_kind.items()} == {
        "prefill": 0, "decode": 1, "mixed": 0
    }  # fmt: skip
    assert stats.by_kind["decode"].computing_s == 0.2


def test_a_snapshot_is_a_message_and_its_stages_are_in_order() -> None:
    stats = snapshot(StatsCollector(MAX_MODEL_LEN, now_s=0.0))
    assert [stage.stage_index for stage in stats.stages] == [0, 1]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats


@pytest.mark.parametrize(("max_model_len", "bounds"), [(2, (1, 2)), (9, (1, 2, 5)), (100, (1, 2, 5, 10, 20, 50, 100))])
def test_token_bounds_reach_as_far_as_a_request_can_be_long(max_model_len, bounds) -> None:
    assert token_count_bounds(max_model_len) == bounds
