"""What Prometheus reads is what was counted: every line parses, every type is right, every histogram adds up."""

from __future__ import annotations

import math

import msgspec
import pytest

from stageline.engine.stats import StatsCollector
from stageline.server.exposition import engine_families
from tests.unit.stats_examples import MAX_MODEL_LEN, microbatch, read_back, request, snapshot, update


@pytest.fixture(scope="module")
def page() -> dict:
    """Family name to family, read back from the text."""
    collector = StatsCollector(MAX_MODEL_LEN, now_s=0.0)
    for index in range(5):
        collector.added(request(f"{index}", num_prompt_tokens=3 + index))
        collector.updated([update(f"{index}", 3.0), update(f"{index}", 3.2 + index, finish_reason="length")])
    collector.launched(microbatch(1, 1))
    collector.completed(microbatch(1, 1), ring_s=0.01, computing_s=0.005)
    stats = snapshot(collector, (microbatch(1, 1), microbatch(9)))
    return read_back(engine_families({0: stats}, 'a "model"\nof mine'))


def value(page: dict, family: str, sample: str, **labels: str) -> float:
    found = [
        one.value
        for one in page[family].samples
        if one.name == sample and labels.items() <= one.labels.items()
    ]
    assert len(found) == 1, (sample, labels, found)
    return found[0]


def test_numbers_are_those_of_the_snapshot(page) -> None:
    assert value(page, "vllm:num_requests_running", "vllm:num_requests_running") == 2
    assert value(page, "vllm:num_requests_waiting", "vllm:num_requests_waiting") == 1
    assert value(page, "vllm:kv_cache_usage_perc", "vllm:kv_cache_usage_perc") == 0.4
    assert value(page, "vllm:prefix_cache_hits", "vllm:prefix_cache_hits_total") == 32
    assert value(page, "vllm:num_preemptions", "vllm:num_preemptions_total") == 3
    assert value(page, "vllm:prompt_tokens", "vllm:prompt_tokens_total") == 3 + 4 + 5 + 6 + 7
    assert value(page, "vllm:generation_tokens", "vllm:generation_tokens_total") == 10
    finished = {"finished_reason": "length"}
    assert value(page, "vllm:request_success", "vllm:request_success_total", **finished) == 5
    assert value(page, "stageline:group_requests", "stageline:group_requests", which="smallest") == 1
    assert value(page, "stageline:stage_kv_cache_used_bytes", "stageline:stage_kv_cache_used_bytes", stage="1") == 32


def test_a_histogram_of_requests_holds_every_request(page) -> None:
    name = "vllm:e2e_request_latency_seconds"
    assert value(page, name, f"{name}_count") == 5
    assert value(page, name, f"{name}_bucket", le="+Inf") == 5
    assert value(page, name, f"{name}_bucket", le="5.0") == sum(3.2 + index <= 5 for index in range(5))
    assert value(page, name, f"{name}_sum") == pytest.approx(sum(3.2 + index for index in range(5)))


def test_buckets_grow_to_the_count(page) -> None:
    histograms = [family for family in page.values() if family.type == "histogram"]
    assert len(histograms) > 15
    for family in histograms:
        series: dict = {}
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
                series.setdefault(rest, []).append((float(sample.labels["le"]), sample.value))
        counts = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert len(series) == len(counts) > 0, family.name
        for buckets, count in zip(series.values(), counts, strict=True):
            bounds, so_far = zip(*buckets, strict=True)
            assert list(bounds) == sorted(set(bounds)) and bounds[-1] == math.inf, family.name
            assert list(so_far) == sorted(so_far) and so_far[-1] == count, family.name


def test_every_family_has_help_and_a_type_and_the_common_labels(page) -> None:
    for family in page.values():
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family.name
        assert family.samples, family.name
        for sample in family.samples:
            assert sample.labels["model_name"] == 'a "model"\nof mine' and sample.labels["engine"] == "0"


# What public dashboards for vLLM and routers in front of it read.
READ_BY_OTHERS = """
    vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc
    vllm:prefix_cache_queries vllm:prefix_cache_hits vllm:num_preemptions vllm:prompt_tokens vllm:generation_tokens
    vllm:request_success vllm:time_to_first_token_seconds vllm:inter_token_latency_seconds
    vllm:time_per_output_token_seconds vllm:request_time_per_output_token_seconds vllm:e2e_request_latency_seconds
    vllm:request_queue_time_seconds vllm:request_prefill_time_seconds vllm:request_decode_time_seconds
    vllm:request_inference_time_seconds vllm:request_prompt_tokens vllm:request_generation_tokens
    vllm:request_params_n vllm:request_params_max_tokens vllm:iteration_tokens_total vllm:cache_config_info
"""


@pytest.mark.parametrize("name", READ_BY_OTHERS.split())
def test_the_names_that_others_read_are_there(page, name) -> None:
    assert name in page


def test_one_stage_has_no_links() -> None:
    stats = snapshot(StatsCollector(MAX_MODEL_LEN, now_s=0.0))
    alone = msgspec.structs.replace(stats, stages=stats.stages[:1])
    names = {family.name for family in engine_families({0: alone}, "m")}
    assert "stageline:stage_busy_seconds" in names and not any("link" in name for name in names)
